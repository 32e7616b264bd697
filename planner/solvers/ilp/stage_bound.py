"""What every stretch of layers costs at least as a stage of a group: matrices over pairs of cuts.

Admissible for the simulator: on the way to another stage the shortest F and B of any member and micro-batch count, of
a stage's own work all of the busiest member's.

What a stage certainly hands to the next one, and what that takes.

The stage behind a cut has at least the layers up to the next cut.  What these read of the stage before is sent in one
message; what later layers read is more, and depends on where the stage ends: it is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from planner.costs.communication.collectives import collective_s, transfer_s
from planner.costs.communication.links import without_pairs
from planner.costs.cost_model import PriceBook
from planner.costs.layers.cost_table import Array, Flags, SizeTable
from planner.costs.stages.gradient_overlap import least_exposed_s
from planner.ir.box import intersect, volume, whole
from planner.ir.cluster import ALL_REDUCE, Cluster, Link
from planner.ir.graph import BYTES_PER_ELEMENT, Graph, Layer, TensorSpec, producer
from planner.ir.schedule import Op, Pipeline, StageGraph
from planner.layers import kind as kind_named
from planner.schedules import schedule as schedule_named
from planner.solvers.ilp.device_groups import DeviceClass, Group


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """What a member holds at least, by (first cut, last cut), and what it may.

    Attributes:
        always_bytes: throughout, workspace included.
        each_bytes, rest_bytes: for every micro-batch in flight, and for the smaller last one.
    """

    always_bytes: Array
    each_bytes: Array
    rest_bytes: Array
    limit_bytes: int

    def fits(self, in_flight: int, micro_batches: tuple[int, ...]) -> Flags:
        """Where the member has room for so many micro-batches at once."""
        rest = int(micro_batches[-1] != micro_batches[0] and in_flight == len(micro_batches))
        rounding = in_flight + 2  # the simulator rounds bytes slot by slot
        needed = self.always_bytes + (in_flight - rest) * self.each_bytes + rest * self.rest_bytes
        return np.asarray(needed <= self.limit_bytes + rounding)


@dataclass(frozen=True, slots=True, eq=False)
class Prices:
    """By (first cut, last cut).

    Attributes:
        forward_s, backward_s: the shortest F, and the shortest B (or I, where backwards are cut in two).
        turn_s: what the busiest member certainly does between the start of its first F and the end of its last B (I).
        work_s: all of its F and B, or F, I and W.
        last_s: reduction and update after the last of them.
        holdings: of members that differ.
    """

    forward_s: Array
    backward_s: Array
    turn_s: Array
    work_s: Array
    last_s: Array
    holdings: tuple[Holding, ...]


Member = tuple[DeviceClass, tuple[float, ...]]
"""What tells members of a group apart: their device, and their samples of a full micro-batch and of the last one."""


@dataclass(frozen=True, slots=True, eq=False)
class Pricing:
    """Prices of stages between ``cuts``, for one way to cut the batch.

    Attributes:
        splits: whether backwards may be cut in two.
        shard: whether the ranks of a stage divide the optimiser's state among them.
    """

    book: PriceBook
    cuts: tuple[int, ...]
    crossing: Crossing
    micro_batches: tuple[int, ...]
    splits: bool
    shard: bool = False

    def of(self, group: Group, recompute: bool) -> Prices:
        """Of all stretches on ``group``.

        Raises:
            MissingMeasurementError: a layer's cost at the group's sizes is not known.
        """
        exchange_there, exchange_back = self._exchange_s(group, recompute)
        exchanges = len(self.micro_batches) * (exchange_there + exchange_back)
        found = [self._member(member, recompute, group) for member in self._members(group)]
        return Prices(
            forward_s=np.minimum.reduce([times.forward_s for times in found]) + exchange_there,
            backward_s=np.minimum.reduce([times.backward_s for times in found]) + exchange_back,
            turn_s=np.maximum.reduce([times.turn_s for times in found]) + exchanges,
            work_s=np.maximum.reduce([times.work_s for times in found]) + exchanges,
            last_s=np.maximum.reduce([times.update_s for times in found])
            + self._reduce_s(group, np.maximum.reduce([times.back_s for times in found]) + exchange_back),
            holdings=tuple(self._holding(member, recompute, self._parts(group)) for member in self._members(group)),
        )

    def _parts(self, group: Group) -> int:
        """Among how many ranks the optimiser's state is divided."""
        return group.size if self.shard else 1

    def _members(self, group: Group) -> tuple[Member, ...]:
        """Members that differ."""
        rows = self.micro_batches[0], self.micro_batches[-1]
        samples = zip(*(group.samples(n) for n in rows), strict=True)
        return tuple(dict.fromkeys(zip(group.classes, samples, strict=True)))

    def _member(self, member: Member, recompute: bool, group: Group) -> _Times:
        """What the member does, without exchanges."""
        kind, samples, shared = member[0].kind, member[1], group.size > 1
        overhead, count = self.book.tables.overhead_s(kind), len(self.micro_batches)
        rest = int(self.micro_batches[-1] != self.micro_batches[0])
        tables = [self.book.at(kind, n, shared) for n in samples]
        times = list(zip(tables, (count - rest, rest), strict=True))
        parameters = self.book.tables.parameters(kind)
        sends, receives = self.crossing.forward_bytes > 0, self.crossing.backward_bytes > 0
        always = count * overhead * (2 + sends.astype(np.float64) + receives)
        forward, backward, whole = (
            [(self._matrix(sums(table)), n) for table, n in times]
            for sums in (
                lambda table: table.forward_s,
                lambda table: _way_back(table, self.splits, recompute),
                lambda table: _whole_backward(table, self.splits, recompute),
            )
        )
        turn = always + sum(n * f + n * b for (f, n), (b, _) in zip(forward, backward, strict=True))
        work = always + sum(n * f + n * b for (f, n), (b, _) in zip(forward, whole, strict=True))
        work = work + (count - 1) * self._matrix(self.book.accumulate_s(kind, shared))
        return _Times(
            np.minimum.reduce([f for f, _ in forward]) + overhead,
            np.minimum.reduce([b for b, _ in backward]) + overhead,
            turn if self.splits else work,
            work,
            self._matrix(parameters.update_s) / self._parts(group) + overhead,
            np.maximum.reduce([self._matrix(table.backward_s) for table in tables]),
        )

    def _reduce_s(self, group: Group, back_s: Array) -> Array:
        size = self._matrix(self.book.tables.graph.parameter_bytes)
        if group.size == 1:
            return np.zeros_like(size)
        overhead = min(self.book.tables.overhead_s(member.kind) for member in group.classes)
        cluster = self.book.profile.cluster
        if self.shard:
            return overhead + collective_s(cluster, ALL_REDUCE, group.ranks, size)
        return overhead + least_exposed_s(cluster, group.ranks, size, back_s)

    def _holding(self, member: Member, recompute: bool, parts: int) -> Holding:
        """Lower bounds, as the simulator counts: receive buffers and gradients on their way apart."""
        device, samples = member
        graph, tables = self.book.tables.graph, [self.book.tables.at(device.kind, n) for n in samples]
        state = 2 + self.book.profile.optimizer.state_bytes_per_parameter_byte / parts
        always = state * self._matrix(graph.parameter_bytes) + self._matrix(graph.buffer_bytes)
        saved = [self._matrix(table.saved_bytes) for table in tables]
        received = np.where(self._surely_fed(), self.crossing.least(self.crossing.forward_bytes), 0.0)
        if self.book.levels.at(device.kind, samples[0]) is None:
            always = always + largest_between(tables[0].workspace_bytes, self.cuts)
        else:  # the first backward may make gradients as it lets go of what was saved
            always = always - np.minimum.reduce([self._matrix(graph.parameter_bytes), *saved])
        kept = [(0 if recompute else s) + received[:, None] * n for s, n in zip(saved, samples, strict=True)]
        again = np.minimum(*saved) if recompute else 0
        return Holding(always + again, kept[0], kept[1], device.memory_limit_bytes)

    def _surely_fed(self) -> Flags:
        """By cut: whether whatever stage ends there feeds the one that starts there."""
        at = np.arange(len(self.cuts))
        before = at[:, None] < at[None, :]
        return np.asarray((self.crossing.linked | ~before).all(axis=0)) & (at > 0)

    def _exchange_s(self, group: Group, recompute: bool) -> tuple[Array, Array]:
        """Exchanges inside the group in an F and in a B, of the smallest micro-batch."""
        if group.size == 1:
            nothing = np.zeros((len(self.cuts), len(self.cuts)))
            return nothing, nothing
        there, back = (self._matrix(sums) for sums in self.book.exchanges_s(group.ranks, min(self.micro_batches)))
        return there, back + there if recompute else back

    def _matrix(self, sums: Array) -> Array:
        """[a, b] = the sum over layers cuts[a] to cuts[b], of running sums over layers."""
        at = sums[list(self.cuts)]
        return np.asarray(at[None, :] - at[:, None])


