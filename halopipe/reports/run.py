"""A run with its progress on stderr, and what it showed: predicted beside measured, the losses, the numerics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import TYPE_CHECKING, Any

from halopipe.planning import calibration, plan_files, solve
from halopipe.reports.explain import optimisation_lines, within
from halopipe.reports.predicted_vs_measured import apart_text, timeline_cells
from halopipe.terminal import console, tables, units
from halopipe.terminal.console import Reporter
from planner.ir.codec import plain
from planner.ir.errors import NumericsError
from planner.ir.plan import Plan, Prediction
from planner.ir.timeline import Drift, Timeline

if TYPE_CHECKING:
    from halopipe.launch.replanning import Replanner
    from halopipe.planning.replan import Replan
    from halopipe.run_spec.options import RunOptions
    from halopipe.run_spec.result import RunProgress, RunResult, Score
    from planner.ir.profile import Profile
    from planner.ir.timeline import LeftOut, Slow

_AVERAGED = 5
"""Steps whose losses are averaged, since one batch says little."""

_MOST_SHOWN = 8


def train(plan: Plan, options: RunOptions, replanner: Replanner | None = None) -> RunResult | None:
    """Runs the plan, on this host; None on ranks other than 0 of a job that torchrun started.

    Args:
        replanner: chooses other plans as machines come and go.

    Raises:
        HalopipeError: what the workers raised.
        NumericsError: a loss is not a number.
    """
    from halopipe.launch.run import run_plan

    with Reporter("running") as reporter:
        news = RunRemarks()

        def show(at: RunProgress) -> None:
            if at.word:
                console.remark(at.word)
                return
            for text in news.new(at.slow, at.left_out):
                console.remark(text)
            loss = "" if at.loss is None else f", loss {at.loss:.4g}"
            reporter.update(at.step, at.num_steps, f"step {at.step}{loss}, {units.seconds(at.step_s)}")

        result = run_plan(plan, options, show, replanner=replanner)
    if result is not None:
        _require_finite(result.losses, result.first_step)
        for text in news.new(result.slow, result.left_out):
            console.remark(text)
        if options.profile_steps:
            console.remark(f"steps {options.profile_steps} were traced, which made them slower")
        if options.data and result.data:
            console.remark(f"data: {result.data}")
        if result.numerics is not None and (result.numerics.skipped or result.numerics.hidden):
            console.remark(f"numerics: {result.numerics}")
    return result


def predicted_step(plan: Plan, profile: Profile | None = None) -> tuple[Prediction, Timeline]:
    """What is known of the step before the run: of a plan file alone, its prediction and how long it is."""
    if profile is not None:
        return solve.predict_again(plan, profile)
    return plan.prediction, Timeline("predicted", plan.prediction.step_s, ())


@dataclass(frozen=True, slots=True)
class RunReport:
    """A run beside its prediction.

    Attributes:
        plan: the last one that the job ran.
        prediction, predicted: of it, the numbers and the step (:func:`predicted_step`).
        changes: other plans that the job went over to.
        has_details: whether words are of each stage, too, with both steps as pictures.
    """

    plan: Plan
    result: RunResult
    prediction: Prediction
    predicted: Timeline
    drift: Drift | None = None
    changes: Sequence[Replan] = ()
    has_details: bool = False

    def render(self) -> str:
        """The run in a few lines."""
        result = self.result
        step_s = result.measured(self.prediction).step_s
        samples_per_s = self.plan.decision.global_batch / step_s
        steps = units.count(len(result.step_seconds), "step")
        note = apart_text(self.prediction, result.transport, result.kinds)
        lines = [
            f"{steps}, {units.seconds(step_s)} a step (median), {units.rate(samples_per_s)} samples/s"
            + (f", over {result.transport}" if result.transport else ""),
            self._stages(step_s, alike=not note) if self.has_details else self._step(step_s, alike=not note),
        ]
        if note:
            lines.append(note)
        lines += optimisation_lines(self.plan)
        for each in result.restarts:
            repeated = f"{units.count(each.repeated_steps, 'step')} again" if each.repeated_steps else "no step again"
            took = f"{repeated}, {units.seconds(each.recovery_s)}"
            lines.append(f"started again after step {each.resumed_step} ({took}): {each.error}")
        if self.drift is not None:
            lines += calibration.drift_lines(self.drift)
        lines += [change.headline() for change in self.changes]
        if result.why_not_isolated:
            lines.append(result.why_not_isolated)
        if self.has_details:
            lines += self._pictures()
        if result.losses:
            lines.append(_losses(result))
        lines += _numbers(result)
        lines += map(_score, result.scores)
        lines += _saves(result)
        if result.numerics is not None:
            lines.append(f"numerics: {result.numerics}")
        return "\n".join(lines)

    def _step(self, step_s: float, *, alike: bool) -> str:
        """The step that was predicted, and how far off it was where that says anything."""
        predicted_s = self.prediction.step_s
        apart = f", {units.signed_percent(step_s / predicted_s - 1)} measured" if alike and predicted_s else ""
        return f"predicted {within(self.prediction)}{apart}"

    def _stages(self, step_s: float, *, alike: bool) -> str:
        ranks = [stage.ranks for stage in self.plan.decision.stages]
        steps = self.predicted, self.result.timeline, step_s
        return tables.table(*timeline_cells(*steps, ranks, self.prediction.ranks, alike=alike))

    def _pictures(self) -> Iterator[str]:
        for timeline in (self.predicted, self.result.timeline):
            if timeline.spans:
                yield from ("", f"{timeline.source}:", tables.gantt(timeline, plan_files.device_names(self.plan)))
        yield ""

    def data(self) -> dict[str, Any]:
        """The same as plain data for JSON."""
        result = self.result
        return {
            "measured": plain(result.measured(self.prediction)) if result.step_seconds else None,
            "predicted_step_s": self.prediction.step_s,
            "predicted_transport": self.prediction.transport,
            "drift": plain(self.drift),
            "replans": [change.data() for change in self.changes],
            "data": result.data,
            "first_step": result.first_step,
            "end": result.end,
            "restarts": plain(result.restarts),
            "losses": list(result.losses),
            "evaluations": plain(result.scores),
            "step_seconds": list(result.step_seconds),
            "checkpoints": {**plain(result.saves), "share": result.saves_share} if result.saves.number else None,
            "left_out": plain(result.left_out),
            "slow": plain(result.slow),
            "numerics": plain(result.numerics),
        }


def _losses(result: RunResult) -> str:
    losses = result.losses
    first = result.first_step + 1
    if not result.trained:
        return f"mean loss of {units.count(len(losses), 'step')} {fmean(losses):.4f}; forward passes alone, no training"
    text = (
        f"loss {losses[0]:.4f} at step {first}, {losses[-1]:.4f} at step {result.first_step + len(result.step_seconds)}"
    )
    if len(losses) >= 2 * _AVERAGED:
        start = fmean(losses[:_AVERAGED])
        end = fmean(losses[-_AVERAGED:])
        text += f"; mean of the first {_AVERAGED} {start:.4f}, of the last {_AVERAGED} {end:.4f}"
    return text


def _saves(result: RunResult) -> list[str]:
    saves = result.saves
    if not saves.number:
        return []
    text = f"{units.count(saves.number, 'checkpoint')}: {units.percent(result.saves_share)} of the run"
    text += f" ({units.seconds(saves.stood_s)} to copy, {units.seconds(saves.slower_s)} of slower steps)"
    text += f", every {units.duration(saves.interval_s)}" if saves.interval_s else ""
    text += f"; the last took {units.seconds(saves.last_s)}" if saves.last_s else ""
    return [text + (f"; {saves.failed} failed" if saves.failed else "")]


class RunRemarks:
    """What was told of slow ranks and of updates that were left out, so that it is told once."""

    def __init__(self) -> None:
        self._num_slow = self._last_step = 0

    def new(self, slow: Sequence[Slow], left_out: Sequence[LeftOut]) -> list[str]:
        """Of all that is known by now, what was not told yet, a line each."""
        texts = [slow_text(each) for each in slow[self._num_slow :]]
        texts += [f"no update after step {each.step}: {each.why}" for each in left_out if each.step > self._last_step]
        self._num_slow = len(slow)
        self._last_step = max((each.step for each in left_out), default=self._last_step)
        return texts


def slow_text(one: Slow) -> str:
    """A rank or link that is slow, in a line."""
    who = f"rank {one.rank}" if one.peer is None else f"the link from rank {one.peer} to rank {one.rank}"
    if one.factor == 1.0:
        return f"{who}: {one.why}, at step {one.step}"
    than = "of what the plan predicts, beside the other ranks" if one.peer is None else "of what is usual"
    return f"{who} is slow: {one.factor:.2f} times the seconds {than}, at step {one.step}; {one.why}"


def _numbers(result: RunResult) -> list[str]:
    """What was slow, and how many updates were left out."""
    count = units.count(len(result.left_out), "update")
    steps = ", ".join(str(each.step) for each in result.left_out[:_MOST_SHOWN])
    more = ", ..." if len(result.left_out) > _MOST_SHOWN else ""
    lines = [f"{count} left out, of steps with NaN or infinity: {steps}{more}"] if result.left_out else []
    return [*lines, *map(slow_text, result.slow)]


def _score(score: Score) -> str:
    accuracy = "" if score.accuracy is None else f", {units.percent(score.accuracy)} right"
    own = "".join(f", {name} {value:.4g}" for name, value in score.metrics.items())
    return f"evaluation after step {score.step}: loss {score.loss:.4f}{accuracy}{own} ({score.num_samples} samples)"


def _require_finite(losses: tuple[float, ...], first_step: int) -> None:
    for step, loss in enumerate(losses, start=first_step + 1):
        if not isfinite(loss):
            raise NumericsError(
                f"the loss is {loss} from step {step} on",
                [f"it was {losses[0]:.4g} at step {first_step + 1}"],
                ["a smaller learning rate (--optimizer SGD:lr=0.001)", "--clip-norm 1"],
            )
