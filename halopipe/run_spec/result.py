"""How far a run is, and what came of it.

result = run_plan(plan, RunOptions(steps=20))
result.losses, result.measured(plan.prediction)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from planner.ir.codec import plan_fingerprint
from planner.ir.plan import Measured, Plan, Prediction, RankMeasured, timed_steps
from planner.ir.timeline import Drift, LeftOut, LonePasses, Restart, Slow, Timeline, TimelineFile

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
class Saves:
    """The checkpoints of a run, and what they cost its training, on the rank where they cost most.

    Attributes:
        number: that were begun, the last one included.
        failed: of them, that did not reach the disk.
        stood_s: how long training stood still for all but the last one: the state is copied, files are written beside.
        slower_s: what steps took more while files were written.
        last_s: of the save at the end, which is waited for.
        interval_s: between two saves, as it was in the end; 0 where steps are counted.
    """

    number: int = 0
    failed: int = 0
    stood_s: float = 0.0
    slower_s: float = 0.0
    last_s: float = 0.0
    interval_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Of training, without the save at the end."""
        return self.stood_s + self.slower_s

    def then(self, later: Saves) -> Saves:
        """Those of an attempt of a job and of a ``later`` one, together."""
        names = (each.name for each in fields(self) if each.name != "interval_s")
        return replace(later, **{name: getattr(self, name) + getattr(later, name) for name in names})


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far a run is.

    Attributes:
        step: complete steps, those before a checkpoint included.
        loss: of the last one, where it is known already.
        step_s: how long it took.
        slow: ranks and links that were found to be slow so far, in order; the newest word on each counts.
        left_out: the last updates that were left out.
        word: what happened, a line for people; empty where nothing did but steps.
    """

    step: int
    num_steps: int
    loss: float | None
    step_s: float
    slow: tuple[Slow, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    word: str = ""


ShowRun = Callable[[RunProgress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNotes:
    """What is noted of a run beside its steps, by a rank and then of all.

    Attributes:
        first_step: steps done before, by a run that this one went on from.
        scores: of the evaluations, in order.
        trained: whether the steps were training steps; those of a plan of forward passes are not.
        data: what data it was, and how it was asked for.
        transport: that the ranks exchanged by; empty of one rank.
        isolated_passes: stages that were run alone; ``why_not_isolated``: why some were not.
        left_out: updates that were not made, as a loss or gradient was NaN or infinite.
        slow: ranks and links that were found to be slow while the job ran.
        saves: the checkpoints, of all attempts in the end, and what they cost.
    """

    first_step: int = 0
    scores: tuple[Score, ...] = ()
    trained: bool = True
    data: str = ""
    transport: str = ""
    isolated_passes: tuple[LonePasses, ...] = ()
    why_not_isolated: str = ""
    left_out: tuple[LeftOut, ...] = ()
    slow: tuple[Slow, ...] = ()
    saves: Saves = field(default_factory=Saves)


@dataclass(frozen=True, slots=True)
class RunResult(RunNotes):
    """What a run showed.

    Attributes:
        losses: by step; those of updates that were left out are not among them.
        step_seconds: by step, of the slowest rank.
        warmup: how many of them, of each attempt, are left out of medians.
        timeline: the step of median length.
        stage_forward_s, stage_backward_s: median per micro-batch, by stage.
        peak_bytes: by rank, the most memory in use in one step: what stays between steps, and what torch allocated on
            top in the last warm-up step; 0 where there was none.
        numerics: how far the first steps were from one device's, or why that is not known; None if it was not asked.
        timed_steps: the last steps after warm-up, in order.
        stage_update_s, stage_reduction_s, ranks: as of :class:`planner.ir.plan.Measured`.
        kinds: of the devices that they ran on, by rank, in the words of the plan where it means them.
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
    timed_steps: tuple[Timeline, ...] = ()
    stage_update_s: tuple[float, ...] = ()
    stage_reduction_s: tuple[float, ...] = ()
    ranks: tuple[RankMeasured, ...] = ()
    restarts: tuple[Restart, ...] = ()
    end: str = ""
    kinds: tuple[str, ...] = ()

    @property
    def timed_seconds(self) -> tuple[float, ...]:
        """The steps after warm-up, that of each attempt; all where there are no others."""
        begins = [each.resumed_step - self.first_step for each in self.restarts]
        return timed_steps(self.step_seconds, self.warmup, begins)

    def timeline_file(self, plan: Plan, predicted: Timeline, drift: Drift | None = None) -> TimelineFile:
        """What is written to ``timeline.json`` of a run of ``plan``."""
        steps = predicted, self.timeline, self.step_seconds, self.losses
        of = plan_fingerprint(plan)
        return TimelineFile(*steps, self.transport, drift, self.restarts, self.kinds, of, self.warmup, self.first_step)

    @property
    def saves_share(self) -> float:
        """Of the time of all steps and saves, what saves have cost; the last one is no part of it."""
        whole_s = sum(self.step_seconds) + self.saves.stood_s
        return self.saves.seconds / whole_s if whole_s else 0.0

    def measured(self, prediction: Prediction) -> Measured:
        """What is written into the plan, beside its prediction."""
        steps = Measured.of_steps(self.timed_seconds, prediction, self.transport, self.kinds)
        return replace(
            steps,
            stage_forward_s=self.stage_forward_s,
            stage_backward_s=self.stage_backward_s,
            peak_bytes=self.peak_bytes,
            stage_update_s=self.stage_update_s,
            stage_reduction_s=self.stage_reduction_s,
            ranks=self.ranks,
        )