@dataclass(frozen=True, slots=True, eq=False)
class _Times:
    """As in :class:`Prices`, of one member; ``back_s``: no whole backward of it is longer."""

    forward_s: Array
    backward_s: Array
    turn_s: Array
    work_s: Array
    update_s: Array
    back_s: Array


def largest_between(by_layer: Array, cuts: tuple[int, ...]) -> Array:
    """[a, b] = the largest of layers cuts[a] to cuts[b]."""
    of_block = np.maximum.reduceat(by_layer, cuts[:-1])
    found = np.zeros((len(cuts), len(cuts)))
    for a in range(len(cuts) - 1):
        found[a, a + 1 :] = np.maximum.accumulate(of_block[a:])
    return found


@functools.lru_cache(maxsize=1024)
def in_flight(schedule: str, most_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """The fewest micro-batches that a stage ever has in flight, by stages downstream (itself included) from 1.

    Of all chains of at most ``most_stages`` stages.
    """
    fewest = [num_microbatches] * most_stages
    for depth in range(1, most_stages + 1):
        rows = schedule_named(schedule)(Pipeline(StageGraph.chain(depth, num_microbatches))).rows
        for stage, row in enumerate(rows):
            held = most = 0
            for action in row:
                held += {Op.FORWARD: 1, Op.BACKWARD: -1, Op.BACKWARD_WEIGHT: -1}.get(action.op, 0)
                most = max(most, held)
            fewest[depth - stage - 1] = min(fewest[depth - stage - 1], most)
    return tuple(fewest)


def splits_backwards(schedule: str) -> bool:
    """Whether the schedule cuts backwards into I and W."""
    rows = schedule_named(schedule)(Pipeline(StageGraph.chain(2, 2))).rows
    return any(action.op is Op.BACKWARD_INPUT for row in rows for action in row)


def _way_back(table: SizeTable, splits: bool, recompute: bool) -> Array:
    """Running sum of what a gradient passes through: B, or I where that is quicker."""
    own = _least(table.backward_s, table.backward_input_s) if splits else table.backward_s
    return own + table.forward_s if recompute else own


def _whole_backward(table: SizeTable, splits: bool, recompute: bool) -> Array:
    """Running sum of B, or of I and W where that is quicker."""
    halves = table.backward_input_s + table.backward_weight_s
    own = _least(table.backward_s, halves) if splits else table.backward_s
    return own + table.forward_s if recompute else own


def _least(one: Array, two: Array) -> Array:
    """Running sum of the lesser, layer by layer."""
    return np.concatenate(([0.0], np.cumsum(np.minimum(np.diff(one), np.diff(two)))))


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
                link = self.cluster.link_class(here.ranks[0], there.ranks[-1])
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
