"""How a step's blocks are divided over stages, and stages over pools: divisions in the order of their least time.

    seat          a pool and a tensor degree; a stage on it is a column: what it takes by its number of blocks, as many
                  as its memory holds
    label         the last stages of a pipeline, up to one whose predecessor's seat is settled too: E and G of
                  :mod:`planner.solvers.best_first.recurrence`, the longest sum of gradients and the longest update
    longer label  a stage more, with all numbers of blocks at once (:func:`planner.extras.transformers.pipeline.longer`)
    least         max(G + what the other blocks spend at best, M x the longest stage that the free GPUs must have), and
                  after it sums and update
    dominance     of labels of the same stages left, blocks, GPUs and seat ahead, one that is nowhere less is dropped

Labels are met by their least, the smallest first; a whole pipeline is given when no label has less.  So the first is
the best by its least, which is its time where the simulator says the same; what was dropped has no less than that.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from math import ceil, inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.extras.transformers.cluster import GpuCluster
from planner.extras.transformers.fits import bytes_by_block
from planner.extras.transformers.memory import chain_in_flight, parameters_of
from planner.extras.transformers.passes import Layers
from planner.extras.transformers.pipeline import MOST_BLOCKS, even_s, label_of, longer, waited_s
from planner.extras.transformers.pools import GpuPool, GpuRange, Pools
from planner.extras.transformers.shape import ParallelDegrees, Sends, Transformer
from planner.extras.transformers.step import (
    Messages,
    after_passes,
    gradients,
    message_bytes,
    passes_s,
    stage_layers,
    tied,
)
from planner.ir.lazy import once
from planner.solvers.best_first.recurrence import Labels, LaidOutStages

_LARGEST_TABLE = 300_000
"""Numbers of free GPUs by pool that :attr:`DivisionSearch._table` is made for; of more, rates alone bound the rest."""
_NONE = -1
"""The seat before the first stage."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StageSeat:
    """What a stage may be on.

    Attributes:
        pool: its place among the pools; 0 where devices are alike.
        cluster, ways: the pool's hosts, and the ways with the seat's tensor degree.
        block_s: both passes of a block.
    """

    pool: int
    cluster: GpuCluster
    ways: ParallelDegrees
    layers: Layers
    block_s: float


@dataclass(frozen=True, slots=True, eq=False)
class _Column:
    """Stages on a seat, by their numbers of blocks.

    Attributes:
        forward_s, backward_s: passes of a micro-batch, without messages.
        sums_s: of gradients, behind the last backward.
        update_s: what follows them.
    """

    forward_s: Array
    backward_s: Array
    sums_s: Array
    update_s: Array


class _Label(NamedTuple):
    """See the module's text; ``seat`` is that of the stage ahead, which a message takes ``hop_s`` from."""

    blocks: int
    used: tuple[int, ...]
    stages: int
    seat: int
    chain: tuple[tuple[int, int], ...] = ()
    """(seat, blocks) of each stage, in order."""
    hop_s: float = 0.0
    trip_s: float = 0.0
    end_s: float = 0.0
    sums_s: float = 0.0
    update_s: float = 0.0

    def is_as_good(self, other: _Label) -> bool:
        """Whether it is nowhere more."""
        return (
            self.hop_s <= other.hop_s
            and self.end_s <= other.end_s
            and self.trip_s <= other.trip_s
            and self.sums_s <= other.sums_s
            and self.update_s <= other.update_s
        )


