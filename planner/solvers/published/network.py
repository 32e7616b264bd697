"""A problem's network as the published planners see it: layers with costs for one micro-batch on one kind of device.

Layers that share a parameter, and all between them, are one layer here, since a plan may not part them.  A network of
more states than a peer can hold is given as a chain of blocks of about equal work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.costs.stage import PriceBook
from planner.formats.pipedream import LayerGraph, Node
from planner.ir.errors import UsageError
from planner.ir.graph import producer
from planner.ir.problem import Problem
from planner.peers.antichains import states_of
from planner.peers.chain import chain_of, coarse_ends, merged
from planner.solvers.candidates.space import cut_positions

_WORK = 2e9
"""Pairs of states times pairs of machines that a peer's programme may take."""

_FEWEST_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class Network:
    """A peer's instance.

    Attributes:
        graph: nodes are named by number.
        members: by name of a node, the layers it stands for, by index in the profile's graph.
    """

    graph: LayerGraph
    members: Mapping[str, tuple[int, ...]]

    def layers(self, nodes: Sequence[str]) -> tuple[int, ...]:
        """The layers that nodes stand for."""
        return tuple(sorted(index for node in nodes for index in self.members[node]))


def network(problem: Problem, book: PriceBook, kind: str, size: int, prepares: bool = False) -> Network:
    """All layers at ``size`` samples on a device of ``kind``.

    Args:
        prepares: whether what hosts prepare counts as forward of the first layer that needs it.

    Raises:
        MissingMeasurementError: the profile says nothing about that size.
    """
    graph = problem.profile.graph
    bounds = cut_positions(graph)
    block_of = [block for block, (first, last) in enumerate(pairwise(bounds)) for _ in range(first, last)]
    number = {layer.name: index for index, layer in enumerate(graph.layers)}
    sizes = {name: spec.at(size, graph.samples).num_bytes for name, spec in graph.values().items()}
    edges: dict[tuple[int, int], None] = {}
    read: dict[str, int] = {}
    for index, layer in enumerate(graph.layers):
        for value in layer.inputs:
            src = number.get(producer(value))
            if src is not None and block_of[src] != block_of[index]:
                edges[block_of[src], block_of[index]] = None
                read[value] = block_of[src]
    crossing = [0.0] * (len(bounds) - 1)
    for value, block in read.items():
        crossing[block] += sizes[value]
    table, parameters = book.tables.at(kind, size), book.tables.graph.parameter_bytes

    def preparing(first: int, last: int) -> float:
        until, before = (book.preparations.seconds(kind, range(end), size) for end in (last, first))
        return until - before if prepares else 0.0

    nodes = tuple(
        Node(
            name=f"n{block}",
            description="layer",
            forward_s=max(0.0, float(table.forward_s[last] - table.forward_s[first])) + preparing(first, last),
            backward_s=max(0.0, float(table.backward_s[last] - table.backward_s[first])),
            activation_bytes=crossing[block],
            parameter_bytes=float(parameters[last] - parameters[first]),
        )
        for block, (first, last) in enumerate(pairwise(bounds))
    )
    members = {f"n{block}": tuple(range(first, last)) for block, (first, last) in enumerate(pairwise(bounds))}
    return Network(LayerGraph("the profile's network", nodes, tuple(edges)), members)


def searchable(found: Network, machines: int) -> Network:
    """The network, or its blocks if it has too many states to be searched on so many machines."""
    ends = block_ends(found, machines)
    return found if ends is None else blocks_at(found, ends)


def block_ends(found: Network, machines: int) -> tuple[int, ...] | None:
    """Where blocks end, in the order of layers, if there are too many states for so many machines; None if not."""
    most = max(_FEWEST_BLOCKS, int((_WORK / max(1, machines) ** 2) ** 0.5))
    try:
        if states_of(found.graph).num_states <= most:
            return None
    except UsageError:  # more states than can be held at all
        pass
    return coarse_ends(chain_of(found.graph), most)


def blocks_at(found: Network, ends: Sequence[int]) -> Network:
    """The network as a chain of blocks that end at ``ends``."""
    fine = chain_of(found.graph)
    chain = merged(fine, ends)
    costs = zip(chain.forward_s, chain.backward_s, chain.crossing_bytes, chain.parameter_bytes, strict=True)
    nodes = tuple(Node(f"n{k}", "layer", *cost) for k, cost in enumerate(costs))
    bounds = pairwise([0, *(end + 1 for end in ends)])
    members = {f"n{k}": found.layers(fine.names[first:last]) for k, (first, last) in enumerate(bounds)}
    edges = tuple((k, k + 1) for k in range(len(nodes) - 1))
    return Network(LayerGraph(found.graph.source, nodes, edges), members)
