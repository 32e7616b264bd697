"""What the planner of Tarnawski et al. may not divide, as in the public code (throughput-dp/dp.cpp).

Nodes of one colour are one block, with their backward nodes.  Order comes from the forward pass: an edge between
forward nodes, and for a colour of backward nodes alone the reverse of the backward edges that touch it.  Blocks on a
cycle become one.  A block that takes no time, and whose only neighbour shares every value that it makes or reads, moves
to that neighbour: no device gets more to do, and every pipeline stays one.  It may need memory there, so that it stays
where it is if it occupies some and not everything fits one device; the public code moves it all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.formats.dnn_partitioning import Instance
from planner.peers.contraction import Contraction, contract
from planner.peers.ideals import bits_of
from planner.peers.max_load import Blocks

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
    instance: Instance,
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
            return Coloured(blocks, tuple(min(colour[node] for node in found) for found in merged.blocks))
        for block, home in moves:
            groups.append((merged.blocks[home][0], merged.blocks[block][0]))
            for node in merged.blocks[block]:
                colour[node] = colour[merged.blocks[home][0]]


def colours_of(instance: Instance) -> list[int]:
    """The colour of each node; fresh ones where the file gives none."""
    colours: list[int] = []
    fresh = _FRESH_COLOUR
    for node in instance.nodes:
        fresh -= node.colour is None
        colours.append(fresh if node.colour is None else node.colour)
    return colours


def crowded_groups(instance: Instance) -> list[tuple[int, ...]]:
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
    at = {vertex: [n for n, found in enumerate(merged) if found == vertex] for vertex in set(merged)}
    return [tuple(node for sender in group for node in at[sender]) for group in senders]


def depth_first(coloured: Coloured, largest_first: bool = False) -> tuple[int, ...]:
    """The public code's linear order: of the blocks that are ready one that became so last, larger colours first.

    Args:
        largest_first: whether to begin with the largest colour of those that need nothing, or the smallest.  There
            their order is that of a hash table, which each contraction reverses: ``-pipeDream`` has one more than
            ``-linearize``.
    """
    successors, key = coloured.blocks.successors, coloured.colours.__getitem__
    missing = [0] * len(successors)
    for found in successors:
        for after in found:
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
    found: dict[int, list[int]] = {}
    for node, each in enumerate(colour):
        found.setdefault(each, []).append(node)
    return [tuple(nodes) for nodes in found.values()]


def _order(instance: Instance, colour: Sequence[int]) -> list[tuple[int, int]]:
    nodes = instance.nodes
    forward = {each for each, node in zip(colour, nodes, strict=True) if not node.backward}
    edges = [(src, dst) for src, dst in instance.edges if not nodes[dst].backward]
    mirrored = [(dst, src) for src, dst in instance.edges if nodes[src].backward and nodes[dst].backward]
    return edges + [(a, b) for a, b in mirrored if not {colour[a], colour[b]} <= forward]


def _blocks(instance: Instance, merged: Contraction) -> Blocks:
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
    near = [sum(1 << after for after in found) for found in blocks.successors]
    for block, found in enumerate(blocks.successors):
        for after in found:
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
