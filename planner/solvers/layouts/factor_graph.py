"""A labelled graph: each node takes one of its options; nodes and edges cost, and may take of a few budgets.

    minimise    sum_v c_v(x_v) + sum_uv c_uv(x_u, x_v)
    such that   sum_v m_v(x_v) + sum_uv m_uv(x_u, x_v) + max_v w_v(x_v) <= budget     one row for each resource (a
                                                                                     rank's memory)

m is held as long as the stage is; w is workspace, which one node after another takes and gives back.  An option that
costs infinity is forbidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Labelling = tuple[int, ...]
"""The option of each node."""
NodePair = tuple[int, int]
Kept = Sequence[NDArray[np.intp]]
"""By node, the numbers of the options that are left."""

ROUNDING = 1e-9
"""Relative: sums of floats in different order differ by less."""


@dataclass(frozen=True, slots=True, eq=False)
class LabelledGraph:
    """Nodes ``0 ... n - 1`` with options.

    Attributes:
        node_cost: by node, ``[options]``.
        edge_cost: by edge (u, v) with u < v, ``[options of u, options of v]``.
        node_memory: by node, ``[options, resources]``; empty if nothing is limited.
        edge_memory: by edge, ``[options of u, options of v, resources]``; edges that take nothing may be missing.
        budget: ``[resources]``.
        workspace: by node, ``[options, resources]``; empty if no node takes any.
    """

    node_cost: tuple[Array, ...]
    edge_cost: Mapping[NodePair, Array]
    node_memory: tuple[Array, ...] = ()
    edge_memory: Mapping[NodePair, Array] = field(default_factory=dict)
    budget: Array = field(default_factory=lambda: np.zeros(0))
    workspace: tuple[Array, ...] = ()

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.node_cost)

    @property
    def num_options(self) -> tuple[int, ...]:
        """Number of options of each node."""
        return tuple(len(cost) for cost in self.node_cost)

    @property
    def edges(self) -> list[NodePair]:
        """Those that cost or take anything, in order."""
        return sorted({*self.edge_cost, *self.edge_memory})

    @property
    def is_limited(self) -> bool:
        """Whether there is a budget."""
        return bool(self.node_memory) and len(self.budget) > 0

    @property
    def least_workspace(self) -> Array:
        """``[resources]``: what every assignment needs of it."""
        least = np.zeros(len(self.budget))
        for needs in self.workspace:
            least = np.maximum(least, needs.min(axis=0))
        return least

    def cost(self, assignment: Sequence[int]) -> float:
        """What an assignment costs."""
        nodes = sum(float(cost[k]) for cost, k in zip(self.node_cost, assignment, strict=True))
        return nodes + sum(float(cost[assignment[u], assignment[v]]) for (u, v), cost in self.edge_cost.items())

    def memory(self, assignment: Sequence[int]) -> Array:
        """What an assignment takes of each resource, workspace included."""
        total = np.zeros(len(self.budget))
        for usage, k in zip(self.node_memory, assignment, strict=True):
            total += usage[k]
        for (u, v), usage in self.edge_memory.items():
            total += usage[assignment[u], assignment[v]]
        if not self.workspace:
            return total
        most: Array = np.max([needs[k] for needs, k in zip(self.workspace, assignment, strict=True)], axis=0)
        return total + most

    def fits(self, assignment: Sequence[int]) -> bool:
        """Whether an assignment stays within the budget."""
        return not self.is_limited or bool(np.all(self.memory(assignment) <= self.budget * (1 + ROUNDING)))

    def priced(self, prices: Array) -> LabelledGraph:
        """The unlimited graph that costs cost + memory at ``prices`` (``[resources]``), workspace apart."""
        nodes = tuple(cost + usage @ prices for cost, usage in zip(self.node_cost, self.node_memory, strict=True))
        edges = dict(self.edge_cost)
        for edge, usage in self.edge_memory.items():
            extra = usage @ prices
            edges[edge] = edges[edge] + extra if edge in edges else extra
        return LabelledGraph(nodes, edges)

    def restricted(self, kept: Kept) -> LabelledGraph:
        """The graph with the options ``kept`` of each node, in their order."""
        return LabelledGraph(
            tuple(cost[options] for cost, options in zip(self.node_cost, kept, strict=True)),
            {(u, v): cost[np.ix_(kept[u], kept[v])] for (u, v), cost in self.edge_cost.items()},
            tuple(usage[options] for usage, options in zip(self.node_memory, kept, strict=False)),
            {(u, v): usage[np.ix_(kept[u], kept[v])] for (u, v), usage in self.edge_memory.items()},
            self.budget,
            tuple(needs[options] for needs, options in zip(self.workspace, kept, strict=False)),
        )

    def without_slack_resources(self) -> LabelledGraph:
        """The graph without resources that another one limits at least as much (like ranks of a symmetric group)."""
        if not self.is_limited:
            return self
        held = (*self.node_memory, *(usage.reshape(-1, len(self.budget)) for usage in self.edge_memory.values()))
        rows = np.concatenate([*held, *self.workspace])
        kept: list[int] = []
        for resource in sorted(range(len(self.budget)), key=lambda r: -float(rows[:, r].sum())):
            stricter = (other for other in kept if self.budget[other] <= self.budget[resource])
            if not any(np.all(rows[:, other] >= rows[:, resource]) for other in stricter):
                kept.append(resource)
        kept.sort()
        return LabelledGraph(
            self.node_cost,
            self.edge_cost,
            tuple(usage[:, kept] for usage in self.node_memory),
            {edge: usage[..., kept] for edge, usage in self.edge_memory.items()},
            self.budget[kept],
            tuple(needs[:, kept] for needs in self.workspace),
        )

    def part(self, nodes: Sequence[int]) -> LabelledGraph:
        """The graph of ``nodes`` alone (ascending), renumbered from 0, with the edges among them, nothing limited."""
        number = {node: position for position, node in enumerate(nodes)}
        within = [(u, v) for u, v in self.edge_cost if u in number and v in number]
        return LabelledGraph(
            tuple(self.node_cost[node] for node in nodes),
            {(number[u], number[v]): self.edge_cost[u, v] for u, v in within},
        )
