"""Groups of devices that may run a stage, what limits how many there are, and what they hand to one another.

The stage behind a cut has at least the layers up to the next cut.  What these read of the stage before is sent in one
message; what later layers read is more, and depends on where the stage ends: it is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod

import numpy as np

from planner.costs.communication.collectives import transfer_s
from planner.costs.communication.stage_transfers import Piece, bytes_read, least_links, pieces
from planner.costs.cost_model import PriceBook
from planner.costs.layers.cost_table import Array, Flags
from planner.ir.cluster import Cluster, Link
from planner.ir.errors import MissingMeasurementError
from planner.ir.graph import Graph, producer
from planner.ir.layout import parts_of, samples_of
from planner.ir.problem import SAMPLE_DIMS, Problem
from planner.layers import throughout_sites
from planner.layers.boundary import without_gradient
from planner.solvers.candidates.candidate import all_shares, group_shares, like_groups, pools, site_shares
from planner.solvers.candidates.constraints import Constraints
from planner.solvers.candidates.feasibility import usable

FEW_COMPOSITIONS = 40
"""Groups may have devices of several kinds, or hosts, while there are at most so many compositions."""


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """Ranks of one pool that no rule tells apart: any of them will do.

    Attributes:
        groups: that they are in, as of a pool.
        twin: an earlier class with which it may change places, together with its groups; -1 if there is none.
    """

    kind: str
    groups: tuple[str, ...]
    memory_limit_bytes: int
    ranks: tuple[int, ...]
    twin: int = -1


@dataclass(frozen=True, slots=True)
class StageGroup:
    """Devices that share the samples of a stage, or, of one that lies along sites alone, its sites.

    Attributes:
        takes: by class of devices, how many.
        classes: of each member, in the order in which they share a micro-batch.
        ranks: such ranks; the plan may take others of the same classes.
        shares: samples of each in a full micro-batch, or parts of the sites.
        by_parts: which of the two.
    """

    takes: tuple[int, ...]
    classes: tuple[DeviceClass, ...]
    ranks: tuple[int, ...]
    shares: tuple[int, ...]
    by_parts: bool = False

    def samples(self, rows: int) -> tuple[float, ...]:
        """Samples of each in a micro-batch of ``rows``."""
        return parts_of(self.shares, rows) if self.by_parts else samples_of(self.shares, rows)

    @property
    def size(self) -> int:
        """Number of devices."""
        return len(self.shares)


def device_classes(problem: Problem, constraints: Constraints) -> tuple[DeviceClass, ...]:
    """The pools, split where a rule tells their devices apart."""
    classes: list[DeviceClass] = []
    all_pools = pools(problem)
    split = [{constraints.device_class(rank) for rank in pool.ranks} for pool in all_pools]
    earlier: dict[int, int] = {}
    for alike in like_groups(all_pools):
        last: dict[tuple[bool, ...], int] = {}
        for number, *more in sorted(alike):
            if not more and len(split[number]) == 1:
                (told_apart,) = split[number]
                if told_apart in last:
                    earlier[number] = last[told_apart]
                last[told_apart] = number
    first: list[int] = []
    for number, pool in enumerate(all_pools):
        first.append(len(classes))
        twin = first[earlier[number]] if number in earlier else -1
        for signature in sorted(split[number], reverse=True):
            ranks = tuple(rank for rank in pool.ranks if constraints.device_class(rank) == signature)
            classes.append(DeviceClass(pool.kind, pool.groups, pool.memory_limit_bytes, ranks, twin))
    return tuple(classes)


def groups(
    problem: Problem, book: PriceBook, classes: tuple[DeviceClass, ...], micro_batches: tuple[int, ...]
) -> tuple[StageGroup, ...]:
    """Every group that gets a sample of every micro-batch, or some of its sites, and whose sizes were measured."""
    usable_groups = []
    of_sites = (False, True) if throughout_sites(problem.profile.graph) else (False,)
    for takes, by_parts in product(_takes(classes), of_sites):
        count = sum(takes)
        if count > 1 and SAMPLE_DIMS not in problem.allow:
            continue
        if count == 1 if by_parts else count > micro_batches[0]:
            continue
        members = _members(classes, takes)
        ranks = _first(classes, members, [0] * len(classes))
        shared = () if by_parts else all_shares(problem, ranks, micro_batches[0])
        for shares in shared or ((site_shares if by_parts else group_shares)(problem, book, ranks, micro_batches[0]),):
            try:
                if usable(problem, book, ranks, shares, micro_batches):
                    usable_groups.append(StageGroup(takes, tuple(classes[k] for k in members), ranks, shares, by_parts))
            except MissingMeasurementError:
                continue
    return tuple(usable_groups)


def assign(classes: tuple[DeviceClass, ...], chosen: tuple[StageGroup, ...]) -> tuple[tuple[int, ...], ...]:
    """Ranks for groups that run at once, the first ones of each class first."""
    num_assigned = [0] * len(classes)
    return tuple(_first(classes, _members(classes, group.takes), num_assigned) for group in chosen)


def _members(classes: tuple[DeviceClass, ...], takes: tuple[int, ...]) -> tuple[int, ...]:
    """The class of each member: kind after kind, then by memory, the smallest group with more members first."""
    kinds = list(dict.fromkeys(c.kind for c in classes))
    on = Counter[tuple[str, ...]]()
    for c, count in zip(classes, takes, strict=True):
        on[c.groups] += count
    memory = [-c.memory_limit_bytes for c in classes]
    order = sorted(
        range(len(classes)), key=lambda k: (kinds.index(classes[k].kind), memory[k], -on[classes[k].groups], k)
    )
    return tuple(k for k in order for _ in range(takes[k]))


def _first(classes: tuple[DeviceClass, ...], members: tuple[int, ...], num_assigned: list[int]) -> tuple[int, ...]:
    """The next ranks of the members' classes, counted in ``num_assigned``."""
    ranks = []
    for k in members:
        ranks.append(classes[k].ranks[num_assigned[k]])
        num_assigned[k] += 1
    return tuple(ranks)


