"""A problem's network as the published planners see it: layers with costs for one micro-batch on one kind of device.

Layers that share a parameter, and all between them, are one layer here, since a plan may not part them.  A network of
more states than a peer can hold is given as a chain of blocks of about equal work.

What the nodes of a network hold on a device, as planners that count memory see it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from planner.baselines.common.chain import chain_of, coarse_ends, merged
from planner.baselines.pipedream.antichains import states_of
from planner.baselines.pipedream.format import LayerGraph, Node
from planner.costs.cost_model import PriceBook
from planner.costs.layers.cost_table import Array
from planner.ir.errors import UsageError
from planner.ir.graph import producer
from planner.ir.problem import Problem
from planner.solvers.candidates.candidate import cut_positions

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


@dataclass(frozen=True, slots=True)
class Held:
    """By node of a network, in bytes.

    Attributes:
        always: parameters, their gradients and optimiser state, and buffers.
        saved: activations of one micro-batch.
        inputs: of those, what comes from other nodes: enough to compute the rest again.
    """

    always: tuple[float, ...]
    saved: tuple[float, ...]
    inputs: tuple[float, ...]


def held(book: PriceBook, found: Network, kind: str, size: int) -> Held:
    """What each node holds on a device of ``kind`` with micro-batches of ``size`` samples."""
    each = 2 + book.profile.optimizer.state_bytes_per_parameter_byte
    nodes = found.graph.nodes
    reads = [0.0] * len(nodes)
    for src, dst in found.graph.edges:
        reads[dst] += nodes[src].activation_bytes
    saved = _by_node(book.tables.at(kind, size).saved_bytes, found)
    buffers = _by_node(book.tables.graph.buffer_bytes, found)
    always = tuple(each * node.parameter_bytes + kept for node, kept in zip(nodes, buffers, strict=True))
    return Held(always, saved, tuple(min(a, b) for a, b in zip(reads, saved, strict=True)))


def _by_node(sums: Array, found: Network) -> tuple[float, ...]:
    by_layer = np.diff(sums)
    return tuple(float(by_layer[list(found.members[node.name])].sum()) for node in found.graph.nodes)