@dataclass
class DivisionSearch:
    """The divisions of one context: replicas, micro-batch, recomputation, ZeRO and the seats that there are.

    Attributes:
        stages: how many there are, or None: any number.
        above_s: steps that are as long are of no interest.
        keep_all: no label is dropped for another; each pipeline is given.
    """

    shape: Transformer
    cluster: GpuCluster | Pools
    ways: ParallelDegrees
    global_batch: int
    seats: Sequence[StageSeat]
    stages: int | None = None
    keep_all: bool = False
    above_s: float = inf
    labels_met: int = 0
    _heap: list[tuple[float, int, int, _Label]] = field(default_factory=list)
    _order: Iterator[int] = field(default_factory=count)
    _known: dict[tuple[object, ...], list[_Label]] = field(default_factory=dict)
    _messages_s: dict[tuple[int, int, int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._micro_batches = self.ways.micro_batches(self.global_batch)
        self._pools = self.cluster.pools if isinstance(self.cluster, Pools) else ()
        self._bytes = message_bytes(self.shape, self.cluster, self.ways)
        self._hops_s: tuple[float, ...] = ()
        self._tied_s = 0.0
        self._latency_s = 0.0
        if isinstance(self.cluster, GpuCluster):
            messages = Messages.of(self.shape, self.cluster, self.ways)
            self._hops_s = messages.hops_s
            self._latency_s = messages.latency_s
            self._tied_s = tied(self.shape, self.cluster, self.ways).seconds
        self._least_block_s = min((seat.block_s for seat in self.seats), default=inf)
        for number in range(len(self.seats)):
            start = _Label(0, (0,) * max(1, len(self._pools)), 0, number)
            if self._room(start.used, number) is not None:
                self._push(start, self._shortest_s() + self._least_after_s)

    @property
    def bound_s(self) -> float:
        """No division that was not given yet has a shorter step."""
        return self._heap[0][0] if self._heap else inf

    def advance(self) -> tuple[ParallelDegrees, float] | None:
        """Lengthens the least label; a pipeline with its least time, if it is one."""
        bound_s, _, _, label = heapq.heappop(self._heap)
        self.labels_met += 1
        if label.seat == _NONE:
            return self._ways(label), bound_s
        for one_more, least_s in self._longer(label):
            self._push(one_more, least_s)
        return None

    def dive(self, width: int) -> Iterator[tuple[ParallelDegrees, float]]:
        """Pipelines, with their least, by the ``width`` least labels of each number of stages: maybe not the best."""
        level = [label for *_, label in self._heap]
        while level:
            every = sorted(
                (least_s, -label.blocks, place, label)
                for place, (label, least_s) in enumerate(chain.from_iterable(map(self._longer, level)))
            )
            yield from ((self._ways(label), least_s) for least_s, *_, label in every[:width] if label.seat == _NONE)
            level = [label for *_, label in every if label.seat != _NONE][:width]

    def glance_s(self) -> float:
        """The least of the pipelines that the narrowest look shows."""
        return min((least_s for _, least_s in self.dive(1)), default=inf)

    def _push(self, label: _Label, least_s: float) -> None:
        if least_s >= self.above_s:
            return
        if not self.keep_all:
            key = (label.stages, label.blocks, label.used, label.seat, label.chain[-1:] if self._tied_apart else ())
            others = self._known.setdefault(key, [])
            if any(other.is_as_good(label) for other in others):
                return
            others[:] = [other for other in others if not label.is_as_good(other)]
            others.append(label)
        heapq.heappush(self._heap, (least_s, -label.blocks, next(self._order), label))

    @property
    def _tied_apart(self) -> bool:
        """Whether the tied embedding's sum depends on where the last stage is."""
        return bool(self._pools) and self.shape.has_table_at_both_ends

    def _longer(self, label: _Label) -> Iterator[tuple[_Label, float]]:
        """With the stage ahead, of each number of blocks, behind each seat that may be before it; their least."""
        room = self._room(label.used, label.seat)
        if room is None:
            return
        window = label.stages + 1
        left = self.shape.layers - label.blocks
        if self.stages in (None, window):
            yield from self._lengthened(label, room, (_NONE,), range(left, left + 1))
        if self.stages != window:
            before_it = 1 if self.stages is None else self.stages - window
            yield from self._lengthened(label, room, range(len(self.seats)), range(1, left - before_it + 1))

    def _lengthened(
        self, label: _Label, room: tuple[GpuRange, tuple[int, ...]], befores: Sequence[int], numbers: range
    ) -> Iterator[tuple[_Label, float]]:
        """With a stage of each of these numbers of blocks that fits, behind one on each of the seats ``befores``."""
        place, used = room
        window = label.stages + 1
        ends = befores[0] == _NONE, not label.stages
        in_time = self.above_s / (self._micro_batches * self.seats[label.seat].block_s)
        most = int(min(self._most_blocks(label.seat, window, *ends), in_time, self.shape.layers))
        numbers = numbers[: max(0, most + 1 - numbers.start)]
        hops = [
            (before, hop_s)
            for before in befores
            if (hop_s := self._hop_s(window, before, used, label.seat, place)) is not None
        ]
        if not numbers or not hops:
            return
        column = self._column(label.seat, ends, numbers)
        pipelines = self._pipelines(label, column, np.array([[hop_s] for _, hop_s in hops]))
        sums_s = np.maximum(column.sums_s, label.sums_s)
        update_s = np.maximum(column.update_s, label.update_s)
        left = self.shape.layers - label.blocks - np.array(numbers)
        last_s = pipelines.last_backward_s
        until_s = np.maximum(last_s + left * self._least_block_s, self._longest_s(left, used, window))
        after_s = np.maximum(sums_s + update_s, self._least_after_s) + self._sum_of_ends_s(label, ends[0], place)
        least_s = until_s + self._latency_s + after_s  # [hops, numbers]
        row, at = np.nonzero(least_s < self.above_s)
        trip_s = pipelines.round_trip_s
        seconds = (trip_s[row, at], last_s[row, at], sums_s[at], update_s[at], least_s[row, at])
        for hop, number, *own, least in zip(
            row.tolist(), at.tolist(), *(each.tolist() for each in seconds), strict=True
        ):
            before, hop_s = hops[hop]
            blocks = numbers[number]
            stages = ((label.seat, blocks), *label.chain)
            yield _Label(label.blocks + blocks, used, window, before, stages, hop_s, *own), least

    def _pipelines(self, label: _Label, column: _Column, hop_s: Array) -> Labels:
        """A label with each stage of a column, by what a message from the stage before takes: [hops, numbers]."""
        ahead_s, back_s = waited_s(self.ways.sends, hop_s, label.hop_s)
        forward_s = column.forward_s + ahead_s
        backward_s = column.backward_s + back_s
        work_s = self._micro_batches * (forward_s + backward_s)
        stages = LaidOutStages(forward_s, backward_s, work_s, work_s)
        flies_s = label.hop_s if self.ways.sends is Sends.OVERLAPPED else 0.0
        keeps = label.stages + 1 if self.ways.schedule == "1f1b" else self._micro_batches
        return longer(stages, label_of(label.trip_s, label.end_s), flies_s, self._micro_batches, keeps)

    @once
    def _column(self, number: int, ends: tuple[bool, bool], numbers: range) -> _Column:
        """By seat, whether it is the first and the last stage, and numbers of blocks."""
        forward_s, backward_s = passes_s(self.seats[number].layers, np.array(numbers, dtype=float), *ends)
        sums_s, update_s = np.array([self._after_s(number, blocks, ends) for blocks in numbers]).T
        return _Column(forward_s, backward_s, sums_s, update_s)

    @once
    def _after_s(self, number: int, blocks: int, ends: tuple[bool, bool]) -> tuple[float, float]:
        """By seat, blocks, and whether it is the first and the last stage: sum of gradients, and update."""
        seat = self.seats[number]
        summed, updated = after_passes(self.shape, seat.cluster, seat.ways, seat.layers, blocks, ends)
        return summed.seconds, updated.seconds

    @functools.cached_property
    def _least_after_s(self) -> float:
        """Of the sums of gradients: a rank has as many weights of blocks as if all devices shared them, or more."""
        if self.ways.overlap_gradients:
            return 0.0
        devices = sum(pool.devices for pool in self._pools)
        stages = self.stages or devices / self.ways.copies
        whole = self.shape.layers * parameters_of(self.shape, 1, 1, False, False)
        return min(
            gradients(seat.cluster, seat.ways, whole / stages / (1 if self._pools else seat.ways.tensor), 0.0).seconds
            for seat in self.seats
        )

    def _shortest_s(self) -> float:
        """Of any division into so many stages, or into stages on all pools."""
        if self.stages is not None:
            return shortest_s(self.shape.layers, self.ways, self._micro_batches, self.stages, self._least_block_s)
        free = [pool.devices for pool in self._pools]
        return self._micro_batches * longest_s(self.shape.layers, self.seats, free)

    def _longest_s(self, left: NDArray[np.int64], used: tuple[int, ...], window: int) -> Array:
        """All micro-batches through the longest of the stages that are left, by how many blocks these have."""
        if self.stages == window or not left.all():
            longest: Array = np.zeros(left.shape)
        elif self.stages is not None:
            longest = -(-left // (self.stages - window)) * np.float64(self._least_block_s)
        elif self._table is None:
            free = [pool.devices - gpus for pool, gpus in zip(self._pools, used, strict=True)]
            longest = left * np.float64(longest_s(1, self.seats, free))
        else:
            units = [(pool.devices - gpus) // self.ways.copies for pool, gpus in zip(self._pools, used, strict=True)]
            longest = self._table[(left, *units)]
        return self._micro_batches * longest

    @functools.cached_property
    def _table(self) -> Array | None:
        """Seconds of the longest stage at best, of so many blocks on so many GPUs of each pool, by replica.

        Of stages before others: each waits for a message, at least.
        """
        pools = self.cluster
        units = [pool.devices // self.ways.copies + 1 for pool in self._pools]
        if not isinstance(pools, Pools) or np.prod(units, dtype=float) > _LARGEST_TABLE // self.shape.layers:
            return None
        hops_s = [pools.least_hop_s(self.ways, self._bytes, seat.cluster, seat.ways.tensor) for seat in self.seats]
        table = np.full((self.shape.layers + 1, *units), inf)
        table[0] = 0.0
        for blocks in range(1, self.shape.layers + 1):
            for seat, hop_s in zip(self.seats, hops_s, strict=True):
                degrees = [seat.ways.tensor * (pool == seat.pool) for pool in range(len(units))]
                kept = tuple(slice(0, max(0, unit - degree)) for unit, degree in zip(units, degrees, strict=True))
                longer_s = table[blocks][tuple(slice(degree, None) for degree in degrees)]
                numbers = np.arange(1, blocks + 1)
                own_s = (numbers * seat.block_s + hop_s).reshape(-1, *(1 for _ in units))
                seconds = np.maximum(table[blocks - numbers][(slice(None), *kept)], own_s).min(axis=0)
                np.minimum(longer_s, seconds, out=longer_s)
        return table

    def _room(self, used: tuple[int, ...], number: int) -> tuple[GpuRange, tuple[int, ...]] | None:
        """Where the next stage on that seat is, and what is used then; None: there is no room."""
        seat = self.seats[number]
        if not self._pools:
            return GpuRange(seat.cluster, seat.ways.tensor, 0, 0), used
        pool: GpuPool = self._pools[seat.pool]
        start, stop = pool.after(used[seat.pool], seat.ways.tensor, self.ways.copies)
        if stop > pool.devices:
            return None
        filled = (*used[: seat.pool], stop, *used[seat.pool + 1 :])
        return GpuRange(pool.cluster, seat.ways.tensor, start, stop), filled

    def _hop_s(self, window: int, before: int, used: tuple[int, ...], number: int, place: GpuRange) -> float | None:
        """From the stage before, on the seat ``before``, to that of ``window``, from the last; None: no room."""
        if before == _NONE:
            return 0.0
        if not isinstance(self.cluster, Pools):
            return self._hops_s[self.ways.pipeline - 1 - window]
        room = self._room(used, before)
        if room is None:
            return None
        key = before, room[0].start, number, place.start
        if key not in self._messages_s:
            self._messages_s[key] = self.cluster.hop(self.ways, self._bytes, room[0], place).seconds
        return self._messages_s[key]

    def _sum_of_ends_s(self, label: _Label, is_first: bool, first: GpuRange) -> float:
        """Of the tied embedding's gradient, between the first stage and the last, once both are known."""
        if not is_first or not self._tied_apart or not label.chain or not isinstance(self.cluster, Pools):
            return self._tied_s
        last = self._room((0,) * len(self._pools), label.chain[-1][0])
        return self.cluster.sum_of_two(self.shape, self.ways, first, last[0]).seconds if last else 0.0

    @once
    def _most_blocks(self, number: int, window: int, first: bool, last: bool) -> int:
        """By seat, stages from the stage on, and whether it is the first and the last: as many blocks as fit."""
        seat = self.seats[number]
        held = chain_in_flight(self.ways.schedule, window, self._micro_batches)[0]
        none, each = bytes_by_block(self.shape, seat.cluster, seat.ways, held, (first, last))
        return max(0, int((seat.cluster.usable_bytes - none) / each * (1 + 1e-12)))

    def _ways(self, label: _Label) -> ParallelDegrees:
        seats = [self.seats[number] for number, _ in label.chain]
        blocks = tuple(number for _, number in label.chain)
        if not self._pools:
            whole = replace(self.ways, blocks=())
            return whole if whole.chunks(self.shape.layers) == blocks else replace(self.ways, blocks=blocks)
        tensors = tuple(seat.ways.tensor for seat in seats)
        return replace(
            self.ways, tensor=max(tensors), pipeline=len(seats), blocks=blocks, tensors=tensors,
            pools=tuple(seat.cluster.name for seat in seats),
        )  # fmt: skip


def shortest_s(blocks: int, ways: ParallelDegrees, micro_batches: int, stages: int, block_s: float) -> float:
    """No division of so many blocks into stages is shorter, or into chunks of them that are alike."""
    even = blocks / stages
    if ways.interleave > 1:  # passes of the first chunks of all stages but one come before and after the last's
        filling = (stages - 1) / ways.interleave if ways.schedule == "1f1b" else 0.0
        return (micro_batches + filling) * even * block_s
    if ways.schedule == "1f1b" and blocks <= MOST_BLOCKS:
        return float(even_s(stages, blocks, micro_batches)[-1]) * block_s
    return micro_batches * ceil(even) * block_s


def longest_s(blocks: int, seats: Sequence[StageSeat], free: Sequence[int]) -> float:
    """Passes of the longest stage at least, if all free GPUs of the pools are as busy as they can be."""
    rates = [0.0] * len(free)
    for seat in seats:
        rates[seat.pool] = max(rates[seat.pool], 1 / (seat.block_s * seat.ways.tensor * seat.ways.copies))
    rate = sum(gpus * rate for gpus, rate in zip(free, rates, strict=True))
    return blocks / rate if rate else inf


def seats_of(
    shape: Transformer, pools: Sequence[GpuCluster], ways: ParallelDegrees, tensors: Sequence[int]
) -> list[StageSeat]:
    """The seats of each pool at each degree that divides the network and that something times."""
    seats = []
    for number, cluster in enumerate(pools):
        for tensor in tensors:
            own = replace(ways, tensor=tensor)
            if cluster.timed is None or cluster.timed.of(own) is not None:
                layers = stage_layers(shape, cluster, own)
                block_s = layers.block.forward.seconds + layers.block.backward.seconds
                seats.append(StageSeat(number, cluster, own, layers, block_s))
    return seats
