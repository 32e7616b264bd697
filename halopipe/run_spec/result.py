"""How far a run is, and what came of it.

result = run_plan(plan, RunOptions(steps=20))
result.losses, result.measured(plan.prediction)
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from planner.ir.plan import Measured, Prediction, RankMeasured
from planner.ir.schedule import Action, Op
from planner.ir.timeline import Drift, LonePasses, Restart, Timeline, TimelineFile

if TYPE_CHECKING:
    from runtime.numerics.compare import NumericsReport


@dataclass(frozen=True, slots=True)
class Score:
    """What an evaluation showed.

    Attributes:
        step: training steps done before.
        loss: the mean over all samples.
        accuracy: share of right answers; None where the model does not classify.
        metrics: what metrics of one's own say, by name.
    """

    step: int
    loss: float
    num_samples: int
    accuracy: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far a run is.

    Attributes:
        step: complete steps, those before a checkpoint included.
        loss: of the last one, where it is known already.
        step_s: how long it took.
        word: what happened, a line for people; empty where nothing did but steps.
    """

    step: int
    num_steps: int
    loss: float | None
    step_s: float
    word: str = ""


Progress = Callable[[RunProgress], None]


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run showed.

    Attributes:
        losses: by step.
        step_seconds: by step, of the slowest rank.
        warmup: how many of them are left out of medians.
        timeline: the step of median length.
        stage_forward_s, stage_backward_s: median per micro-batch, by stage.
        peak_bytes: by rank, the most memory in use in one step: what stays between steps, and what torch allocated on
            top in the last warm-up step; 0 where there was none.
        numerics: how far the first steps were from one device's, or why that is not known; None if it was not asked.
        first_step: steps done before, by a run that this one went on from.
        scores: of the evaluations, in order.
        trained: whether the steps were training steps; those of a plan of forward passes are not.
        timed_steps: the last steps after warm-up, in order.
        stage_update_s, stage_reduction_s, ranks: as of :class:`planner.ir.plan.Measured`.
        data: what data it was, and how it was asked for.
        transport: that the ranks exchanged by; empty of one rank.
        lone: stages that were run alone; ``not_lone``: why some were not.
        restarts: one for each loss of ranks; losses, seconds and scores are of all attempts, the rest of the last one.
        end: that all steps had been done before, in words; nothing was run then.
    """

    losses: tuple[float, ...]
    step_seconds: tuple[float, ...]
    warmup: int
    timeline: Timeline
    stage_forward_s: tuple[float, ...]
    stage_backward_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    numerics: NumericsReport | None = None
    first_step: int = 0
    scores: tuple[Score, ...] = ()
    trained: bool = True
    timed_steps: tuple[Timeline, ...] = ()
    stage_update_s: tuple[float, ...] = ()
    stage_reduction_s: tuple[float, ...] = ()
    ranks: tuple[RankMeasured, ...] = ()
    data: str = ""
    transport: str = ""
    lone: tuple[LonePasses, ...] = ()
    not_lone: str = ""
    restarts: tuple[Restart, ...] = ()
    end: str = ""

    @property
    def timed_seconds(self) -> tuple[float, ...]:
        """The steps after warm-up; all where there are no others."""
        return self.step_seconds[self.warmup :] or self.step_seconds

    def timeline_file(self, predicted: Timeline, drift: Drift | None = None) -> TimelineFile:
        """What is written to ``timeline.json``."""
        steps = predicted, self.timeline, self.step_seconds, self.losses
        return TimelineFile(*steps, self.transport, drift, self.restarts)

    def measured(self, prediction: Prediction) -> Measured:
        """What is written into the plan, beside its prediction."""
        timed = self.timed_seconds
        step_s = statistics.median(timed)
        quartiles = statistics.quantiles(timed, n=4) if len(timed) > 1 else [step_s] * 3
        return Measured(
            step_s=step_s,
            spread=(quartiles[2] - quartiles[0]) / step_s,
            num_steps=len(timed),
            stage_forward_s=self.stage_forward_s,
            stage_backward_s=self.stage_backward_s,
            peak_bytes=self.peak_bytes,
            error=self._error(step_s, prediction),
            stage_update_s=self.stage_update_s,
            stage_reduction_s=self.stage_reduction_s,
            ranks=self.ranks,
            transport=self.transport,
        )

    def _error(self, step_s: float, prediction: Prediction) -> float | None:
        if prediction.other_transport(self.transport):
            return None
        return step_s / prediction.step_s - 1 if prediction.step_s else 0.0


def stage_medians(timelines: list[Timeline], num_stages: int, ops: tuple[Op, ...]) -> tuple[float, ...]:
    """By stage, the median duration of actions of the given ops; several ops (``I`` and ``W``) add up."""
    durations: dict[tuple[int, Op], list[float]] = {}
    for timeline in timelines:
        for span in timeline.spans:
            action = Action.parse(span.action)
            durations.setdefault((action.stage, action.op), []).append(span.stop_s - span.start_s)
    return tuple(
        sum(statistics.median(durations[stage, op]) for op in ops if (stage, op) in durations)
        for stage in range(num_stages)
    )
