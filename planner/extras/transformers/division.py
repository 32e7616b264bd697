"""How a step's blocks are divided over stages, and stages over pools: divisions in the order of their least time.

    stage         a seat (a pool and a tensor degree) and a number of blocks; as many as its memory holds
    label         the last stages of a pipeline, up to one whose predecessor's seat is settled too:
                    V   least seconds from the first forward of its first stage to that stage's last backward
                    D   what a micro-batch spends there, passes and messages both ways
                    G, O  the longest sum of gradients and the longest update of its stages
    longer label  one stage more: stay(f, b, D, stages, M) and V = max(stay, f + b + 2 messages + V)
                  (:func:`planner.extras.transformers.pipeline.stay_s`)
    least         max(V + what the other blocks spend at best, M x the longest stage that the free GPUs must have), and
                  after it G + O
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
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.extras.transformers.cluster import GpuCluster
from planner.extras.transformers.memory import chain_in_flight, memory_with, parameters_of
from planner.extras.transformers.passes import Layers
from planner.extras.transformers.pipeline import even_s, stay_s
from planner.extras.transformers.pools import GpuPool, GpuRange, Pools
from planner.extras.transformers.shape import ParallelDegrees, Sends, Transformer
from planner.extras.transformers.step import (
    flowing_s,
    gradients,
    hops_of,
    message_bytes,
    optimiser,
    stage_layers,
    tied,
)
from planner.ir.lazy import once

_LARGEST_TABLE = 300_000
"""Numbers of free GPUs by pool that :attr:`DivisionSearch._table` is made for; of more, rates alone bound the rest."""


@dataclass(frozen=True, slots=True)
class StageSeat:
    """What a stage may be on.

    Attributes:
        pool: its place among the pools; 0 where devices are alike.
        cluster, ways: the pool's hosts, and the ways with the seat's tensor degree.
        forward_s, backward_s: of a block.
        first_s, last_s: both passes, (forward, backward), of the embedding and of the head.
    """

    pool: int
    cluster: GpuCluster
    ways: ParallelDegrees
    layers: Layers
    forward_s: float
    backward_s: float
    first_s: tuple[float, float]
    last_s: tuple[float, float]

    @classmethod
    def of(cls, pool: int, cluster: GpuCluster, ways: ParallelDegrees, layers: Layers) -> StageSeat:
        """With the seconds of its layers."""
        block = layers.block
        ends = (layers.embedding, layers.head)
        first_s, last_s = ((end.forward.seconds, end.backward.seconds) for end in ends)
        return cls(pool, cluster, ways, layers, block.forward.seconds, block.backward.seconds, first_s, last_s)

    @property
    def gpus(self) -> int:
        """Of a stage."""
        return self.ways.tensor * self.ways.data

    @property
    def block_s(self) -> float:
        """Both passes of a block."""
        return self.forward_s + self.backward_s


class _Label(NamedTuple):
    """See the module's text; ``seat`` is that of the stage ahead, which a message takes ``hop_s`` from."""

    blocks: int
    used: tuple[int, ...]
    stages: int
    seat: int
    hop_s: float
    span_s: float
    below_s: float
    sums_s: float
    update_s: float
    chain: tuple[tuple[int, int], ...]
    """(seat, blocks) of each stage, in order."""


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
    num_given: int = 0
    _heap: list[tuple[float, int, int, _Label]] = field(default_factory=list)
    _order: Iterator[int] = field(default_factory=count)
    _known: dict[tuple[object, ...], list[_Label]] = field(default_factory=dict)
    _messages_s: dict[tuple[int, int, int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._micro_batches = self.ways.micro_batches(self.global_batch)
        self._pools = self.cluster.pools if isinstance(self.cluster, Pools) else ()
        self._bytes = message_bytes(self.shape, self.cluster, self.ways)
        self._hops_s: list[float] = []
        self._tied_s = 0.0
        self._latency_s = 0.0
        if isinstance(self.cluster, GpuCluster):
            hops = hops_of(self.shape, self.cluster, self.ways)
            longest = max(hops, key=lambda hop: hop.seconds, default=None)
            flowing = flowing_s(self.cluster, self.ways, longest) if longest is not None else 0.0
            self._hops_s = [hop.seconds - flowing for hop in hops]
            self._latency_s = 2 * (self.ways.pipeline - 1) * flowing
            self._tied_s = tied(self.shape, self.cluster, self.ways).seconds
        self._least_block_s = min((seat.block_s for seat in self.seats), default=inf)
        for number in range(len(self.seats)):
            start = _Label(0, (0,) * max(1, len(self._pools)), 0, number, 0.0, 0.0, 0.0, 0.0, 0.0, ())
            if self._room(start.used, number) is not None:
                self._push(start, self._even_s() + self._least_after_s)

    @property
    def bound_s(self) -> float:
        """No division that was not given yet has a shorter step."""
        return self._heap[0][0] if self._heap else inf

    def advance(self) -> tuple[ParallelDegrees, float] | None:
        """Lengthens the least label; a pipeline with its least time, if it is one."""
        bound_s, _, _, label = heapq.heappop(self._heap)
        self.labels_met += 1
        if label.seat < 0:
            self.num_given += 1
            return self._ways(label), bound_s
        for longer, least_s in self._longer(label):
            self._push(longer, least_s)
        return None

    def dive(self, width: int) -> Iterator[tuple[ParallelDegrees, float]]:
        """Pipelines, with their least, by the ``width`` least labels of each number of stages: maybe not the best."""
        level = [entry[3] for entry in heapq.nsmallest(width, self._heap)]
        while level:
            longer = sorted(
                (least_s, -label.blocks, place, label)
                for place, (label, least_s) in enumerate(chain.from_iterable(map(self._longer, level)))
                if least_s < self.above_s
            )
            yield from ((self._ways(label), least_s) for least_s, *_, label in longer[:width] if label.seat < 0)
            level = [label for *_, label in longer if label.seat >= 0][:width]

    def _push(self, label: _Label, least_s: float) -> None:
        if least_s >= self.above_s:
            return
        if not self.keep_all:
            key = (label.stages, label.blocks, label.used, label.seat, label.chain[-1:] if self._tied_apart else ())
            others = self._known.setdefault(key, [])
            if any(_is_as_good(other, label) for other in others):
                return
            others[:] = [other for other in others if not _is_as_good(label, other)]
            others.append(label)
        heapq.heappush(self._heap, (least_s, -label.blocks, next(self._order), label))

    @property
    def _tied_apart(self) -> bool:
        """Whether the tied embedding's sum depends on where the last stage is."""
        return bool(self._pools) and self.shape.has_table_at_both_ends

    def _longer(self, label: _Label) -> Iterator[tuple[_Label, float]]:
        """With the stage ahead, of each number of blocks, behind each seat that may be before it; their least."""
        seat = self.seats[label.seat]
        room = self._room(label.used, label.seat)
        if room is None:
            return
        window = label.stages + 1
        last = label.stages == 0
        left = self.shape.layers - label.blocks
        if self.stages is None or window == self.stages:
            yield from self._numbers(label, seat, room, -1, (left,))
        if self.stages is not None and window == self.stages:
            return
        behind = left - (1 if self.stages is None else self.stages - window)
        most = min(behind, self._most_blocks(label.seat, window, False, last))
        for before in range(len(self.seats)):
            yield from self._numbers(label, seat, room, before, range(1, most + 1))

    def _numbers(
        self,
        label: _Label,
        seat: StageSeat,
        room: tuple[GpuRange, tuple[int, ...]],
        before: int,
        numbers: Sequence[int],
    ) -> Iterator[tuple[_Label, float]]:
        place, used = room
        window = label.stages + 1
        last = label.stages == 0
        first = before < 0
        hop_s = 0.0
        if not first:
            ahead = self._room(used, before)
            if ahead is None:
                return
            hop_s = self._hop_s(window, before, ahead[0], label.seat, place)
        waits = self.ways.sends is not Sends.OVERLAPPED
        also = self.ways.sends is Sends.BLOCKING
        ahead_s = waits * hop_s + also * label.hop_s + first * seat.first_s[0] + last * seat.last_s[0]
        back_s = waits * label.hop_s + also * hop_s + first * seat.first_s[1] + last * seat.last_s[1]
        flies_s = 0.0 if waits else 2 * label.hop_s
        most = self._most_blocks(label.seat, window, first, last)
        tied_s = self._tied_s
        if first and self._tied_apart and not last:
            tied_s = self._ends_sum_s(place, label.chain[-1][0])
        for number in numbers:
            if number > most or number < 1:
                continue
            forward_s = number * seat.forward_s + ahead_s
            backward_s = number * seat.backward_s + back_s
            passes_s = forward_s + backward_s
            if self._micro_batches * passes_s >= self.above_s:
                break
            stay = self._stay_s(forward_s, backward_s, label.below_s + flies_s, window)
            span_s = max(stay, passes_s + flies_s + label.span_s) if not last else stay
            sums_s, update_s = self._after_s(label.seat, number, first, last)
            longer = _Label(
                label.blocks + number, used, window, before, hop_s, span_s, label.below_s + flies_s + passes_s,
                max(label.sums_s, sums_s), max(label.update_s, update_s), ((label.seat, number), *label.chain),
            )  # fmt: skip
            rest_s = (self.shape.layers - longer.blocks) * self._least_block_s  # passes of the blocks that are left
            pipeline_s = span_s if first else max(span_s + rest_s, self._longest_s(longer))
            after_s = max(longer.sums_s + longer.update_s, self._least_after_s)
            yield longer, pipeline_s + self._latency_s + after_s + tied_s

    def _stay_s(self, forward_s: float, backward_s: float, below_s: float, window: int) -> float:
        if self.ways.schedule == "1f1b":
            return stay_s(forward_s, backward_s, below_s, window, self._micro_batches)
        return self._micro_batches * (forward_s + backward_s)

    @functools.cached_property
    def _least_after_s(self) -> float:
        """Of the sums of gradients: a rank has as many weights of blocks as if all devices shared them, or more."""
        if self.ways.overlap_gradients:
            return 0.0
        devices = sum(pool.devices for pool in self._pools)
        stages = self.stages or devices / self.ways.data
        whole = self.shape.layers * parameters_of(self.shape, 1, 1, False, False)
        return min(
            gradients(seat.cluster, seat.ways, whole / stages / (1 if self._pools else seat.ways.tensor), 0.0).seconds
            for seat in self.seats
        )

    def _even_s(self) -> float:
        """Of any division into so many stages, or into stages on all pools."""
        blocks_s = self.shape.layers * self._least_block_s
        if self.stages is None:
            free = [pool.devices for pool in self._pools]
            return self._micro_batches * longest_s(self.shape.layers, self.seats, free)
        longest = self._micro_batches * -(-self.shape.layers // self.stages) * self._least_block_s
        return max(longest, even_s(self.stages, self._micro_batches, blocks_s) if self.ways.schedule == "1f1b" else 0.0)

    def _longest_s(self, label: _Label) -> float:
        """All micro-batches through the longest of the stages that are left."""
        left = self.shape.layers - label.blocks
        if self.stages is not None:
            return self._micro_batches * -(-left // (self.stages - label.stages)) * self._least_block_s
        free = [pool.devices - used for pool, used in zip(self._pools, label.used, strict=True)]
        if self._table is None:
            return self._micro_batches * longest_s(left, self.seats, free)
        return self._micro_batches * float(self._table[(left, *(gpus // self.ways.data for gpus in free))])

    @functools.cached_property
    def _table(self) -> NDArray[np.float64] | None:
        """Seconds of the longest stage at best, of so many blocks on so many GPUs of each pool, by replica.

        Of stages before others: each waits for a message, at least.
        """
        units = [pool.devices // self.ways.data + 1 for pool in self._pools]
        if np.prod(units, dtype=float) > _LARGEST_TABLE // self.shape.layers:
            return None
        hops_s = [self._least_hop_s(seat) for seat in self.seats]
        table = np.full((self.shape.layers + 1, *units), inf)
        table[0] = 0.0
        for blocks in range(1, self.shape.layers + 1):
            for seat, hop_s in zip(self.seats, hops_s, strict=True):
                degrees = [seat.ways.tensor * (pool == seat.pool) for pool in range(len(units))]
                kept = tuple(slice(0, max(0, unit - degree)) for unit, degree in zip(units, degrees, strict=True))
                longer = table[blocks][tuple(slice(degree, None) for degree in degrees)]
                for number in range(1, blocks + 1):
                    seconds = np.maximum(table[blocks - number][kept], number * seat.block_s + hop_s)
                    np.minimum(longer, seconds, out=longer)
        return table

    def _least_hop_s(self, seat: StageSeat) -> float:
        if not isinstance(self.cluster, Pools) or self.ways.sends is Sends.OVERLAPPED:
            return 0.0
        return self.cluster.least_hop_s(self.ways, self._bytes, seat.cluster, seat.ways.tensor)

    def _room(self, used: tuple[int, ...], number: int) -> tuple[GpuRange, tuple[int, ...]] | None:
        """Where the next stage on that seat is, and what is used then; None: there is no room."""
        seat = self.seats[number]
        if not self._pools:
            return GpuRange(seat.cluster, seat.ways.tensor, 0, 0), used
        pool: GpuPool = self._pools[seat.pool]
        start, stop = pool.after(used[seat.pool], seat.ways.tensor, self.ways.data)
        if stop > pool.devices:
            return None
        filled = (*used[: seat.pool], stop, *used[seat.pool + 1 :])
        return GpuRange(pool.cluster, seat.ways.tensor, start, stop), filled

    def _hop_s(self, window: int, before: int, one: GpuRange, number: int, other: GpuRange) -> float:
        """From the stage before, on the seat ``before``, to that of ``window``, counted from the last."""
        if not isinstance(self.cluster, Pools):
            return self._hops_s[self.ways.pipeline - 1 - window]
        key = before, one.start, number, other.start
        if key not in self._messages_s:
            self._messages_s[key] = self.cluster.hop(self.ways, self._bytes, one, other).seconds
        return self._messages_s[key]

    def _ends_sum_s(self, first: GpuRange, number: int) -> float:
        """Of the tied embedding's gradient, between the first stage and the last, on that seat."""
        if not isinstance(self.cluster, Pools):
            return self._tied_s
        last = self._room((0,) * len(self._pools), number)
        return self.cluster.sum_of_two(self.shape, self.ways, first, last[0]).seconds if last else 0.0

    @once
    def _most_blocks(self, number: int, window: int, first: bool, last: bool) -> int:
        """By seat, stages from the stage on, and whether it is the first and the last: as many blocks as fit."""
        seat = self.seats[number]
        held = chain_in_flight(self.ways.schedule, window, self._micro_batches)[0]
        none, one = (
            memory_with(self.shape, seat.ways, blocks, held, (first, last), self.cluster.width).total
            for blocks in (0, 1)
        )
        return max(0, int((seat.cluster.usable_bytes - none) / (one - none) * (1 + 1e-12)))

    @once
    def _after_s(self, number: int, blocks: int, first: bool, last: bool) -> tuple[float, float]:
        """By seat, blocks, and whether it is the first and the last stage: sum of gradients, and update."""
        seat = self.seats[number]
        layers = seat.layers
        ends = (first, last)
        beside_s = blocks * seat.backward_s + first * seat.first_s[1] + last * seat.last_s[1]
        parameters = parameters_of(self.shape, seat.ways.tensor, blocks, *ends)
        summed = gradients(seat.cluster, seat.ways, parameters, beside_s).seconds
        return summed, optimiser(self.shape, seat.cluster, seat.ways, blocks, ends, layers).seconds

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


def _is_as_good(label: _Label, other: _Label) -> bool:
    """Whether it is nowhere more than the other."""
    return (
        label.hop_s <= other.hop_s
        and label.span_s <= other.span_s
        and label.below_s <= other.below_s
        and label.sums_s <= other.sums_s
        and label.update_s <= other.update_s
    )


def longest_s(blocks: int, seats: Sequence[StageSeat], free: Sequence[int]) -> float:
    """Passes of the longest stage at least, if all free GPUs of the pools are as busy as they can be."""
    rates = [0.0] * len(free)
    for seat in seats:
        rates[seat.pool] = max(rates[seat.pool], 1 / (seat.block_s * seat.gpus))
    rate = sum(gpus * rate for gpus, rate in zip(free, rates, strict=True))
    return blocks / rate if rate else inf


def uniform_s(
    shape: Transformer, pools: Pools, ways: ParallelDegrees, global_batch: int, seats: Sequence[StageSeat]
) -> float:
    """What a pipeline through all pools takes, about, whose stages have one tensor degree and are equally long.

    (M + p - 1) times a stage and the messages on both of its sides, and the sums of its gradients.
    """
    micro_batches = ways.micro_batches(global_batch)
    num_bytes = message_bytes(shape, pools, ways)
    whole = shape.layers * parameters_of(shape, 1, 1, False, False)
    best_s = inf
    for tensor in {seat.ways.tensor for seat in seats}:
        own = sorted((seat for seat in seats if seat.ways.tensor == tensor), key=lambda seat: seat.block_s)
        stages = 0
        rate = 0.0
        for seat in own:
            number = min(pools.pools[seat.pool].devices // seat.gpus, shape.layers - stages)
            stages = stages + number
            rate = rate + number / seat.block_s
        if stages:
            hop_s = max(pools.least_hop_s(ways, num_bytes, seat.cluster, tensor) for seat in own)
            stage_s = shape.layers / rate + 2 * hop_s * (stages > 1)
            sums_s = max(gradients(seat.cluster, seat.ways, whole / stages / tensor, 0.0).seconds for seat in own)
            best_s = min(best_s, (micro_batches + stages - 1) * stage_s + sums_s)
    return best_s


def seats_of(
    shape: Transformer, pools: Sequence[GpuCluster], ways: ParallelDegrees, tensors: Sequence[int]
) -> list[StageSeat]:
    """The seats of each pool at each degree that divides the network and that something times."""
    seats = []
    for number, cluster in enumerate(pools):
        for tensor in tensors:
            own = replace(ways, tensor=tensor)
            if cluster.timed is None or cluster.timed.of(own) is not None:
                seats.append(StageSeat.of(number, cluster, own, stage_layers(shape, cluster, own)))
    return seats
