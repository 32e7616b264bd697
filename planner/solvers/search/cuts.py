"""Places to cut the network between two stages, as ideals of its DAG, and what certainly crosses there.

An ideal is a set of layers that holds, with a layer, all it reads from; the stages of a pipeline are the differences of
a growing chain of ideals.  All ideals are looked at while there are at most ``MANY_IDEALS``; else the prefixes of the
graph's own order of layers.  Left out are ideals that part layers which share a parameter, and those that part a layer
from a mere extension of it (``_follows``): cutting there moves no work and sends no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.costs.stage import PriceBook
from planner.costs.tables import Array
from planner.ir.box import Box, intersect, volume, whole
from planner.ir.graph import BYTES_PER_ELEMENT, Graph, Layer, TensorSpec, producer
from planner.layers import kind as kind_named

Flags = NDArray[np.bool_]
Numbers = NDArray[np.int64]

MANY_IDEALS = 640


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """What a stage hands to the one that starts at its end, at least; a row for each end and way to get there.

    Attributes:
        cut: where the stage ends.
        linked: the next stage certainly reads from it; has_gradient: and a gradient comes back.
        forward_bytes, backward_bytes: per sample.
    """

    cut: Numbers
    linked: Flags
    has_gradient: Flags
    forward_bytes: Array
    backward_bytes: Array


@dataclass(frozen=True, slots=True, eq=False)
class Cuts:
    """All cuts, the empty ideal first and the whole network last, by growing number of layers.

    Attributes:
        members: 1 where a layer (second index) is in the ideal (first index).
        inside: whether an ideal (first) is a part of another (second), and smaller.
        columns, column: what crosses, and the row of ``columns`` that a stage from cut ``a`` to cut ``b`` has.
        num_left_out: ideals that were seen and not kept.
        complete: whether all ideals were looked at.
    """

    members: Array
    inside: Flags
    columns: Columns
    column: Numbers
    num_left_out: int
    complete: bool

    @property
    def last(self) -> int:
        """The number of the whole network."""
        return len(self.members) - 1

    def sums(self, by_layer: Array) -> Array:
        """The sum over each ideal."""
        return np.asarray(self.members @ by_layer)

    def layers(self, first: int, last: int) -> tuple[int, ...]:
        """The layers between two cuts, by index."""
        return tuple(int(n) for n in np.flatnonzero(self.members[last] > self.members[first]))

    def stage_of(self, chain: tuple[int, ...]) -> tuple[int, ...]:
        """The stage of each layer in the pipeline of stages between the cuts of ``chain``."""
        counted = sum(self.members[cut] for cut in chain[1:])
        return tuple(len(chain) - 1 - int(count) for count in np.asarray(counted))


def cuts_of(book: PriceBook, most: int = MANY_IDEALS) -> Cuts:
    """The places to cut that are worth trying."""
    graph = book.profile.graph
    reads = _reads(graph)
    follows = _followers(graph, _free_layers(book))
    ties = _ties(graph)
    found = _all_ideals(reads, follows, most)
    complete = found is not None
    if found is None:
        found = [(1 << count) - 1 for count in range(len(graph.layers) + 1)]
    kept = [ideal for ideal in found if _may_cut(ideal, ties, follows)]
    return _cuts(graph, reads, kept, len(found) - len(kept), complete)


def thinned(cuts: Cuts, graph: Graph, most: int, weights: Array) -> Cuts:
    """A chain of at most ``most`` cuts, spread evenly by ``weights`` of the layers, for a first quick look."""
    weight = cuts.sums(weights)
    chain, wanted = [0], 1
    for cut in range(1, cuts.last):
        if weight[cut] * most >= wanted * weight[-1] and cuts.inside[chain[-1], cut]:
            chain.append(cut)
            wanted = int(weight[cut] * most / weight[-1]) + 1
    packed = [_packed(cuts.members[cut]) for cut in (*chain, cuts.last)]
    return _cuts(graph, _reads(graph), packed, 0, False)


def _packed(member: Array) -> int:
    return int.from_bytes(np.packbits(member.astype(bool), bitorder="little").tobytes(), "little")


def _cuts(graph: Graph, reads: list[int], kept: list[int], num_left_out: int, complete: bool) -> Cuts:
    kept = sorted(kept, key=lambda ideal: (ideal.bit_count(), ideal))
    count = len(graph.layers)
    members = np.zeros((len(kept), count))
    for number, ideal in enumerate(kept):
        text = np.frombuffer(ideal.to_bytes(count // 8 + 1, "little"), dtype=np.uint8)
        members[number] = np.unpackbits(text, bitorder="little")[:count]
    sizes = members.sum(axis=1)
    if complete:
        inside = (members @ members.T == sizes[:, None]) & (sizes[:, None] < sizes[None, :])
    else:  # a chain
        inside = np.triu(np.ones((len(kept), len(kept)), dtype=bool), 1)
    starts = [list(_first_pieces(kept, number, reads, complete)) for number in range(len(kept) - 1)]
    columns, column = _columns(graph, members, starts)
    return Cuts(members, inside, columns, column, num_left_out, complete)


def _reads(graph: Graph) -> list[int]:
    """By layer, the layers it reads from, as a bit set."""
    index = {layer.name: position for position, layer in enumerate(graph.layers)}
    made_by = [{index[producer(v)] for v in layer.inputs if producer(v) in index} for layer in graph.layers]
    return [sum(1 << position for position in found) for found in made_by]


def _all_ideals(reads: list[int], follows: Mapping[int, int], most: int) -> list[int] | None:
    """Every ideal in which followers are where their leaders are; None if there are more than ``most``."""
    leads: dict[int, int] = {}
    for follower, leader in sorted(follows.items()):
        leads[leader] = leads.get(leader, 0) | 1 << follower
    found = {0}
    pending = [0]
    for ideal in pending:
        for layer, needed in enumerate(reads):
            if ideal >> layer & 1 or needed & ~ideal:
                continue
            grown, added = ideal | 1 << layer, layer
            while leads.get(added, 0):
                added = leads[added].bit_length() - 1  # a leader has one follower
                grown |= 1 << added
            if grown not in found:
                if len(found) > most:
                    return None
                found.add(grown)
                pending.append(grown)
    return pending


def _may_cut(ideal: int, ties: list[int], follows: Mapping[int, int]) -> bool:
    if any(ideal & tie and tie & ~ideal for tie in ties):
        return False
    return not any(ideal >> leader & 1 and not ideal >> follower & 1 for follower, leader in follows.items())


def _ties(graph: Graph) -> list[int]:
    """Sets of layers that share a parameter."""
    users: dict[str, int] = {}
    for index, layer in enumerate(graph.layers):
        for name in layer.parameters:
            users[name] = users.get(name, 0) | 1 << index
    return [found for found in set(users.values()) if found.bit_count() > 1]


def _first_pieces(ideals: list[int], number: int, reads: list[int], complete: bool) -> Iterator[int]:
    """Sets of layers of which the stage that starts at an ideal certainly has one."""
    ideal = ideals[number]
    if not complete:
        yield ideals[number + 1] & ~ideal
        return
    for layer, needed in enumerate(reads):
        if not ideal >> layer & 1 and not needed & ~ideal:
            yield 1 << layer


def _columns(graph: Graph, members: Array, starts: list[list[int]]) -> tuple[Columns, Numbers]:
    values = graph.values()
    index = {layer.name: position for position, layer in enumerate(graph.layers)}
    read = [tuple(_read(layer, values, graph.samples)) for layer in graph.layers]
    count = len(members)
    column = np.zeros((count, count), dtype=np.int64)
    rows: list[NDArray[np.float64]] = []
    total = 0
    for b in range(1, count - 1):
        least = np.full((4, count), np.inf)  # linked, has_gradient, bytes forward and backward, by first cut
        for piece in starts[b]:
            needed: dict[str, float] = {}
            for layer in _bits(piece):
                for value, num_bytes in read[layer]:
                    if producer(value) in index and not piece >> index[producer(value)] & 1:
                        needed[value] = max(needed.get(value, 0.0), num_bytes)
            found = np.zeros((4, count))
            for value, num_bytes in needed.items():
                made_here = 1 - members[:, index[producer(value)]]
                gradient = float(values[value].is_float)
                found += np.outer((1.0, gradient, num_bytes, num_bytes * gradient), made_here)
            least = np.minimum(least, found)
        unique, inverse = np.unique(least[:, :b].T, axis=0, return_inverse=True)
        rows.append(np.column_stack([np.full(len(unique), b), unique]))
        column[:b, b] = total + inverse.reshape(-1)
        total += len(unique)
    table = np.concatenate(rows) if rows else np.zeros((1, 5))
    columns = Columns(
        table[:, 0].astype(np.int64), table[:, 1] > 0, table[:, 2] > 0, table[:, 3].copy(), table[:, 4].copy()
    )
    return columns, column


def _bits(found: int) -> Iterator[int]:
    while found:
        lowest = found & -found
        yield lowest.bit_length() - 1
        found ^= lowest


def _read(layer: Layer, values: Mapping[str, TensorSpec], samples: int) -> Iterator[tuple[str, float]]:
    """The bytes per sample that ``layer`` reads of each of its inputs; 0 for what has no sample dim."""
    inputs = tuple(values[name] for name in layer.inputs)
    relation = kind_named(layer.kind)
    work: Box = whole(relation.work(layer, inputs).shape)
    for name, spec, box in zip(layer.inputs, inputs, relation.input_boxes(layer, inputs, work), strict=True):
        inside = intersect(box, whole(spec.shape))
        size = volume(inside) * BYTES_PER_ELEMENT[spec.dtype] if inside is not None else 0
        yield name, size / samples if spec.has_samples else 0.0


def _followers(graph: Graph, free: Iterable[bool]) -> dict[int, int]:
    """Layers that are a mere extension of another, and that other: they cost nothing, read only what it makes for them
    alone, and hand on no more bytes than they read.
    """
    index = {layer.name: position for position, layer in enumerate(graph.layers)}
    values = graph.values()
    readers: dict[str, list[int]] = {}
    made_by: dict[int, set[str]] = {}
    for position, layer in enumerate(graph.layers):
        for value in dict.fromkeys(layer.inputs):
            readers.setdefault(value, []).append(position)
            if producer(value) in index:
                made_by.setdefault(index[producer(value)], set()).add(value)
    found = {}
    for position, (layer, costs_nothing) in enumerate(zip(graph.layers, free, strict=True)):
        made = [value for value in dict.fromkeys(layer.inputs) if value not in graph.inputs]
        if not costs_nothing or len(made) != 1 or position == len(graph.layers) - 1:
            continue
        leader = index[producer(made[0])]
        size = sum(spec.num_bytes for spec in layer.outputs)
        alone = readers[made[0]] == [position] and made_by[leader] == {made[0]}
        if alone and size <= values[made[0]].num_bytes:
            found[position] = leader
    return found


def _free_layers(book: PriceBook) -> list[bool]:
    measured: dict[str, bool] = {layer.name: not layer.parameters for layer in book.profile.graph.layers}
    for found in book.profile.measurements.values():
        for m in found:
            costs = (m.forward_s, m.backward_s, m.backward_input_s, m.backward_weight_s, m.saved_bytes)
            if any(costs) or m.workspace_bytes:
                measured[m.layer] = False
    return list(measured.values())
