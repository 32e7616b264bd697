"""What a run teaches the profile that its plan was made from: an observation, and the corrections that follow.

And why its steps differ from the predicted ones: the machine has changed since the profile, or the model was wrong.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunResult
from halopipe.terminal import units
from halopipe.terminal.output_files import in_turn
from planner.ir.codec import dump, load
from planner.ir.errors import HalopipeError
from planner.ir.plan import Plan
from planner.ir.profile import MACHINE, STEP_RANGE, Correction, Profile
from planner.ir.timeline import Drift

LEAST_STEPS = 5
OLD_DAYS = 3
_PATIENCE_S = 20.0


@dataclass(frozen=True, slots=True)
class CalibrationUpdate:
    """What became of an observation.

    Attributes:
        text: in words.
        path: the profile that has it now; None if none has.
    """

    text: str
    path: Path | None = None


def calibrated(profile: Profile, plan: Plan, result: RunResult) -> Profile:
    """The profile with what the run showed; the oldest of several runs of the same decision goes.

    Where the run timed its stages alone, the profile is re-scaled by what the machine has changed since, and only the
    rest is learnt as corrections.
    """
    from planner.costs.calibration.fit import machine_of, with_observation
    from planner.costs.calibration.machine import speeds
    from planner.costs.observe import observe

    on = profile.standing(plan.inputs.request.speeds)
    measured = result.measured(plan.prediction)
    machine_speeds = speeds(on, plan.decision, result.isolated_passes)
    machine = machine_of(profile.calibration.corrections) if machine_speeds is None else machine_speeds.corrections
    timelines = result.timed_steps or (result.timeline,)
    observed = observe(on, plan.decision, timelines, measured.step_s, measured.spread, machine)
    return with_observation(profile, observed, machine)


def calibrate(
    plan: Plan, plan_path: Path, profile_path: Path | None, options: RunOptions, result: RunResult
) -> CalibrationUpdate:
    """Appends the run to the profile at ``profile_path``, or to the plan's own where that is found.

    Several runs take their turns, each on what the one before left.  A profile that cannot be written is a word.
    """
    from halopipe.planning import plan_files

    if reason := refused(plan, options, result):
        return CalibrationUpdate(f"the profile learns nothing from this run: {reason}")
    own_profile = None if profile_path is not None else plan_files.found_profile(plan, plan_path)
    path = profile_path or (own_profile[0] if own_profile is not None else plan_path.parent / plan_files.PROFILE)
    if not path.is_file():
        return CalibrationUpdate(f"no profile to learn from this run: {path} is none; name it with --profile")
    try:
        with in_turn(path, _PATIENCE_S):
            profile = load(path, Profile)
            if not plan_files.is_of(profile, plan):
                why = f"the plan was not made from {path}"
                return CalibrationUpdate(f"no profile to learn from this run: {why}; name it with --profile")
            updated = calibrated(profile, plan, result)
            dump(updated, path)
    except HalopipeError as error:  # the run is over, and what it showed is told
        return CalibrationUpdate(f"{path} has not learnt from this run: {'; '.join((error.title, *error.details[:1]))}")
    num_runs = units.count(len(updated.calibration.observations), "run")
    return CalibrationUpdate(f"{path} has learnt from {num_runs}: {summary(updated)}", path)


def drift(profile: Profile, plan: Plan, options: RunOptions, result: RunResult) -> Drift | None:
    """Why the run's steps differ from the predicted ones; None where no stage was run alone, or nothing is known.

    Args:
        profile: that the plan was made from.
    """
    from planner.costs.calibration import machine

    if refused(plan, options, result):
        return None
    stage_speeds = machine.speeds(profile, plan.decision, result.isolated_passes)
    step_s = result.measured(plan.prediction).step_s
    return (
        None
        if stage_speeds is None
        else machine.drift(profile, plan.decision, stage_speeds, plan.inputs.corrections, step_s)
    )


def drift_lines(change: Drift) -> Iterator[str]:
    """The machine's part of the error and the model's, a line each, and what to do where the machine has changed."""
    per_kind = ", ".join(f"{kind} {units.signed_percent(of - 1)}" for kind, of in sorted(change.speeds.items()))
    several = f" ({per_kind})" if len(change.speeds) > 1 else ""
    alone = f"{units.seconds(change.alone_s)}, {units.seconds(change.priced_s)} in the profile"
    apart = units.signed_percent(change.alone_s / change.priced_s - 1)
    yield f"machine: stages alone take {alone} ({apart}){several}; it makes the step {_longer(change.machine)}"
    yield f"model: what it missed makes the step {_longer(change.model)}"


def _longer(share: float) -> str:
    return f"{units.percent(abs(share))} {'longer' if share >= 0 else 'shorter'}"


def changed_text(profile: Profile, change: Drift | None, now: datetime | None = None) -> str:
    """That the machine has changed since the profile, or that it is old, and what to do; empty if neither."""
    days = age_days(profile, now)
    old = f"the profile was measured {units.count(int(days), 'day')} ago" if days >= OLD_DAYS else ""
    if change is None or not has_changed(change):
        todo = "profile again, or run with --calibrate on to see whether the machine has changed"
        return f"{old}: {todo}" if old and change is None else ""
    most = max(change.speeds.values(), key=lambda of: abs(of - 1)) - 1
    way = f"{units.percent(abs(most))} {'slower' if most > 0 else 'faster'}"
    noise = f"by chance it differs by {units.percent(change.noise)}"
    todo = "a run that teaches the profile re-scales it, halopipe profile measures it again"
    return f"{'; '.join(filter(None, (f'the machine is {way} than in its profile', noise, old)))}: {todo}"


def other_torch(profile: Profile) -> str:
    """That the profile was measured with another release of torch, whose kernels may be others; empty if not."""
    there = profile.provenance.versions.get("torch", "").partition("+")[0]
    try:
        here = importlib.metadata.version("torch").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""
    if there in ("", here):
        return ""
    return (
        f"the profile was measured with torch {there}, this run was with {here}: profile again, predictions may be off"
    )


def has_changed(change: Drift) -> bool:
    """Whether some kind of device is slower or faster than by chance."""
    from planner.costs.calibration.machine import is_change

    return any(is_change(of, change.noise) for of in change.speeds.values())


def age_days(profile: Profile, now: datetime | None = None) -> float:
    """How long ago the profile was measured; 0 if it does not say."""
    try:
        then = datetime.strptime(profile.provenance.measured_at, "%Y-%m-%dT%H:%MZ").replace(tzinfo=UTC)
    except ValueError:
        return 0.0
    return ((now or datetime.now(UTC)) - then).total_seconds() / 86400


def refused(plan: Plan, options: RunOptions, result: RunResult) -> str:
    """Why a run says nothing of the costs that the plan was priced with; empty if it does."""
    if options.dtype not in ("", plan.inputs.model.dtype):
        return f"it ran in {options.dtype}, the profile is of {plan.inputs.model.dtype}"
    for what, value in (("--compile", options.compiler), ("--optimizer", options.optimizer)):
        if value:
            return f"it ran with {what} {value}, the profile was measured without"
    if options.clip_norm or options.accumulate > 1:
        return "its updates clip or wait for other steps, those of the profile do not"
    if slow := [name for name, speed in plan.inputs.request.speeds.items() if speed > 0]:
        return f"its plan counts with {slow[0]} at another speed than its profile"
    if other := plan.prediction.other_transport(result.transport):
        return f"it ran over {result.transport}, the profile's links were measured over {other}"
    planned, used = plan.prediction.other_devices(result.kinds)
    if planned:
        return f"it ran on {used}, its plan is for {planned}"
    if options.profile_steps:
        return f"steps {options.profile_steps} were traced by torch.profiler, which made them slower"
    steps = len(result.timed_seconds) if len(result.step_seconds) > result.warmup else 0
    if steps < LEAST_STEPS:
        return f"{steps} steps after warm-up are too few, {LEAST_STEPS} are enough"
    return ""


def summary(profile: Profile) -> str:
    """What the corrections are, or that there are none."""
    text = corrections_text(profile.calibration.corrections)
    return f"{text}; the next plan counts with it" if text else "no correction that would hold for other plans so far"


def calibrated_by(corrections: Iterable[Correction]) -> str:
    """``calibrated by 3 runs: forward x1.06, backward (shared stages) x1.41``; empty if no cost was corrected."""
    of_costs = tuple(one for one in corrections if one.of.what != STEP_RANGE)
    most = max((one.num_plans for one in of_costs), default=0)
    return f"calibrated by {units.count(most, 'run')}: {corrections_text(of_costs)}" if of_costs else ""


def corrections_text(corrections: Iterable[Correction]) -> str:
    """``machine x1.10, forward x1.06, backward (shared stages) x1.41``, with kinds of device where there are several.

    How wide ranges are is left out.
    """
    every = [one for one in corrections if one.of.what != STEP_RANGE]
    ordered = sorted(every, key=lambda one: one.of.what != MACHINE)
    places: dict[str, set[str]] = {}
    for one in ordered:
        places.setdefault(one.of.what, set()).add(one.of.where)
    texts = []
    for one in ordered:
        notes = [one.of.where] if len(places[one.of.what]) > 1 else []
        notes += ["shared stages"] if one.of.shared else []
        where = f" ({', '.join(notes)})" if notes else ""
        texts.append(f"{one.of.what}{where} x{one.factor:.2f}")
    return ", ".join(texts)
