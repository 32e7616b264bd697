"""List scheduling: greedy from measured times; waves and bidirectional pipelines once, as if all stages were equal."""

from __future__ import annotations

import math
from dataclasses import replace
from operator import itemgetter

from planner.ir.schedule import Action, Op, Pipeline, Schedule, StageTimes, Traits, Windows
from planner.passes.events import StageClock
from planner.schedules._registry import registered
from planner.schedules._rows import Row, require_positions, stages_by_position, zigzag

Choice = tuple[float, bool, int, int, float]
"""(start, is a forward, micro-batch, minus the stage, when its needs are met); the smallest runs first."""

FACTORS = (1.0, 1.25, 1.5, 2.0, 3.0)

_EQUAL = StageTimes(1.0, 0.5, 0.5)
"""A backward as long as a forward: the order that this gives is also the best for one of twice its length (tests)."""


@registered("greedy", Traits(stages_per_position=0, windowed=True, timed=True))
def greedy(pipeline: Pipeline) -> Schedule:
    """Greedy: list scheduling from measured times; whatever can start first runs next, backwards before forwards.

        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2

    For any DAG of stages, any number of them on a position, unequal times and slow links, where no published order
    fits. At any time the action that can start first is appended to its position's row; at a tie a backward goes
    first, then the smaller micro-batch, then the later stage.  A stage starts no forward while it holds as many
    micro-batches as its window.  Without windows, W_s = a factor * round trip from s / time of the busiest position,
    rounded up: with 1 the way there and back does not limit the pace (1F1B where all times are equal and transfers
    free), with more there is slack for unequal waits.  The factor is that of ``FACTORS`` which ends first, the
    smallest of equals.

    Free of deadlock: of the smallest micro-batch that is not done, some action has all it needs, and its stage holds no
    other.
    """
    if pipeline.windows:
        return Schedule(list_scheduled(pipeline, pipeline.windows)[1])
    windows = dict.fromkeys(_windows(StageClock(pipeline), factor) for factor in FACTORS)
    return Schedule(min((list_scheduled(pipeline, each) for each in windows), key=itemgetter(0))[1])


@registered("hanayo", Traits(stages_per_position=0), positions=zigzag)
def hanayo(pipeline: Pipeline) -> Schedule:
    """Hanayo: each position runs several stages, which lie down and up again in waves; no replicas.

        0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1
        1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1

    Liu et al., "Hanayo: harnessing wave-like pipeline parallelism for enhanced large model training efficiency", SC
    2023, section 3.  On each of p positions lie two stages a wave: W waves divide the bubble by W, at 2 W times the
    messages (nothing is sent at a turn).  Where F and B are those of all stages of a position and F = B, m
    micro-batches take m (F + B) + (p - 1) F / W; p of them with B = 2 F take p (F + B) + 2 (p - 1) F / W, which is a
    bubble of (2 p - 2) / (3 p W + 2 p - 2).  No position keeps more than the first of 1F1B.

    The order is that of list scheduling with equal times, whatever the stages last: backwards first, then the smaller
    micro-batch, then the later stage.  It is free of deadlock on any DAG, as ``greedy`` is.

    Raises:
        UsageError: the stages do not lie in waves.
    """
    return _in_waves("hanayo", pipeline)


@registered("chimera", Traits(stages_per_position=2, bidirectional=True), positions=zigzag)
def chimera(pipeline: Pipeline) -> Schedule:
    """Chimera: two pipelines in opposite directions, which fill each other's bubbles; every stage has two replicas.

        0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1
        1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1

    Li and Hoefler, "Chimera: efficiently training large-scale neural networks with bidirectional pipelines", SC 2021,
    section 3.  Of D stages, stage s is on the ranks s and D - 1 - s.  One half of each micro-batch goes down, from rank
    0 to rank D - 1, the other half goes up at the same time.  So the ranks r and D - 1 - r do the same in the same
    order, and are one position here, of D / 2.  A micro-batch is two of the paper's: its N are N / 2 here.

    With F = B, N = D of them take (2 D + D - 2) F: D - 2 bubbles where 1F1B has 2 (D - 1).  A rank keeps D / 2 + 1 to D
    of their activations, and two stages' weights.  As two waves on D / 2 positions with replicas (``hanayo``), but that
    the messages at the turn go between ranks.

    Raises:
        UsageError: there are not two stages on each position, down and up again.
    """
    return _in_waves("chimera", pipeline)


