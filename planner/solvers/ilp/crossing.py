"""What a stage certainly hands to the next one, and what that takes.

The stage behind a cut has at least the layers up to the next cut.  What these read of the stage before is sent in one
message; what later layers read is more, and depends on where the stage ends: it is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from planner.costs.columns import Flags
from planner.costs.network import transfer_s, without_pairs
from planner.costs.tables import Array
from planner.ir.box import intersect, volume, whole
from planner.ir.cluster import ACROSS_HOSTS, WITHIN_HOST, Cluster, Link
from planner.ir.graph import BYTES_PER_ELEMENT, Graph, Layer, TensorSpec, producer
from planner.layers import kind as kind_named
from planner.solvers.ilp.groups import Group


@dataclass(frozen=True, slots=True, eq=False)
class Crossing:
    """Matrices over pairs of cuts: a stage from cut ``a`` to cut ``b``, and the stage that starts at ``b``.

    Attributes:
        linked, linked_back: the second certainly reads from the first; and sends a gradient back.
        forward_bytes, backward_bytes: per sample, at least.
    """

    linked: Flags
    linked_back: Flags
    forward_bytes: Array
    backward_bytes: Array

    @classmethod
    def of(cls, graph: Graph, cuts: tuple[int, ...]) -> Crossing:
        """Between stages that start and end at ``cuts``, positions in the list of layers with both ends."""
        made_at = {layer.name: position for position, layer in enumerate(graph.layers)}
        values = graph.values()
        shape = (len(cuts), len(cuts))
        found = cls(np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool), np.zeros(shape), np.zeros(shape))
        for b in range(1, len(cuts) - 1):
            needed: dict[str, float] = {}
            for layer in graph.layers[cuts[b] : cuts[b + 1]]:
                for value, num_bytes in _read(layer, values, graph.samples):
                    if made_at.get(producer(value), cuts[b]) < cuts[b]:
                        needed[value] = max(needed.get(value, 0.0), num_bytes)
            for value, num_bytes in needed.items():
                holders = slice(int(np.searchsorted(cuts, made_at[producer(value)], side="right")))
                found.linked[holders, b] = True
                found.forward_bytes[holders, b] += num_bytes
                if values[value].is_float:
                    found.linked_back[holders, b] = True
                    found.backward_bytes[holders, b] += num_bytes
        return found

    def least(self, bytes_per_sample: Array) -> Array:
        """By cut: the least that a linked stage hands over there; stages that start later hand over less."""
        return np.asarray(np.where(self.linked, bytes_per_sample, np.inf).min(axis=0))


Piece = tuple[str, float]
"""A message as the prices see it: (class of its link, samples)."""


@dataclass(slots=True, eq=False)
class Messages:
    """What messages between groups take at least, by (first cut, last cut) of the stage before.

    An F waits for all its pieces and a B for all its gradients: the slowest of those to (or from) one member behind,
    whichever member that is.

    Attributes:
        overhead_s: of the executor per action, by kind of device.
    """

    cluster: Cluster
    crossing: Crossing
    micro_batches: tuple[int, ...]
    overhead_s: Mapping[str, float]
    _links: Mapping[str, Link] = field(init=False, repr=False)
    _travels: dict[tuple[str, float, bool], Array] = field(init=False, default_factory=dict, repr=False)
    _known: dict[object, Array] = field(init=False, default_factory=dict, repr=False)
    _waits: dict[object, tuple[Array, Array]] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        links = without_pairs(self.cluster).links
        self._links = {name: _never_falling(link) for name, link in links.items()}

    def there_s(self, source: Group, destination: Group) -> Array:
        """From the end of an F of the stage (a, b) to the start of the F behind it."""
        return self._message_s(source, destination, True)

    def back_s(self, source: Group, destination: Group) -> Array:
        """From the end of a B of the stage behind to the start of the B of the stage (a, b)."""
        return self._message_s(source, destination, False)

    def wires_s(self, source: Group, destination: Group) -> tuple[Array, Array]:
        """What all messages of full micro-batches take longer, on one wire, than the first there and the last back.

        One way, beside which the last F and B behind still have to be done; and both ways, which share a wire where the
        link is not duplex, and beside which nothing more is certain, not even the overhead of the stage behind.
        """
        pieces = self._pieces(source, destination, self.micro_batches[0])
        found = self._waits.get(pieces)
        if found is None:
            one_way, both = zip(*(self._waits_s(member) for member in pieces), strict=True)
            found = self._waits[pieces] = (np.minimum.reduce(one_way), np.minimum.reduce(both))
        overhead_s = 2 * min(self.overhead_s.get(member.kind, 0.0) for member in destination.classes)
        return found[0], np.maximum(found[1] - overhead_s, 0.0)

    def _waits_s(self, pieces: frozenset[Piece]) -> tuple[Array, Array]:
        """The same for one member behind."""
        count = self.micro_batches.count(self.micro_batches[0])
        ways = [(self._travel_s(piece, True), self._travel_s(piece, False)) for piece in sorted(pieces)]
        first, last = (np.maximum.reduce(way) for way in zip(*ways, strict=True))
        both = np.zeros_like(first)
        for (link, _), (there, back) in zip(sorted(pieces), ways, strict=True):
            if not self._links[link].duplex:
                both = np.maximum(both, count * (there + back) - first - last)
        return (count - 1) * np.maximum(first, last), both

    def _message_s(self, source: Group, destination: Group, forward: bool) -> Array:
        pieces = frozenset[frozenset[Piece]]().union(
            *(self._pieces(source, destination, rows) for rows in set(self.micro_batches))
        )
        overhead_s = sum(
            min(self.overhead_s.get(member.kind, 0.0) for member in group.classes) for group in (source, destination)
        )
        found = self._known.get((pieces, forward))
        if found is None:
            slowest = [
                np.maximum.reduce([self._travel_s(piece, forward) for piece in sorted(member)]) for member in pieces
            ]
            found = self._known[pieces, forward] = np.asarray(np.minimum.reduce(slowest))
        return found + overhead_s * (self._bytes(forward) > 0)

    def _pieces(self, source: Group, destination: Group, rows: int) -> frozenset[frozenset[Piece]]:
        """What each member behind waits for, of a micro-batch of ``rows``; like members once."""
        starts, ends = (np.round(np.cumsum([0, *group.samples(rows)]), 9) for group in (source, destination))
        shared = np.minimum.outer(starts[1:], ends[1:]) - np.maximum.outer(starts[:-1], ends[:-1])
        found = []
        for column, there in zip(shared.T, destination.classes, strict=True):
            largest: dict[str, float] = {}
            for samples, here in zip(column, source.classes, strict=True):
                link = WITHIN_HOST if here.host == there.host else ACROSS_HOSTS
                largest[link] = max(largest.get(link, 0.0), float(samples))
            found.append(frozenset((link, samples) for link, samples in largest.items() if samples > 0))
        return frozenset(found)

    def _travel_s(self, piece: Piece, forward: bool) -> Array:
        link, samples = piece
        found = self._travels.get((link, samples, forward))
        if found is None:
            found = self._travels[link, samples, forward] = transfer_s(
                self._links[link], self._bytes(forward) * samples
            )
        return found

    def _bytes(self, forward: bool) -> Array:
        return self.crossing.forward_bytes if forward else self.crossing.backward_bytes


def _never_falling(link: Link) -> Link:
    """The link with a table that never falls, below the measured one: what at least so many bytes take."""
    if not link.points:
        return link
    seconds = np.minimum.accumulate([s for _, s in link.points][::-1])[::-1]
    points = tuple((size, float(s)) for (size, _), s in zip(link.points, seconds, strict=True))
    return Link(link.latency_s, link.bandwidth_bytes_per_s, points, link.duplex, link.evidence)


def _read(layer: Layer, values: Mapping[str, TensorSpec], samples: int) -> Iterator[tuple[str, float]]:
    """The bytes per sample that ``layer`` reads of each of its inputs; 0 for what has no sample dim."""
    inputs = tuple(values[name] for name in layer.inputs)
    relation = kind_named(layer.kind)
    work = whole(relation.work(layer, inputs).shape)
    for name, spec, box in zip(layer.inputs, inputs, relation.input_boxes(layer, inputs, work), strict=True):
        inside = intersect(box, whole(spec.shape))
        size = volume(inside) * BYTES_PER_ELEMENT[spec.dtype] if inside is not None else 0
        yield name, size / samples if spec.has_samples else 0.0
