"""Zero bubble: the backward split, and its half for the weights put off to where a position would idle."""

from __future__ import annotations

from collections import Counter

from planner.ir.schedule import Action, Op, Pipeline, Schedule, Traits
from planner.schedules._registry import registered
from planner.schedules._rows import by_position, depths, in_turn, require_positions, split, zigzag


@registered("zb-h1", Traits(splits_backward=True))
def zb_h1(pipeline: Pipeline) -> Schedule:
    """ZB-H1: 1F1B with the backward split, and W put off to where 1F1B would idle, in the memory of 1F1B.

        0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

    Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 2.  In a chain of p stages, stage s puts off at
    most s of its W: with its p - s micro-batches in flight it keeps no more than p, which is what the first stage of
    1F1B keeps.  On a DAG, p is the longest path of all and p - s the longest path downstream.  W concerns its own
    stage alone, hence this is free of deadlock where 1F1B is.
    """
    stages = pipeline.stages
    downstream = depths(stages)
    longest = max(downstream)
    rows = [
        split(in_turn(s, depth, stages.num_microbatches), backlog=longest - depth) for s, depth in enumerate(downstream)
    ]
    return Schedule(by_position("zb-h1", pipeline, rows))


@registered("zb-h2", Traits(splits_backward=True))
def zb_h2(pipeline: Pipeline) -> Schedule:
    """ZB-H2: a doubled warm-up and twice the W put off, which leaves no bubble where F = I = W, for twice the memory.

        0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3

    Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 2.  In a chain of p stages, stage s runs
    2 (p - s) - 1 forwards before its first backward and puts off at most 2 s of its W: it keeps at most 2 p - 1
    micro-batches.  On a DAG, p is the longest path of all and p - s the longest path downstream.
    """
    stages = pipeline.stages
    downstream = depths(stages)
    longest = max(downstream)
    rows = [
        split(in_turn(s, 2 * depth - 1, stages.num_microbatches), backlog=2 * (longest - depth))
        for s, depth in enumerate(downstream)
    ]
    return Schedule(by_position("zb-h2", pipeline, rows))


_F = Op.FORWARD
_I = Op.BACKWARD_INPUT
_W = Op.BACKWARD_WEIGHT


@registered("zb-v", Traits(splits_backward=True, stages_per_position=2), positions=zigzag)
def zb_v(pipeline: Pipeline) -> Schedule:
    """ZB-V: two stages on a position in the shape of a V, no bubble where F = I = W, in the memory of 1F1B.

        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
        1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

    Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 6.  Position r of p runs stages r and 2 p - 1 -
    r, so input and loss are on the first position.  The published order is for at least 2 p - 1 micro-batches; with
    fewer it is the same order without those that do not exist.  A DAG needs no more than the chain of its stages in
    topological order, in which every edge is implied.

    Raises:
        UsageError: there are not two stages on each position, in the shape of a V.
    """
    p = pipeline.num_positions
    require_positions("zb-v", pipeline, zigzag(p, 2))
    return Schedule(tuple(_v_row(p, r, pipeline.stages.num_microbatches) for r in range(p)))


def _v_row(p: int, r: int, num_microbatches: int) -> tuple[Action, ...]:
    down = r
    up = 2 * p - 1 - r
    count = max(2 * p - 1, num_microbatches)
    done: Counter[tuple[int, Op]] = Counter()
    row: list[Action] = []

    def put(stage: int, *ops: Op) -> None:
        for op in ops:
            row.append(Action(stage, op, done[stage, op]))
            done[stage, op] += 1

    put(down, *[_F] * (2 * (p - r) - 1))
    for _ in range(r):
        put(up, _F)
        put(down, _F)
    for _ in range(p - r):
        put(up, _F, _I, _W)
    while done[up, _F] < count:
        put(down, *[_F] * (done[down, _F] < count), _I, _W)
        put(up, _F, _I, _W)
    for _ in range(r):
        put(down, _I)
        put(up, _I)
    put(down, *[_I, _W] * (p - r))
    for stage in (up, down):
        put(stage, *[_W] * (done[stage, _I] - done[stage, _W]))
    return tuple(action for action in row if (action.microbatch or 0) < num_microbatches)
