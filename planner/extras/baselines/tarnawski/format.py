"""The JSON instances of dnn-partitioning: operators or layers with latencies on two kinds of device, and their edges.

Tarnawski, Phanishayee, Devanur, Mahajan, Nina Paravecino, "Efficient algorithms for device placement of DNN graph
operators", NeurIPS 2020; the format is described in the README of the public code (msr-fiddle/dnn-partitioning):

    {"maxSizePerFPGA": bytes, "maxFPGAs": 6, "maxCPUs": 1,
     "nodes": [{"id": 1, "supportedOnFpga": 1, "cpuLatency": 1.5, "fpgaLatency": 0.2, "isBackwardNode": 0,
                "colorClass": 7, "size": bytes, "name": "conv1"}, ...],
     "edges": [{"sourceId": 1, "destId": 2, "cost": 0.05}, ...]}

"FPGA" stands for any accelerator, and times are in one unit that the format leaves open: milliseconds in the published
files, and so here.  ``name``, ``size``, ``colorClass`` and ``isBackwardNode`` may be left out; other keys are not read.
Beyond what the original reads, numbers may stand in quotes and blanks or a byte-order mark before the file.  As there,
a cycle, an edge from a backward to a forward node, and two costs on edges out of one node are faults; an edge given
twice counts once.

What the planner may not divide are :class:`Blocks`, as in the public code (throughput-dp/dp.cpp).  Nodes of one colour
are one block, with their backward nodes.  Order comes from the forward pass: an edge between forward nodes, and for a
colour of backward nodes alone the reverse of the backward edges that touch it.  Blocks on a cycle become one.  A block
that takes no time, and whose only neighbour shares every value that it makes or reads, moves to that neighbour: no
device gets more to do, and every pipeline stays one.  It may need memory there, so that it stays where it is if it
occupies some and not everything fits one device; the public code moves it all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import numpy as np

from planner.extras.baselines.common.ideals import Bools, Floats, MergedNodes, contract
from planner.extras.baselines.common.reading import (
    FileText,
    Item,
    edges_of,
    numbered_nodes,
    parse_object,
    read_text,
    require_no_cycle,
)
from planner.ir.graph import bits_of

_SAME_COST = 1e-6
"""Costs of one node's edges may differ by this much, as in the original."""


@dataclass(frozen=True, slots=True)
class TarnawskiNode:
    """An operator or layer.

    Attributes:
        number: its ``id`` in the file.
        name: ``node<id>`` if the file gives none.
        accelerator_ms, cpu_ms: latency there.
        transfer_ms: of its output between an accelerator and host memory; 0 if nothing reads it.
        size_bytes: what it occupies on an accelerator.
        on_accelerator: whether it may run there.
        backward: whether it belongs to the backward pass.
        colour: nodes of one colour stay on one device; None: it has one for itself.
    """

    number: int
    name: str
    accelerator_ms: float
    cpu_ms: float
    transfer_ms: float
    size_bytes: float
    on_accelerator: bool
    backward: bool
    colour: int | None


@dataclass(frozen=True, slots=True)
class TarnawskiInstance:
    """A whole file.

    Attributes:
        source: the file's name, for messages.
        accelerators, cpus: how many there are.
        memory_bytes: of each accelerator.
        nodes: in the file's order, which need not be topological.
        edges: pairs of indices into ``nodes``, each once; there is no cycle.
    """

    source: str
    accelerators: int
    cpus: int
    memory_bytes: float
    nodes: tuple[TarnawskiNode, ...]
    edges: tuple[tuple[int, int], ...]


def read(path: str | Path) -> TarnawskiInstance:
    """The instance in a file.

    Raises:
        MissingFileError: there is no such file, or it cannot be read.
        FormatError: it breaks the format; the text names the place.
    """
    file = read_text(path)
    return parse(file.text, file.source)


