"""Ideals of a directed acyclic graph: what may be done when a stage ends, as bits in a Python integer.

A set of nodes is an *ideal* if it holds every predecessor of its nodes.  The stages of a pipeline, in order, are the
differences of growing ideals, so that the ideals are the places to cut.  Node ``v`` is bit ``1 << v``.

Two ways to see them:

* :meth:`Ideals.between` walks lazily through those above a given one whose extra weight stays below a limit, each with
  its sums: a *window*, and what a search that knows an upper bound needs;
* :func:`lattice_of` lists all of them once, with the steps that add one node, as arrays.

Where nodes must stay together, :func:`contract` comes first: it merges them, and numbers what comes of it in
topological order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.ir.graph import bits_of, topological_order

Bools = NDArray[np.bool_]
Ints = NDArray[np.intp]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ideals:
    """The ideals of a DAG.

    Attributes:
        successors: of each node.
        needs: of each node, the bits of its predecessors.
        weights: of each node, any number of quantities to sum; the first one limits windows and is not negative.
    """

    successors: tuple[tuple[int, ...], ...]
    needs: tuple[int, ...]
    weights: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, successors: Sequence[Iterable[int]], weights: Sequence[Sequence[float]] | None = None) -> Ideals:
        """From successors alone; without ``weights`` every node weighs 1."""
        needs = [0] * len(successors)
        for node, next_nodes in enumerate(successors):
            for after in next_nodes:
                needs[after] |= 1 << node
        each = weights if weights is not None else [(1.0,)] * len(successors)
        return cls(tuple(tuple(sorted(set(s))) for s in successors), tuple(needs), tuple(tuple(w) for w in each))

    @property
    def full(self) -> int:
        """All nodes."""
        return (1 << len(self.successors)) - 1

    def addable(self, ideal: int) -> int:
        """The nodes outside whose predecessors are all inside."""
        return sum(1 << node for node, need in enumerate(self.needs) if not ideal >> node & 1 and not need & ~ideal)

    def between(self, ideal: int, max_weight: float) -> Iterator[tuple[int, tuple[float, ...]]]:
        """The ideals above ``ideal`` that weigh at most ``max_weight`` more, by growing number of nodes.

        Yields:
            Each such ideal once, ``ideal`` itself left out, with the sums of all weights of what was added.
        """
        level = {ideal: (self.addable(ideal), (0.0,) * len(self.weights[0]) if self.weights else ())}
        while level:
            above: dict[int, tuple[int, tuple[float, ...]]] = {}
            for bits, (addable, sums) in level.items():
                for node in bits_of(addable):
                    grown = bits | 1 << node
                    weight = self.weights[node]
                    if grown in above or sums[0] + weight[0] > max_weight:
                        continue
                    added = tuple(a + b for a, b in zip(sums, weight, strict=True))
                    above[grown] = (self._then_addable(grown, addable ^ 1 << node, node), added)
            yield from ((bits, sums) for bits, (_, sums) in above.items())
            level = above

    def _then_addable(self, grown: int, rest: int, node: int) -> int:
        for after in self.successors[node]:
            if not self.needs[after] & ~grown:
                rest |= 1 << after
        return rest


@dataclass(frozen=True, slots=True)
class Lattice:
    """Every ideal of a DAG.

    Attributes:
        bits: the ideals, by growing number of nodes: the empty set first, all nodes last.
        below, above: indices into ``bits``, one pair for each step that adds a node.
    """

    bits: tuple[int, ...]
    below: Ints
    above: Ints

    def members(self, num_nodes: int) -> Bools:
        """``[ideal, node]``: which nodes are inside."""
        return members(self.bits, num_nodes)


def lattice_of(ideals: Ideals, most: int) -> Lattice | None:
    """All ideals, or None if there are more than ``most``."""
    bit_sets = [0]
    below: list[int] = []
    above: list[int] = []
    level: dict[int, tuple[int, int]] = {0: (0, ideals.addable(0))}
    needs = ideals.needs
    successors = ideals.successors
    while level:
        grown_level: dict[int, tuple[int, int]] = {}
        for bits, (index, addable) in level.items():
            rest = addable
            while rest:
                low = rest & -rest
                rest ^= low
                grown = bits | low
                entry = grown_level.get(grown)
                if entry is None:
                    then = addable ^ low
                    for after in successors[low.bit_length() - 1]:
                        if not needs[after] & ~grown:
                            then |= 1 << after
                    entry = grown_level[grown] = (len(bit_sets), then)
                    bit_sets.append(grown)
                below.append(index)
                above.append(entry[0])
        if len(bit_sets) > most:
            return None
        level = grown_level
    return Lattice(tuple(bit_sets), np.array(below, dtype=np.intp), np.array(above, dtype=np.intp))


def chain_of(order: Sequence[int]) -> Lattice:
    """The ideals of a chain: the beginnings of ``order``."""
    bits = [0]
    for node in order:
        bits.append(bits[-1] | 1 << node)
    below = np.arange(len(order), dtype=np.intp)
    return Lattice(tuple(bits), below, below + 1)


def members(ideals: Sequence[int], num_nodes: int) -> Bools:
    """``[ideal, node]``: which nodes are inside."""
    width = max(1, -(-num_nodes // 8))
    packed = np.frombuffer(b"".join(bits.to_bytes(width, "little") for bits in ideals), np.uint8)
    unpacked = np.unpackbits(packed.reshape(len(ideals), width), axis=1, count=num_nodes, bitorder="little")
    return unpacked.view(np.bool_)


@dataclass(frozen=True, slots=True)
class MergedNodes:
    """Nodes merged into blocks.

    Attributes:
        block_of: the block of each node.
        blocks: the nodes of each block, ascending; blocks are in topological order.
        successors: of each block.
    """

    block_of: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    successors: tuple[tuple[int, ...], ...]


def contract(num_nodes: int, edges: Iterable[tuple[int, int]], together: Iterable[Sequence[int]]) -> MergedNodes:
    """Merges the nodes of each class in ``together``, and then all that lie on a common cycle.

    Blocks come in an order that is topological, else by their first node.
    """
    from scipy.sparse import csr_array  # late: few networks have nodes that stay together
    from scipy.sparse.csgraph import connected_components

    listed = list(edges)
    joined = (pair for group in together for a, b in pairwise(group) for pair in ((a, b), (b, a)))  # a cycle of two
    src, dst = np.array([*listed, *joined], dtype=np.intp).reshape(-1, 2).T
    links = csr_array((np.ones(len(src)), (src, dst)), shape=(num_nodes, num_nodes))
    labels = connected_components(links, connection="strong")[1].tolist()
    first: dict[int, int] = {}
    keys = [first.setdefault(label, node) for node, label in enumerate(labels)]
    return _in_order(keys, {(keys[a], keys[b]) for a, b in listed if keys[a] != keys[b]})


def _in_order(keys: Sequence[int], edges: Iterable[tuple[int, int]]) -> MergedNodes:
    """Blocks (named by their first node) in topological order, of those that are ready always the one named first."""
    named = sorted(set(keys))
    place = {key: index for index, key in enumerate(named)}
    pairs = [(place[src], place[dst]) for src, dst in edges]
    number = {named[index]: position for position, index in enumerate(topological_order(len(named), pairs))}
    block_of = tuple(number[key] for key in keys)
    blocks: list[list[int]] = [[] for _ in number]
    for node, block in enumerate(block_of):
        blocks[block].append(node)
    successors: list[list[int]] = [[] for _ in number]
    for src, dst in pairs:
        successors[number[named[src]]].append(number[named[dst]])
    return MergedNodes(block_of, tuple(map(tuple, blocks)), tuple(tuple(sorted(after)) for after in successors))