def _takes(classes: tuple[DeviceClass, ...]) -> Iterator[tuple[int, ...]]:
    """How many of each class a group may take: any, or, where these are many, of one kind, or of one pool."""
    everything = [0] * len(classes)
    pool_of = [(c.kind, c.groups, c.memory_limit_bytes) for c in classes]
    for labels in (everything, [c.kind for c in classes], pool_of):
        largest = max(
            prod(len(c.ranks) + 1 for c, own in zip(classes, labels, strict=True) if own == label) for label in labels
        )
        if largest <= FEW_COMPOSITIONS or labels is pool_of:
            for label in dict.fromkeys(labels):
                most_of = [len(c.ranks) if own == label else 0 for c, own in zip(classes, labels, strict=True)]
                yield from (takes for takes in product(*(range(most + 1) for most in most_of)) if any(takes))
            return


@dataclass(frozen=True, slots=True, eq=False)
class CutTraffic:
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
    def of(cls, graph: Graph, cuts: tuple[int, ...]) -> CutTraffic:
        """Between stages that start and end at ``cuts``, positions in the list of layers with both ends."""
        made_at = {layer.name: position for position, layer in enumerate(graph.layers)}
        values, silent = graph.values(), without_gradient(graph)
        shape = (len(cuts), len(cuts))
        crossing = cls(np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool), np.zeros(shape), np.zeros(shape))
        for b in range(1, len(cuts) - 1):
            needed: dict[str, float] = {}
            for layer in graph.layers[cuts[b] : cuts[b + 1]]:
                for value, num_bytes in bytes_read(layer, values, graph.samples):
                    if made_at.get(producer(value), cuts[b]) < cuts[b]:
                        needed[value] = max(needed.get(value, 0.0), num_bytes)
            for value, num_bytes in needed.items():
                holders = slice(int(np.searchsorted(cuts, made_at[producer(value)], side="right")))
                crossing.linked[holders, b] = True
                crossing.forward_bytes[holders, b] += num_bytes
                if values[value].is_float and value not in silent:
                    crossing.linked_back[holders, b] = True
                    crossing.backward_bytes[holders, b] += num_bytes
        return crossing

    def least(self, bytes_per_sample: Array) -> Array:
        """By cut: the least that a linked stage hands over there; stages that start later hand over less."""
        return np.asarray(np.where(self.linked, bytes_per_sample, np.inf).min(axis=0))