def _in_waves(name: str, pipeline: Pipeline) -> Schedule:
    stages = pipeline.stages
    p = pipeline.num_positions
    require_positions(name, pipeline, zigzag(p, -(-stages.num_stages // p))[: stages.num_stages])
    alike = replace(pipeline, windows=(), times=(_EQUAL,) * stages.num_stages, transfer=0.0)
    return Schedule(list_scheduled(alike, (stages.num_microbatches,) * stages.num_stages)[1])


def list_scheduled(pipeline: Pipeline, windows: Windows) -> tuple[float, tuple[Row, ...]]:
    """When the last action ends, and the rows: what can start first goes next, backwards before forwards.

    Args:
        windows: by stage, the most micro-batches that it holds.
    """
    stages = pipeline.stages
    clock = StageClock(pipeline)
    limits = [max(1, window) for window in windows]
    near: list[set[int]] = [{pipeline.position(s)} for s in range(stages.num_stages)]
    for edge in stages.edges:
        near[edge.src].add(pipeline.position(edge.dst))
        near[edge.dst].add(pipeline.position(edge.src))
    stages_of = stages_by_position(pipeline)
    started = {op: [0] * stages.num_stages for op in (Op.FORWARD, Op.BACKWARD)}
    rows: list[list[Action]] = [[] for _ in stages_of]
    best = [_choice(clock, held, started, limits) for held in stages_of]
    for _ in range(2 * stages.num_stages * stages.num_microbatches):
        _, is_forward, microbatch, minus_stage, ready = min(choice for choice in best if choice is not None)
        stage = -minus_stage
        op = Op.FORWARD if is_forward else Op.BACKWARD
        clock.run(stage, op, microbatch, ready)
        rows[pipeline.position(stage)].append(Action(stage, op, microbatch))
        started[op][stage] += 1
        for position in near[stage]:
            best[position] = _choice(clock, stages_of[position], started, limits)
    return max(clock.free), tuple(map(tuple, rows))


def _choice(
    clock: StageClock, stages: tuple[int, ...], started: dict[Op, list[int]], limits: list[int]
) -> Choice | None:
    """What a position would run next; None if it has to wait for something that has not run yet."""
    choices: list[Choice] = []
    for stage in stages:
        forwards = started[Op.FORWARD][stage]
        backwards = started[Op.BACKWARD][stage]
        possible = [(False, backwards)] if backwards < forwards else []
        if forwards < clock.pipeline.stages.num_microbatches and forwards - backwards < limits[stage]:
            possible.append((True, forwards))
        for is_forward, microbatch in possible:
            ready = clock.ready(stage, Op.FORWARD if is_forward else Op.BACKWARD, microbatch)
            if ready is not None:
                start = max(ready, clock.free[clock.pipeline.position(stage)])
                choices.append((start, is_forward, microbatch, -stage, ready))
    return min(choices, default=None)


def _windows(clock: StageClock, factor: float) -> tuple[int, ...]:
    """By stage, the micro-batches that pass the busiest position in ``factor`` times the way to the end and back."""
    stages = clock.pipeline.stages
    work = [clock.duration(s, Op.FORWARD) + clock.duration(s, Op.BACKWARD) for s in range(stages.num_stages)]
    trip = list(work)
    for edge in sorted(stages.edges, key=lambda edge: edge.src, reverse=True):
        trip[edge.src] = max(trip[edge.src], work[edge.src] + 2 * clock.hop(edge.src, edge.dst) + trip[edge.dst])
    busiest = max(sum(work[s] for s in held) for held in stages_by_position(clock.pipeline))
    if busiest <= 0:
        return (stages.num_microbatches,) * stages.num_stages
    counts = (math.ceil(factor * each / busiest - 1e-9) for each in trip)
    return tuple(min(stages.num_microbatches, count) for count in counts)
