"""1F1B with 2BP, in which a backward for the weights also runs early where its stage would otherwise wait.

    0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2
    1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2

Rae et al., "2BP: 2-stage backpropagation", arXiv 2405.18047, 2024; W in gaps as in Qi et al., "Zero bubble pipeline
parallelism", ICLR 2024, section 3 (automatic scheduling).  Computed from ``Pipeline.times`` and ``transfer``: the order
of F and I is that of 1F1B; a W runs in a gap that it does not make longer, all others at the end.  Windows are limits
on memory as in 1F1B with 2BP.
"""

from __future__ import annotations

from collections import deque

from planner.ir.schedule import Action, Op, Pipeline, Schedule, Traits
from planner.schedules._clock import Clock
from planner.schedules._rows import Row, by_position, clamped, depths, in_turn, split

NAME = "1f1b-2bp-fill"
TRAITS = Traits(splits_backward=True, windowed=True, timed=True)


def order(pipeline: Pipeline) -> Schedule:
    """1F1B with W in its gaps."""
    stages = pipeline.stages
    limits = pipeline.windows or (stages.num_microbatches,) * stages.num_stages
    warm_ups = clamped(map(min, limits, depths(stages)), stages)
    rows = [in_turn(s, warm_up, stages.num_microbatches) for s, warm_up in enumerate(warm_ups)]
    held = [max(limit, warm_up) for limit, warm_up in zip(limits, warm_ups, strict=True)]
    by_position(NAME, pipeline, rows)  # one stage each, or an error
    return Schedule(by_position(NAME, pipeline, _Filling(pipeline, rows, held).rows()))


class _Filling:
    """The stages while they are filled: always the one that can start first is advanced, so that gaps are known."""

    def __init__(self, pipeline: Pipeline, rows: list[Row], held: list[int]) -> None:
        self.clock, self.most_held, self.num_held = Clock(pipeline), held, [0] * len(rows)
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
        microbatch, lasts = action.microbatch or 0, self.clock.duration(stage, Op.BACKWARD_WEIGHT)
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