@dataclass(slots=True, eq=False)
class LeastMessages:
    """What messages between groups take at least, by (first cut, last cut) of the stage before.

    An F waits for all its pieces and a B for all its gradients: the slowest of those to (or from) one member behind,
    whichever member that is.

    Attributes:
        overhead_s: of a receive, by kind of device.
    """

    cluster: Cluster
    crossing: CutTraffic
    micro_batches: tuple[int, ...]
    overhead_s: Mapping[str, float]
    _links: Mapping[str, Link] = field(init=False, repr=False)
    _travels: dict[tuple[str, float, bool], Array] = field(init=False, default_factory=dict, repr=False)
    _known: dict[object, Array] = field(init=False, default_factory=dict, repr=False)
    _waits: dict[object, tuple[Array, Array]] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._links = least_links(self.cluster)

    def there_s(self, source: StageGroup, destination: StageGroup) -> Array:
        """From the end of an F of the stage (a, b) to the start of the F behind it."""
        return self._message_s(source, destination, True)

    def back_s(self, source: StageGroup, destination: StageGroup) -> Array:
        """From the end of a B of the stage behind to the start of the B of the stage (a, b)."""
        return self._message_s(source, destination, False)

    def wires_s(self, source: StageGroup, destination: StageGroup) -> tuple[Array, Array]:
        """What all messages of full micro-batches take longer, on one wire, than the first there and the last back.

        One way, beside which the last F and B behind still have to be done; and both ways, which share a wire where the
        link is not duplex, and beside which nothing more is certain, not even what the stage behind pays to receive.
        """
        own = self._pieces(source, destination, self.micro_batches[0])
        waits_s = self._waits.get(own)
        if waits_s is None:
            one_way, both = zip(*(self._waits_s(member) for member in own), strict=True)
            waits_s = self._waits[own] = (np.minimum.reduce(one_way), np.minimum.reduce(both))
        overhead_s = min(self.overhead_s.get(member.kind, 0.0) for member in destination.classes)
        return waits_s[0], np.maximum(waits_s[1] - overhead_s, 0.0)

    def _waits_s(self, own: frozenset[Piece]) -> tuple[Array, Array]:
        """The same for one member behind."""
        count = self.micro_batches.count(self.micro_batches[0])
        ways = [(self._travel_s(piece, True), self._travel_s(piece, False)) for piece in sorted(own)]
        first, last = (np.maximum.reduce(way) for way in zip(*ways, strict=True))
        both = np.zeros_like(first)
        for (link, _), (there, back) in zip(sorted(own), ways, strict=True):
            if not self._links[link].duplex:
                both = np.maximum(both, count * (there + back) - first - last)
        return (count - 1) * np.maximum(first, last), both

    def _message_s(self, source: StageGroup, destination: StageGroup, forward: bool) -> Array:
        own = frozenset[frozenset[Piece]]().union(
            *(self._pieces(source, destination, rows) for rows in set(self.micro_batches))
        )
        receiver = destination if forward else source
        overhead_s = min(self.overhead_s.get(member.kind, 0.0) for member in receiver.classes)
        seconds = self._known.get((own, forward))
        if seconds is None:
            slowest = [
                np.maximum.reduce([self._travel_s(piece, forward) for piece in sorted(member)]) for member in own
            ]
            seconds = self._known[own, forward] = np.asarray(np.minimum.reduce(slowest))
        return seconds + overhead_s * (self._bytes(forward) > 0)

    def _pieces(self, source: StageGroup, destination: StageGroup, rows: int) -> frozenset[frozenset[Piece]]:
        """What each member behind waits for, of a micro-batch of ``rows``; like members once."""
        mine, theirs = list(dict.fromkeys(source.classes)), list(dict.fromkeys(destination.classes))
        between = tuple(
            tuple(self.cluster.link_class(here.ranks[0], there.ranks[-1]) for there in theirs) for here in mine
        )
        sources, destinations = map(mine.index, source.classes), map(theirs.index, destination.classes)
        return pieces(
            source.samples(rows), destination.samples(rows), tuple(sources), tuple(destinations), between
        ).by_receiver

    def _travel_s(self, piece: Piece, forward: bool) -> Array:
        link, samples = piece
        seconds = self._travels.get((link, samples, forward))
        if seconds is None:
            seconds = self._travels[link, samples, forward] = transfer_s(
                self._links[link], self._bytes(forward) * samples
            )
        return seconds

    def _bytes(self, forward: bool) -> Array:
        return self.crossing.forward_bytes if forward else self.crossing.backward_bytes
