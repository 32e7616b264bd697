"""A labelled graph: each node takes one of its options; nodes and edges cost, and may take of a few budgets.

    minimise    sum_v c_v(x_v) + sum_uv c_uv(x_u, x_v)
    such that   sum_v m_v(x_v) + sum_uv m_uv(x_u, x_v) <= budget         one row for each resource (a rank's memory)

An option that costs infinity is forbidden.

Improves an assignment that fits, one node at a time: the cheapest option that still fits, until none is cheaper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Assignment = tuple[int, ...]
"""The option of each node."""
Edge = tuple[int, int]

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
    """

    node_cost: tuple[Array, ...]
    edge_cost: Mapping[Edge, Array]
    node_memory: tuple[Array, ...] = ()
    edge_memory: Mapping[Edge, Array] = field(default_factory=dict)
    budget: Array = field(default_factory=lambda: np.zeros(0))

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.node_cost)

    @property
    def num_options(self) -> tuple[int, ...]:
        """Number of options of each node."""
        return tuple(len(cost) for cost in self.node_cost)

    @property
    def is_limited(self) -> bool:
        """Whether there is a budget."""
        return bool(self.node_memory) and len(self.budget) > 0

    def cost(self, assignment: Sequence[int]) -> float:
        """What an assignment costs."""
        nodes = sum(float(cost[k]) for cost, k in zip(self.node_cost, assignment, strict=True))
        return nodes + sum(float(cost[assignment[u], assignment[v]]) for (u, v), cost in self.edge_cost.items())

    def memory(self, assignment: Sequence[int]) -> Array:
        """What an assignment takes of each resource."""
        total = np.zeros(len(self.budget))
        for taken, k in zip(self.node_memory, assignment, strict=True):
            total += taken[k]
        for (u, v), taken in self.edge_memory.items():
            total += taken[assignment[u], assignment[v]]
        return total

    def fits(self, assignment: Sequence[int]) -> bool:
        """Whether an assignment stays within the budget."""
        return not self.is_limited or bool(np.all(self.memory(assignment) <= self.budget * (1 + ROUNDING)))

    def priced(self, cost_weight: float, prices: Array) -> LabelledGraph:
        """The unlimited graph that costs ``cost_weight`` x cost + memory at ``prices`` (``[resources]``)."""
        nodes = tuple(
            _weighted(cost, cost_weight) + taken @ prices
            for cost, taken in zip(self.node_cost, self.node_memory, strict=True)
        )
        edges = {edge: _weighted(cost, cost_weight) for edge, cost in self.edge_cost.items()}
        for edge, taken in self.edge_memory.items():
            extra = taken @ prices
            edges[edge] = edges[edge] + extra if edge in edges else extra
        return LabelledGraph(nodes, edges)

    def restricted(self, kept: Sequence[NDArray[np.intp]]) -> LabelledGraph:
        """The graph with the options ``kept`` of each node, in their order."""
        return LabelledGraph(
            tuple(cost[options] for cost, options in zip(self.node_cost, kept, strict=True)),
            {(u, v): cost[np.ix_(kept[u], kept[v])] for (u, v), cost in self.edge_cost.items()},
            tuple(taken[options] for taken, options in zip(self.node_memory, kept, strict=False)),
            {(u, v): taken[np.ix_(kept[u], kept[v])] for (u, v), taken in self.edge_memory.items()},
            self.budget,
        )

    def without_slack_resources(self) -> LabelledGraph:
        """The graph without resources that another one limits at least as much (like ranks of a symmetric group)."""
        if not self.is_limited:
            return self
        rows = np.concatenate(
            [*self.node_memory, *(m.reshape(-1, len(self.budget)) for m in self.edge_memory.values())]
        )
        kept: list[int] = []
        for resource in sorted(range(len(self.budget)), key=lambda r: -float(rows[:, r].sum())):
            stricter = (other for other in kept if self.budget[other] <= self.budget[resource])
            if not any(np.all(rows[:, other] >= rows[:, resource]) for other in stricter):
                kept.append(resource)
        kept.sort()
        return LabelledGraph(
            self.node_cost,
            self.edge_cost,
            tuple(taken[:, kept] for taken in self.node_memory),
            {edge: taken[..., kept] for edge, taken in self.edge_memory.items()},
            self.budget[kept],
        )

    def part(self, nodes: Sequence[int]) -> LabelledGraph:
        """The graph of ``nodes`` alone (ascending), renumbered from 0, with the edges among them."""
        number = {node: position for position, node in enumerate(nodes)}
        within = [(u, v) for u, v in self.edge_cost if u in number and v in number]
        held = [(u, v) for u, v in self.edge_memory if u in number and v in number]
        return LabelledGraph(
            tuple(self.node_cost[node] for node in nodes),
            {(number[u], number[v]): self.edge_cost[u, v] for u, v in within},
            tuple(self.node_memory[node] for node in nodes) if self.node_memory else (),
            {(number[u], number[v]): self.edge_memory[u, v] for u, v in held},
            self.budget,
        )


def _weighted(cost: Array, weight: float) -> Array:
    """``weight`` x cost, where what is forbidden stays forbidden at weight 0."""
    return cost * weight if weight else np.where(np.isinf(cost), np.inf, 0.0)


_ROUNDS = 20


def polished(graph: LabelledGraph, assignment: Assignment) -> Assignment:
    """``assignment``, or a cheaper one that fits as well."""
    chosen = list(assignment)
    taken = graph.memory(chosen)
    around: list[list[tuple[int, int]]] = [[] for _ in range(graph.num_nodes)]
    for u, v in sorted({*graph.edge_cost, *graph.edge_memory}):
        around[u].append((u, v))
        around[v].append((u, v))
    for _ in range(_ROUNDS):
        changed = False
        for node in range(graph.num_nodes):
            cost, memory = _alternatives(graph, chosen, node, around[node])
            now = chosen[node]
            after = taken + memory - memory[now]
            fits = np.all(after <= graph.budget * (1 + ROUNDING), axis=-1)
            cost = np.where(fits, cost, np.inf)
            best = int(np.argmin(cost))
            if cost[best] < cost[now] - ROUNDING * abs(cost[now]):
                chosen[node], taken, changed = best, after[best], True
        if not changed:
            break
    return tuple(chosen)


def _alternatives(
    graph: LabelledGraph, chosen: list[int], node: int, around: list[tuple[int, int]]
) -> tuple[Array, Array]:
    """What each option of ``node`` costs and takes, its edges included, all else as chosen."""
    cost, memory = graph.node_cost[node].copy(), graph.node_memory[node].copy()
    for u, v in around:
        at = (slice(None), chosen[v]) if u == node else (chosen[u], slice(None))
        if (u, v) in graph.edge_cost:
            cost += graph.edge_cost[u, v][at]
        if (u, v) in graph.edge_memory:
            memory += graph.edge_memory[u, v][at]
    return cost, memory
