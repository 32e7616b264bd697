"""What a stage certainly hands to the next one, and what that takes.

The stage behind a cut has at least the layers up to the next cut.  What these read of the stage before is sent in one
message; what later layers read is more, and depends on where the stage ends: it is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner.costs.network import transfer_s
from planner.costs.tables import Array
from planner.ir.box import intersect, volume, whole
from planner.ir.cluster import ACROSS_HOSTS, WITHIN_HOST, Cluster, Link
from planner.ir.graph import BYTES_PER_ELEMENT, Graph, Layer, TensorSpec, producer
from planner.layers import kind as kind_named
from planner.solvers.candidates.shares import samples_of
from planner.solvers.ilp.groups import Group

Flags = NDArray[np.bool_]


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


@dataclass(slots=True, eq=False)
class Messages:
    """What messages between groups take at least; each size is looked up once.

    Attributes:
        overhead_s: of the executor per action, by kind of device.
    """

    cluster: Cluster
    crossing: Crossing
    micro_batches: tuple[int, ...]
    overhead_s: Mapping[str, float]
    _links: Mapping[str, Link] = field(init=False, repr=False)
    _known: dict[object, Array] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._links = {name: _never_falling(link) for name, link in self.cluster.links.items()}

    def there_s(self, source: Group, destination: Group) -> Array:
        """From the end of an F of the stage (a, b) to the start of the F behind it."""
        return self._message_s(source, destination, True)

    def back_s(self, source: Group, destination: Group) -> Array:
        """From the end of a B of the stage behind to the start of the B of the stage (a, b)."""
        return self._message_s(source, destination, False)

    def _message_s(self, source: Group, destination: Group, forward: bool) -> Array:
        samples = largest_piece(source.shares, destination.shares, self.micro_batches)
        link = WITHIN_HOST if source.host == destination.host else ACROSS_HOSTS
        overhead_s = self.overhead_s.get(source.kind, 0.0) + self.overhead_s.get(destination.kind, 0.0)
        key = (link, samples, overhead_s, forward)
        found = self._known.get(key)
        if found is None:
            size = (self.crossing.forward_bytes if forward else self.crossing.backward_bytes) * samples
            found = self._known[key] = transfer_s(self._links[link], size) + overhead_s * (size > 0)
        return found


@functools.lru_cache(maxsize=4096)
def largest_piece(source: tuple[int, ...], destination: tuple[int, ...], micro_batches: tuple[int, ...]) -> int:
    """The samples that some message between the two groups has at least, of those that a rank behind waits for.

    An F waits for all its pieces, hence for the largest; and the largest gradient that a rank sends back has to arrive.
    """
    least = min(micro_batches)
    for rows in set(micro_batches):
        starts, ends = (np.cumsum([0, *samples_of(shares, rows)]) for shares in (source, destination))
        shared = np.minimum.outer(starts[1:], ends[1:]) - np.maximum.outer(starts[:-1], ends[:-1])
        least = min(least, int(shared.max(axis=0).min()))
    return least


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
