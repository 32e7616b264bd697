"""A run with its progress on stderr, and what it showed: predicted beside measured, the losses, the numerics."""

from __future__ import annotations

from math import isfinite
from statistics import fmean
from typing import TYPE_CHECKING, Any

from halopipe import explaining, planning, text, units
from halopipe.progress import Reporter
from planner.ir.codec import plain
from planner.ir.errors import NumericsError
from planner.ir.plan import Plan
from planner.ir.timeline import Timeline

if TYPE_CHECKING:
    from halopipe.hosts import Hosts
    from halopipe.running import RunOptions, RunProgress, RunResult

_AVERAGED = 5
"""Steps whose losses are averaged, since one batch says little."""


def train(plan: Plan, options: RunOptions, hosts: Hosts | None = None) -> RunResult | None:
    """Runs the plan, on this host or on ``hosts``; None on ranks other than 0 of a job that torchrun or Slurm started.

    Raises:
        HalopipeError: what the workers raised.
        NumericsError: a loss is not a number.
    """
    from halopipe.running import run_plan

    with Reporter("running") as reporter:

        def show(at: RunProgress) -> None:
            loss = "" if at.loss is None else f", loss {at.loss:.4g}"
            reporter.update(at.step, at.num_steps, f"step {at.step}{loss}, {units.seconds(at.step_s)}")

        result = run_plan(plan, options, show, hosts)
    if result is not None:
        _require_finite(result.losses)
    return result


def predicted_timeline(plan: Plan) -> Timeline:
    """What a plan file alone says of the step: how long it is."""
    return Timeline("predicted", plan.prediction.step_s, ())


def report(plan: Plan, result: RunResult, predicted: Timeline) -> str:
    """The run in a few lines."""
    file = result.timeline_file(predicted)
    measured = result.measured(plan.prediction)
    samples_per_s = plan.decision.global_batch / measured.step_s
    steps = units.count(len(result.losses), "step")
    lines = [
        f"{steps}, {units.seconds(measured.step_s)} a step (median), {units.rate(samples_per_s)} samples/s",
        explaining.timeline_table(predicted, file.measured, measured.step_s, len(plan.decision.stages)),
    ]
    for timeline in (predicted, file.measured):
        if timeline.spans:
            lines += ["", f"{timeline.source}:", text.gantt(timeline, planning.device_names(plan)), ""]
    if result.losses:
        lines.append(f"loss {result.losses[0]:.4f} at step 1, {result.losses[-1]:.4f} at step {len(result.losses)}")
        if len(result.losses) >= 2 * _AVERAGED:
            first, last = fmean(result.losses[:_AVERAGED]), fmean(result.losses[-_AVERAGED:])
            lines[-1] += f"; mean of the first {_AVERAGED} {first:.4f}, of the last {_AVERAGED} {last:.4f}"
    if result.numerics is not None:
        lines.append(f"numerics: {result.numerics}")
    return "\n".join(lines)


def data(plan: Plan, result: RunResult) -> dict[str, Any]:
    """The run as plain data for JSON."""
    return {
        "measured": plain(result.measured(plan.prediction)),
        "predicted_step_s": plan.prediction.step_s,
        "losses": list(result.losses),
        "step_seconds": list(result.step_seconds),
        "numerics": plain(result.numerics),
    }


def _require_finite(losses: tuple[float, ...]) -> None:
    for step, loss in enumerate(losses, start=1):
        if not isfinite(loss):
            raise NumericsError(
                f"the loss is {loss} from step {step} on",
                [f"it was {losses[0]:.4g} at step 1"],
                ["profile with a smaller learning rate (--optimizer SGD:lr=0.001) and plan again"],
            )