def parse(text: str, source: str = "instance.json") -> TarnawskiInstance:
    """The instance in a text; ``source`` is what messages call it.

    Raises:
        FormatError: it breaks the format; the text names the place.
    """
    file = FileText(source, text)
    top = parse_object(file)
    items, index = numbered_nodes(top)
    edges, costs = _edges(top, index)
    nodes = tuple(_node(item, costs.get(position, 0.0)) for position, item in enumerate(items))
    _require_order(top, nodes, edges)
    accelerators = top.whole("maxFPGAs", least=0)
    cpus = top.whole("maxCPUs", least=0)
    return TarnawskiInstance(file.source, accelerators, cpus, top.number("maxSizePerFPGA"), nodes, edges)


def _node(item: Item, transfer_ms: float) -> TarnawskiNode:
    number = item.whole("id")
    name = item.text("name", f"node{number}")
    named = item.named(name)
    return TarnawskiNode(
        number=number,
        name=name,
        accelerator_ms=named.number("fpgaLatency"),
        cpu_ms=named.number("cpuLatency"),
        transfer_ms=transfer_ms,
        size_bytes=named.number("size", 0.0),
        on_accelerator=named.flag("supportedOnFpga"),
        backward=named.flag("isBackwardNode", False),
        colour=named.whole("colorClass") if named.has("colorClass") else None,
    )


def _edges(top: Item, index: Mapping[int, int]) -> tuple[tuple[tuple[int, int], ...], dict[int, float]]:
    """The edges, and the cost of what each node sends."""
    edges: dict[tuple[int, int], None] = {}
    costs: dict[int, float] = {}
    for item, src, dst in edges_of(top, index):
        cost = item.number("cost")
        if abs(costs.setdefault(src, cost) - cost) > _SAME_COST:
            raise item.fault(
                f"two costs on edges out of node {item.whole('sourceId')}",
                [f"{costs[src]:g} before, {cost:g} here"],
                ["a node sends one output: give its edges one cost"],
            )
        edges[src, dst] = None
    return tuple(edges), costs


def _require_order(top: Item, nodes: Sequence[TarnawskiNode], edges: Sequence[tuple[int, int]]) -> None:
    for src, dst in edges:
        if nodes[src].backward and not nodes[dst].backward:
            raise top.fault(
                "an edge from a backward to a forward node",
                [f"{nodes[src].number} ({nodes[src].name}) to {nodes[dst].number} ({nodes[dst].name})"],
                ["mark the nodes by 'isBackwardNode', or remove the edge"],
            )
    require_no_cycle(top, [f"{node.number} ({node.name})" for node in nodes], edges)


@dataclass(frozen=True, slots=True)
class Blocks:
    """What a stage takes whole: nodes that stay together, in topological order.

    Attributes:
        nodes: of each block, indices into the instance.
        successors: of each block, in the forward pass.
        accelerator_ms, cpu_ms, size_bytes: of each block; 0 on an accelerator where it may not run.
        cpu_only: whether it may not run on an accelerator.
        values: (bits of the blocks that make or read it, cost) of each value of two blocks or more.
    """

    nodes: tuple[tuple[int, ...], ...]
    successors: tuple[tuple[int, ...], ...]
    accelerator_ms: Floats
    cpu_ms: Floats
    size_bytes: Floats
    cpu_only: Bools
    values: tuple[tuple[int, float], ...]

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.nodes)

    def accelerator_load(self, inside: int) -> float:
        """Load of a set of blocks on an accelerator, memory not looked at; infinite if it may not run there."""
        listed = list(bits_of(inside))
        if self.cpu_only[listed].any():
            return inf
        crossing = sum(cost for bits, cost in self.values if bits & inside and bits & ~inside)
        return float(self.accelerator_ms[listed].sum()) + crossing

    def cpu_load(self, inside: int) -> float:
        """Load of a set of blocks on a CPU."""
        return float(self.cpu_ms[list(bits_of(inside))].sum())

    def size(self, inside: int) -> float:
        """Bytes of a set of blocks on an accelerator."""
        return float(self.size_bytes[list(bits_of(inside))].sum())


