"""1F1B, which alternates after a warm-up; what differs in the warm-up, messages, stages a position, or the late W."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from planner.ir.schedule import ALONE, IN_PAIRS, Action, Op, Pipeline, Schedule, Traits
from planner.passes.events import StageClock
from planner.schedules._registry import registered
from planner.schedules._rows import (
    Row,
    by_position,
    clamped,
    depth_of,
    depths,
    in_turn,
    require_positions,
    split,
    turns,
    twice_depth,
)


@registered("1f1b", Traits(by_default=True), max_in_flight=depth_of)
def one_f_one_b(pipeline: Pipeline) -> Schedule:
    """1F1B: a few forwards, then backward and forward in turn, so that few activations are kept (PipeDream-flush).

        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2

    Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML 2021, section 2.2 (DAPPLE's early
    backward, PPoPP 2021, is the same).  The warm-up of a stage is the number of stages on the longest path from it to
    the end of the pipeline, itself included: in a chain of p stages, stage s keeps min(m, p - s) micro-batches at
    most.

    Free of deadlock on any DAG: F of micro-batch i waits, through B of i - w and the B of a successor (whose warm-up is
    smaller), for forwards of micro-batches before i alone.
    """
    return Schedule(turns("1f1b", pipeline))


@registered("1f1b-so", Traits(by_default=True), max_in_flight=twice_depth)
def so(pipeline: Pipeline) -> Schedule:
    """1F1B-SO: 1F1B with a doubled warm-up, so that messages travel while others compute (synchronous, overlapped).

        0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3

    BaPipe (Zhao et al., arXiv 2012.12544, 2020), its scheduling for devices that overlap.  In a chain of p stages,
    stage s runs 2 (p - s) - 1 forwards before its first backward: for every hop downstream one more micro-batch is
    under way, which hides transfers c up to (F + B) / 2.  With DAGs, p - s is the number of stages on the longest
    path downstream, as in 1F1B, and it is free of deadlock for the same reason.
    """
    return Schedule(turns("1f1b-so", pipeline))


@registered("1f1b-sno", Traits(blocking=True), max_in_flight=depth_of)
def sno(pipeline: Pipeline) -> Schedule:
    """1F1B-SNO: 1F1B on devices that cannot compute while they send or receive (synchronous, not overlapped).

        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2

    BaPipe (Zhao et al., arXiv 2012.12544, 2020), its scheduling for devices that do not overlap.  The order is that of
    1F1B; its messages hold both of their ranks for as long as they travel: the sender first, then the receiver.  The
    lowered actions say so (``0SEND_F0>1!``), so that the simulator prices it from the program alone.
    """
    return Schedule(turns("1f1b-sno", pipeline), blocking=True)


@registered("1f1b-as", Traits(streams=ALONE), max_in_flight=depth_of)
def alternating_streams(pipeline: Pipeline) -> Schedule:
    """1F1B-AS: 1F1B on devices that send what they make as they make it (asynchronous, streaming).

        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2

    BaPipe (Zhao et al., arXiv 2012.12544, 2020), its scheduling for FPGAs that run one pass at a time.  The order and
    the memory are those of 1F1B: stage s = 1 ... p keeps min(m, p - s + 1) micro-batches.  A pass lasts at least as
    long as what it sends or receives, SR, which then costs nothing beside it: of equal stages a step is (m + p - 1)
    (max(F, SR) + max(B, SR)).  Between devices that cannot stream, messages are those of 1F1B.
    """
    return Schedule(turns("1f1b-as", pipeline), streams=ALONE)


@registered("fbp-as", Traits(streams=IN_PAIRS), max_in_flight=twice_depth)
def pairs_stream(pipeline: Pipeline) -> Schedule:
    """FBP-AS: a forward and a backward at once, each on its part of a device that streams (asynchronous).

        0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3

    BaPipe (Zhao et al., arXiv 2012.12544, 2020), its scheduling for FPGAs whose multipliers are divided between the
    passes, in proportion to their work.  A pair then lasts F + B, and what either sends has all of that time: half of
    the bandwidth of 1F1B-AS or less, for the activations of twice the micro-batches, min(m, 2 (p - s) + 1) on stage s =
    1 ... p.  Of equal stages a step is (m + p - 1) max(F + B, SR).  A row here has the passes of a pair one after the
    other, which is as long and in which the same gradients are summed in the same order; it is that of 1F1B-SO.
    """
    return Schedule(turns("fbp-as", pipeline), streams=IN_PAIRS)


@registered("1f1b-windowed", Traits(windowed=True, by_default=True))
def windowed(pipeline: Pipeline) -> Schedule:
    """Windowed 1F1B: the plan says how many forwards each stage runs before its first backward (W_s).

        0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3
        2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

    (Windows 3, 4, 1: the second is lowered to the first.)  With W_s = p - s this is 1F1B, with 2 (p - s) - 1 it is
    1F1B-SO (BaPipe), with the number of micro-batches it is GPipe; between them W_s is what bounds both the
    activations that stage s keeps and the period, since a micro-batch comes back after its round trip: a period is at
    least round trip / W_s.  A window larger than that of a stage upstream is lowered to it, which makes any DAG free
    of deadlock (proof in ``_rows.clamped``).  Without windows it is 1F1B.
    """
    windows = clamped(pipeline.windows or depth_of(pipeline), pipeline.stages)
    return Schedule(turns("1f1b-windowed", pipeline, windows))


@registered("interleaved", Traits(stages_per_position=0))
def interleaved(pipeline: Pipeline) -> Schedule:
    """Interleaved 1F1B: each position runs several stages, p apart, so that a micro-batch passes it several times.

        0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

    Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC 2021,
    section 2.2.2, figure 4.  Stage s runs at position s mod p (p positions, v = S / p stages on each).  Forwards go p
    micro-batches through a position's first stage, then the same p through its next, and so on; backwards likewise
    from its last stage; position r runs 2 (p - r - 1) + (v - 1) p forwards, then forward and backward in turn.  The
    bubble is that of 1F1B over v, at v times as many messages.  With one stage on each position it is 1F1B.

    The paper asks for a multiple of p micro-batches and of p stages.  Here the order is that of the next multiples,
    without the micro-batches and stages that do not exist: what must precede what stays among those that do.  A DAG
    needs no more than the chain of its stages in topological order, in which every edge is implied.

    Raises:
        UsageError: stage s is not at position s mod p.
    """
    num_positions = pipeline.num_positions
    num_stages = pipeline.stages.num_stages
    per_position = -(-num_stages // num_positions)
    require_positions("interleaved", pipeline, tuple(s % num_positions for s in range(num_stages)))
    return Schedule(tuple(tuple(_passed_again(pipeline, r, per_position)) for r in range(num_positions)))


def chunks_in_flight(num_positions: int, per_position: int, position: int) -> int:
    """The most that a position has in flight of interleaved 1F1B, in micro-batches of one stage, of many of them."""
    ahead = num_positions - position - 1
    return (2 * ahead + (per_position - 1) * num_positions if per_position > 1 else ahead) + 1


def _passed_again(pipeline: Pipeline, position: int, per_position: int) -> Iterator[Action]:
    p = pipeline.num_positions
    v = per_position
    stages = pipeline.stages
    count = -(-stages.num_microbatches // p) * p * v
    warm_up = min(count, chunks_in_flight(p, v, position) - 1)
    sequence = [(Op.FORWARD, k) for k in range(warm_up)]
    for k in range(count - warm_up):
        sequence += [(Op.FORWARD, warm_up + k), (Op.BACKWARD, k)]
    sequence += [(Op.BACKWARD, k) for k in range(count - warm_up, count)]
    for op, k in sequence:
        turn = k // p % v
        stage = (turn if op is Op.FORWARD else v - 1 - turn) * p + position
        microbatch = k // (p * v) * p + k % p
        if stage < stages.num_stages and microbatch < stages.num_microbatches:
            yield Action(stage, op, microbatch)


@registered("1f1b-2bp", Traits(splits_backward=True, windowed=True))
def two_bp(pipeline: Pipeline) -> Schedule:
    """1F1B with 2BP: all backwards for the weights at the end, or as late as a limit on memory lets them be.

        0F0 0F1 0I0 0F2 0I1 0I2 0W0 0W1 0W2
        1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2

    Rae et al., "2BP: 2-stage backpropagation", arXiv 2405.18047, 2024, figure 1.  What a W needs is kept until it has
    run, so that without a limit every stage keeps all micro-batches in the end.  With windows, W_s is the most that
    stage s keeps between F and W: a W that was put off runs before a forward that would be one more, and the warm-up
    is W_s where that is less than 1F1B's.  Windows are lowered as in windowed 1F1B.
    """
    stages = pipeline.stages
    limits = pipeline.windows or (stages.num_microbatches,) * stages.num_stages
    warm_ups = clamped(map(min, limits, depths(stages)), stages)
    rows = [
        split(in_turn(s, warm_up, stages.num_microbatches), held=max(limit, warm_up))
        for s, (warm_up, limit) in enumerate(zip(warm_ups, limits, strict=True))
    ]
    return Schedule(by_position("1f1b-2bp", pipeline, rows))


@registered("1f1b-2bp-fill", Traits(splits_backward=True, windowed=True, timed=True))
def two_bp_fill(pipeline: Pipeline) -> Schedule:
    """1F1B with 2BP, in which a backward for the weights also runs early where its stage would otherwise wait.

        0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2
        1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2

    Rae et al., "2BP: 2-stage backpropagation", arXiv 2405.18047, 2024; W in gaps as in Qi et al., "Zero bubble
    pipeline parallelism", ICLR 2024, section 3 (automatic scheduling).  Computed from ``Pipeline.times`` and
    ``transfer``: the order of F and I is that of 1F1B; a W runs in a gap that it does not make longer, all others at
    the end.  Windows are limits on memory as in 1F1B with 2BP.
    """
    stages = pipeline.stages
    limits = pipeline.windows or (stages.num_microbatches,) * stages.num_stages
    warm_ups = clamped(map(min, limits, depths(stages)), stages)
    rows = [in_turn(s, warm_up, stages.num_microbatches) for s, warm_up in enumerate(warm_ups)]
    held = [max(limit, warm_up) for limit, warm_up in zip(limits, warm_ups, strict=True)]
    by_position("1f1b-2bp-fill", pipeline, rows)  # one stage each, or an error
    return Schedule(by_position("1f1b-2bp-fill", pipeline, _Filling(pipeline, rows, held).rows()))


class _Filling:
    """The stages while they are filled: always the one that can start first is advanced, so that gaps are known."""

    def __init__(self, pipeline: Pipeline, rows: list[Row], held: list[int]) -> None:
        self.clock = StageClock(pipeline)
        self.most_held = held
        self.num_held = [0] * len(rows)
        self.position = [pipeline.position(stage) for stage in range(len(rows))]
        self.main = [[action for action in split(row) if action.op is not Op.BACKWARD_WEIGHT] for row in rows]
        self.done: list[list[Action]] = [[] for _ in rows]
        self.late: list[deque[int]] = [deque() for _ in rows]
        self.near: list[set[int]] = [{stage} for stage in range(len(rows))]
        for edge in pipeline.stages.edges:
            self.near[edge.src].add(edge.dst)
            self.near[edge.dst].add(edge.src)

    def rows(self) -> list[Row]:
        """The rows with their W in place."""
        at = [0] * len(self.main)
        starts = [self._next(stage, 0) for stage in range(len(at))]
        for _ in range(sum(map(len, self.main))):
            _, stage, ready = min(start for start in starts if start is not None)
            self._advance(stage, self.main[stage][at[stage]], ready)
            at[stage] += 1
            for other in self.near[stage]:
                starts[other] = self._next(other, at[other])
        rest = ([Action(stage, Op.BACKWARD_WEIGHT, m) for m in late] for stage, late in enumerate(self.late))
        return [(*row, *late) for row, late in zip(self.done, rest, strict=True)]

    def _next(self, stage: int, index: int) -> tuple[float, int, float] | None:
        """(start, stage, when its needs are met) of a stage's next F or I; None if that is not known yet."""
        if index == len(self.main[stage]):
            return None
        action = self.main[stage][index]
        ready = self.clock.ready(stage, action.op, action.microbatch or 0)
        return None if ready is None else (max(ready, self.clock.free[self.position[stage]]), stage, ready)

    def _advance(self, stage: int, action: Action, ready: float) -> None:
        """Runs ``action`` after the W that fit before it, or must come before it."""
        microbatch = action.microbatch or 0
        lasts = self.clock.duration(stage, Op.BACKWARD_WEIGHT)
        while self.late[stage] and ready - self.clock.free[self.position[stage]] >= lasts:
            self._weights(stage)
        while action.op is Op.FORWARD and self.late[stage] and self.num_held[stage] >= self.most_held[stage]:
            self._weights(stage)
        self.clock.run(stage, action.op, microbatch, ready)
        self.done[stage].append(action)
        if action.op is Op.FORWARD:
            self.num_held[stage] += 1
        else:
            self.late[stage].append(microbatch)

    def _weights(self, stage: int) -> None:
        microbatch = self.late[stage].popleft()
        self.clock.run(stage, Op.BACKWARD_WEIGHT, microbatch, 0.0)
        self.done[stage].append(Action(stage, Op.BACKWARD_WEIGHT, microbatch))
        self.num_held[stage] -= 1
