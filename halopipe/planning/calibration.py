"""What a run teaches the profile that its plan was made from: an observation, and the corrections that follow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunResult
from halopipe.terminal import units
from planner.ir.codec import dump, load
from planner.ir.errors import InputFileError
from planner.ir.fingerprint import fingerprint
from planner.ir.plan import Plan
from planner.ir.profile import Correction, Profile

LEAST_STEPS = 5


@dataclass(frozen=True, slots=True)
class Lesson:
    """What became of an observation.

    Attributes:
        text: in words.
        path: the profile that has it now; None if none has.
    """

    text: str
    path: Path | None = None


def calibrated(profile: Profile, plan: Plan, result: RunResult) -> Profile:
    """The profile with what the run showed, in place of what an older run of the same decision did."""
    from planner.costs.calibration.fit import with_observation
    from planner.costs.observe import observe

    measured = result.measured(plan.prediction)
    timelines = result.timed_steps or (result.timeline,)
    return with_observation(profile, observe(profile, plan.decision, timelines, measured.step_s, measured.spread))


def teach(plan: Plan, plan_path: Path, given: Path | None, options: RunOptions, result: RunResult) -> Lesson:
    """Appends the run to the profile ``given``, or to ``profile.json`` beside the plan if it is the plan's."""
    if reason := refused(plan, options, result):
        return Lesson(f"the profile learns nothing from this run: {reason}")
    path = given or plan_path.parent / "profile.json"
    try:
        profile = load(path, Profile)
    except InputFileError:
        return Lesson(f"no profile to learn from this run: {path} is none; name it with --profile")
    if fingerprint(profile.bare) != plan.inputs.profile_fingerprint:
        return Lesson(f"no profile to learn from this run: the plan was not made from {path}; name it with --profile")
    found = calibrated(profile, plan, result)
    dump(found, path)
    return Lesson(f"{path} has learnt from {_runs(len(found.calibration.observations))}: {summary(found)}", path)


def refused(plan: Plan, options: RunOptions, result: RunResult) -> str:
    """Why a run says nothing of the costs that the plan was priced with; empty if it does."""
    if options.dtype not in ("", plan.inputs.model.dtype):
        return f"it ran in {options.dtype}, the profile is of {plan.inputs.model.dtype}"
    for what, given in (("--compile", options.compiler), ("--optimizer", options.optimizer)):
        if given:
            return f"it ran with {what} {given}, the profile was measured without"
    if options.clip_norm or options.accumulate > 1:
        return "its updates clip or wait for other steps, those of the profile do not"
    if other := plan.prediction.other_transport(result.transport):
        return f"it ran over {result.transport}, the profile's links were measured over {other}"
    steps = len(result.timed_seconds) if len(result.step_seconds) > result.warmup else 0
    if steps < LEAST_STEPS:
        return f"{steps} steps after warm-up are too few, {LEAST_STEPS} are enough"
    return ""


def summary(profile: Profile) -> str:
    """What the corrections are, or that there are none."""
    corrections = profile.calibration.corrections
    if corrections:
        return f"{corrections_text(corrections)}; the next plan counts with it"
    return "no correction that would hold for other plans follows so far"


def calibrated_by(corrections: Iterable[Correction]) -> str:
    """``calibrated by 3 runs: forward x1.06, backward (shared stages) x1.41``; empty if nothing was corrected."""
    found = tuple(corrections)
    most = max((one.num_plans for one in found), default=0)
    return f"calibrated by {_runs(most)}: {corrections_text(found)}" if found else ""


def corrections_text(corrections: Iterable[Correction]) -> str:
    """``forward x1.06, backward (shared stages) x1.41``, with kinds of device where there are several."""
    found = tuple(corrections)
    places: dict[str, set[str]] = {}
    for one in found:
        places.setdefault(one.of.what, set()).add(one.of.where)
    texts = []
    for one in found:
        notes = [one.of.where] if len(places[one.of.what]) > 1 else []
        notes += ["shared stages"] if one.of.shared else []
        where = f" ({', '.join(notes)})" if notes else ""
        texts.append(f"{one.of.what}{where} x{one.factor:.2f}")
    return ", ".join(texts)


def _runs(count: int) -> str:
    return units.count(count, "run")
