"""A problem's network as the published planners see it: layers with costs for one micro-batch on one kind of device.

Layers that share a parameter, and all between them, are one layer here, since a plan may not part them.  A network of
more states than a peer can hold is given as a chain of blocks of about equal work.

:class:`NodeBytes` is what its nodes hold on a device, as planners that count memory see it; :class:`ChainCosts` is a
network in the order its layers run, on devices of several types: what DAPPLE and BaPipe plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from planner.costs.cost_model import CostModel
from planner.costs.layers.cost_table import Array, SizeTable
from planner.extras.baselines.pipedream.format import LayerGraph, LayerNode, states_of
from planner.ir.errors import MissingMeasurementError, UsageError
from planner.ir.graph import Graph, producer
from planner.ir.problem import Problem
from planner.solvers.candidates.feasibility import cut_positions, may_part_ties


@dataclass(frozen=True, slots=True)
class ChainCosts:
    """Layers in the order they run, with their costs for one mini-batch.

    Attributes:
        names: of the layers.
        forward_s, backward_s: by layer, on a device of speed 1.
        saved_bytes: by layer, what it keeps from forward to backward.
        parameter_bytes: by layer.
        crossing_bytes: by layer, what crosses a cut after it, one way; 0 after the last.
    """

    names: tuple[str, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    saved_bytes: tuple[float, ...]
    parameter_bytes: tuple[float, ...]
    crossing_bytes: tuple[float, ...]

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.names)

    def scaled(self, factor: float) -> ChainCosts:
        """The chain for ``factor`` mini-batches; parameters stay."""
        seconds = [tuple(factor * s for s in column) for column in (self.forward_s, self.backward_s)]
        sizes = [tuple(factor * s for s in column) for column in (self.saved_bytes, self.crossing_bytes)]
        return ChainCosts(self.names, seconds[0], seconds[1], sizes[0], self.parameter_bytes, sizes[1])


def chain_of(graph: LayerGraph) -> ChainCosts:
    """A graph's layers in their order; a value counts at every cut between its layer and its last reader."""
    order = graph.in_order()
    place = {index: position for position, index in enumerate(order)}
    last_read = {index: place[index] for index in order}
    for src, dst in graph.edges:
        if src in place and dst in place:
            last_read[src] = max(last_read[src], place[dst])
    changes = [0.0] * (len(order) + 1)
    for index in order:
        changes[place[index]] += graph.nodes[index].activation_bytes
        changes[last_read[index]] -= graph.nodes[index].activation_bytes
    nodes = [graph.nodes[index] for index in order]
    return ChainCosts(
        tuple(node.name for node in nodes),
        tuple(node.forward_s for node in nodes),
        tuple(node.backward_s for node in nodes),
        tuple(node.activation_bytes for node in nodes),
        tuple(node.parameter_bytes for node in nodes),
        tuple(max(0.0, size) for size in accumulate(changes[: len(order)])),
    )


def sums(values: Sequence[float]) -> tuple[float, ...]:
    """Running sums, from 0: those of layers i to j - 1 are ``[j] - [i]``."""
    return tuple(accumulate(values, initial=0.0))


def require_positive(**values: float) -> None:
    """Raises :class:`UsageError` if a number is not above 0."""
    wrong = [f"{name} {value:g}" for name, value in values.items() if not value > 0]
    if wrong:
        raise UsageError("a number must be above 0", wrong)


def coarse_ends(chain: ChainCosts, blocks: int) -> tuple[int, ...]:
    """Ends of at most ``blocks`` blocks of about equal work, cut where least crosses: the last layer of each."""
    if chain.num_layers <= blocks:
        return tuple(range(chain.num_layers))
    work = sums([f + b for f, b in zip(chain.forward_s, chain.backward_s, strict=True)])
    ends = []
    for block in range(1, blocks):
        low, high = (work[-1] * share / (blocks - 1) for share in (block - 1, block))
        inside = [k for k in range(chain.num_layers - 1) if low < work[k + 1] <= high]
        if inside:
            ends.append(min(inside, key=lambda k: chain.crossing_bytes[k]))
    return (*ends, chain.num_layers - 1)