_FRESH_COLOUR = 2**31 - 1 - 12_345_678
"""Nodes without a colour get numbers below this one, as in the public code: orders of blocks depend on them."""

_PASSED_OVER = {32: (4, 37), 64: (4, 37), 96: (2, 100, 40, 137, 46, 142), 192: (2, 100, 40, 137, 46, 142)}
"""By number of nodes, those whose edges the ``-pipeDream`` row leaves out: the public code knows its own BERT-24 and
GNMT by their size, and their inputs by number."""


@dataclass(frozen=True, slots=True)
class Coloured:
    """Blocks, and the colour that each has in the public code."""

    blocks: Blocks
    colours: tuple[int, ...]


def blocks_of(
    instance: TarnawskiInstance,
    memory_bytes: float,
    together: Iterable[Sequence[int]] = (),
    move_bytes: bool = False,
    ordered: bool = True,
) -> Coloured:
    """The blocks of an instance.

    Args:
        memory_bytes: of an accelerator.
        together: nodes that stay together besides those of a colour.
        move_bytes: move blocks that take no time also where memory may be short.
        ordered: whether devices take contiguous sets; if not, blocks have no successors, and cycles do no harm.
    """
    colour = colours_of(instance)
    edges = _order(instance, colour) if ordered else []
    groups = [*_classes(colour), *together]
    careful = sum(node.size_bytes for node in instance.nodes) > memory_bytes and not move_bytes
    while True:
        merged = contract(len(instance.nodes), edges, groups)
        blocks = _blocks(instance, merged)
        moves = _moves(blocks, careful, ordered)
        if not moves:
            return Coloured(blocks, tuple(min(colour[node] for node in members) for members in merged.blocks))
        for block, home in moves:
            groups.append((merged.blocks[home][0], merged.blocks[block][0]))
            for node in merged.blocks[block]:
                colour[node] = colour[merged.blocks[home][0]]


def colours_of(instance: TarnawskiInstance) -> list[int]:
    """The colour of each node; fresh ones where the file gives none."""
    colours: list[int] = []
    fresh = _FRESH_COLOUR
    for node in instance.nodes:
        fresh -= node.colour is None
        colours.append(fresh if node.colour is None else node.colour)
    return colours


def crowded_groups(instance: TarnawskiInstance) -> list[tuple[int, ...]]:
    """Nodes that the ``-pipeDream`` row keeps together: those that send within one biconnected component.

    PipeDream plans for chains, so that parallel branches are first merged.
    """
    import networkx as nx  # costs 0.2 s to load, and only this row needs it

    colour = colours_of(instance)
    ordered = sorted(set(colour))
    backward = {each: ordered[-1] + 1 + number for number, each in enumerate(ordered)}
    merged = [backward[c] if node.backward else c for c, node in zip(colour, instance.nodes, strict=True)]
    left_out = _PASSED_OVER.get(len(instance.nodes), ())
    edges = {(merged[src], merged[dst]) for src, dst in instance.edges}
    kept = {(src, dst) for src, dst in edges if src != dst and src not in left_out}
    senders: list[tuple[int, ...]] = []
    for component in nx.biconnected_component_edges(nx.Graph(sorted(kept))):
        pairs = {pair for src, dst in component for pair in ((src, dst), (dst, src))}
        senders.append(tuple(sorted({src for src, dst in pairs & kept})))
    at = {vertex: [n for n, merged_into in enumerate(merged) if merged_into == vertex] for vertex in set(merged)}
    return [tuple(node for sender in group for node in at[sender]) for group in senders]