def merged(chain: ChainCosts, ends: Iterable[int]) -> ChainCosts:
    """The chain with one layer for each of ``ends``: the layers up to it and after the one before."""
    bounds = [0, *(end + 1 for end in ends)]
    spans = list(pairwise(bounds))

    def added(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(sum(values[first:last]) for first, last in spans)

    return ChainCosts(
        tuple(chain.names[last - 1] for _, last in spans),
        added(chain.forward_s),
        added(chain.backward_s),
        added(chain.saved_bytes),
        added(chain.parameter_bytes),
        tuple(chain.crossing_bytes[last - 1] for _, last in spans),
    )


def priced(cost_model: CostModel, kind: str, size: int) -> tuple[SizeTable, float]:
    """Costs of all layers on a device of ``kind``, and the factor that makes them those of ``size`` samples.

    The factor is 1, unless the profile says nothing of that size on one device: planners that deal a micro-batch to
    replicas take costs to be in proportion to samples.

    Raises:
        MissingMeasurementError: it says nothing of fewer either.
    """
    try:
        return cost_model.tables.at(kind, size), 1.0
    except MissingMeasurementError:
        largest = cost_model.tables.largest_measured(kind)
        if size <= largest:
            raise
        return cost_model.tables.at(kind, largest), size / largest


_WORK = 2e9
"""Pairs of states times pairs of machines that a peer's programme may take."""

_FEWEST_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class PricedNetwork:
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


def network(problem: Problem, cost_model: CostModel, kind: str, size: int, prepares: bool = False) -> PricedNetwork:
    """All layers at ``size`` samples on a device of ``kind``.

    Args:
        prepares: whether what hosts prepare counts as forward of the first layer that needs it.

    Raises:
        MissingMeasurementError: the profile says nothing about that size.
    """
    graph = problem.graph
    bounds = cut_positions(graph, may_part_ties(problem))
    edges, crossing = _crossing(graph, bounds, size)
    table, factor = priced(cost_model, kind, size)
    parameters = cost_model.tables.graph.parameter_bytes

    def preparing(first: int, last: int) -> float:
        until, before = (cost_model.preparations.seconds(kind, range(end), size) for end in (last, first))
        return until - before if prepares else 0.0

    nodes = tuple(
        LayerNode(
            name=f"n{block}",
            description="layer",
            forward_s=factor * max(0.0, float(table.forward_s[last] - table.forward_s[first])) + preparing(first, last),
            backward_s=factor * max(0.0, float(table.backward_s[last] - table.backward_s[first])),
            activation_bytes=crossing[block],
            parameter_bytes=float(parameters[last] - parameters[first]),
        )
        for block, (first, last) in enumerate(pairwise(bounds))
    )
    members = {f"n{block}": tuple(range(first, last)) for block, (first, last) in enumerate(pairwise(bounds))}
    return PricedNetwork(LayerGraph("the profile's network", nodes, edges), members)


def _crossing(graph: Graph, bounds: Sequence[int], size: int) -> tuple[tuple[tuple[int, int], ...], list[float]]:
    """Which blocks between ``bounds`` read from which, and by block the bytes that others read."""
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
    return tuple(edges), crossing


def searchable(net: PricedNetwork, machines: int) -> PricedNetwork:
    """The network, or its blocks if it has too many states to be searched on the machines."""
    ends = block_ends(net, machines)
    return net if ends is None else blocks_at(net, ends)


def block_ends(net: PricedNetwork, machines: int) -> tuple[int, ...] | None:
    """Where blocks end, in the order of layers, if there are too many states for the machines; None if not."""
    most = max(_FEWEST_BLOCKS, int((_WORK / max(1, machines) ** 2) ** 0.5))
    try:
        if states_of(net.graph).num_states <= most:
            return None
    except UsageError:  # more states than can be held at all
        pass
    return coarse_ends(chain_of(net.graph), most)


def blocks_at(net: PricedNetwork, ends: Sequence[int]) -> PricedNetwork:
    """The network as a chain of blocks that end at ``ends``."""
    fine = chain_of(net.graph)
    chain = merged(fine, ends)
    costs = zip(chain.forward_s, chain.backward_s, chain.crossing_bytes, chain.parameter_bytes, strict=True)
    nodes = tuple(LayerNode(f"n{k}", "layer", *cost) for k, cost in enumerate(costs))
    bounds = pairwise([0, *(end + 1 for end in ends)])
    members = {f"n{k}": net.layers(fine.names[first:last]) for k, (first, last) in enumerate(bounds)}
    edges = tuple((k, k + 1) for k in range(len(nodes) - 1))
    return PricedNetwork(LayerGraph(net.graph.source, nodes, edges), members)


@dataclass(frozen=True, slots=True)
class NodeBytes:
    """By node of a network, in bytes.

    Attributes:
        always: parameters, their gradients and optimiser state, and buffers.
        saved: activations of one micro-batch.
        inputs: of those, what comes from other nodes: enough to compute the rest again.
    """

    always: tuple[float, ...]
    saved: tuple[float, ...]
    inputs: tuple[float, ...]


def held(cost_model: CostModel, net: PricedNetwork, kind: str, size: int) -> NodeBytes:
    """What each node holds on a device of ``kind`` with micro-batches of ``size`` samples."""
    each = 2 + cost_model.profile.optimizer.state_bytes_per_parameter_byte
    nodes = net.graph.nodes
    reads = [0.0] * len(nodes)
    for src, dst in net.graph.edges:
        reads[dst] += nodes[src].activation_bytes
    table, factor = priced(cost_model, kind, size)
    saved = _by_node(factor * table.saved_bytes, net)
    buffers = _by_node(cost_model.tables.graph.buffer_bytes, net)
    always = tuple(each * node.parameter_bytes + kept for node, kept in zip(nodes, buffers, strict=True))
    return NodeBytes(always, saved, tuple(min(a, b) for a, b in zip(reads, saved, strict=True)))


def _by_node(sums: Array, net: PricedNetwork) -> tuple[float, ...]:
    by_layer = np.diff(sums)
    return tuple(float(by_layer[list(net.members[node.name])].sum()) for node in net.graph.nodes)