def depth_first(coloured: Coloured, largest_first: bool = False) -> tuple[int, ...]:
    """The public code's linear order: of the blocks that are ready one that became so last, larger colours first.

    Args:
        largest_first: whether to begin with the largest colour of those that need nothing, or the smallest.  There
            their order is that of a hash table, which each contraction reverses: ``-pipeDream`` has one more than
            ``-linearize``.
    """
    successors = coloured.blocks.successors
    key = coloured.colours.__getitem__
    missing = [0] * len(successors)
    for followers in successors:
        for after in followers:
            missing[after] += 1
    sources = (block for block, count in enumerate(missing) if not count)
    ready = sorted(sources, key=key, reverse=not largest_first)
    order: list[int] = []
    while ready:
        order.append(ready.pop())
        for after in sorted(successors[order[-1]], key=key):
            missing[after] -= 1
            if not missing[after]:
                ready.append(after)
    return tuple(order)


def _classes(colour: Sequence[int]) -> list[tuple[int, ...]]:
    classes: dict[int, list[int]] = {}
    for node, each in enumerate(colour):
        classes.setdefault(each, []).append(node)
    return [tuple(nodes) for nodes in classes.values()]


def _order(instance: TarnawskiInstance, colour: Sequence[int]) -> list[tuple[int, int]]:
    nodes = instance.nodes
    forward = {each for each, node in zip(colour, nodes, strict=True) if not node.backward}
    edges = [(src, dst) for src, dst in instance.edges if not nodes[dst].backward]
    mirrored = [(dst, src) for src, dst in instance.edges if nodes[src].backward and nodes[dst].backward]
    return edges + [(a, b) for a, b in mirrored if not {colour[a], colour[b]} <= forward]


def _blocks(instance: TarnawskiInstance, merged: MergedNodes) -> Blocks:
    nodes = instance.nodes

    def sums(numbers: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.bincount(merged.block_of, weights=numbers, minlength=len(merged.blocks)).astype(np.float64)

    cpu_only = sums([not node.on_accelerator for node in nodes]) > 0
    touched = [1 << block for block in merged.block_of]
    for src, dst in instance.edges:
        touched[src] |= 1 << merged.block_of[dst]
    values: dict[int, float] = {}
    for node, bits in zip(nodes, touched, strict=True):
        if node.transfer_ms > 0 and bits & (bits - 1):
            values[bits] = values.get(bits, 0.0) + node.transfer_ms
    return Blocks(
        nodes=merged.blocks,
        successors=merged.successors,
        accelerator_ms=np.where(cpu_only, 0.0, sums([node.accelerator_ms for node in nodes])),
        cpu_ms=sums([node.cpu_ms for node in nodes]),
        size_bytes=sums([node.size_bytes for node in nodes]),
        cpu_only=cpu_only,
        values=tuple(values.items()),
    )


def _moves(blocks: Blocks, careful: bool, ordered: bool) -> list[tuple[int, int]]:
    """(block, neighbour to move it to), no block in two of them."""
    near = [sum(1 << after for after in followers) for followers in blocks.successors]
    for block, followers in enumerate(blocks.successors):
        for after in followers:
            near[after] |= 1 << block
    sharing = [((1 << blocks.num_blocks) - 1) ^ 1 << block for block in range(blocks.num_blocks)]
    for bits, _ in blocks.values:
        for block in bits_of(bits):
            sharing[block] &= bits
    idle = (blocks.accelerator_ms == 0) & (blocks.cpu_ms == 0) & ~blocks.cpu_only
    if careful:
        idle &= blocks.size_bytes == 0
    moves: list[tuple[int, int]] = []
    moved = 0
    for block in np.flatnonzero(idle).tolist():
        homes = sharing[block]
        if ordered and near[block]:
            homes &= near[block] if near[block].bit_count() == 1 else 0
        homes &= ~moved
        if homes and not moved >> block & 1:
            home = next(bits_of(homes))
            moves.append((block, home))
            moved |= 1 << block | 1 << home
    return moves
