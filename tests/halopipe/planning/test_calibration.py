from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from halopipe.planning import calibration, problem, solve
from halopipe.reports import explain
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunResult
from planner.check import check
from planner.costs.calibration.fit import RUNS_KEPT
from planner.ir.codec import dump, load
from planner.ir.fingerprint import fingerprint
from planner.ir.plan import Plan
from planner.ir.profile import FORWARD, MESSAGES, Correction, CostClass, Profile
from tests.planner.costs.machines import Machine, decision, machine
from tests.planner.factories import plan_of

TRUE = machine(random.Random(5), spread=0.1, noise=0.005, middle=0.3)
WARMUP = 2


def run(plan: Plan, true: Machine = TRUE) -> RunResult:
    """What a run on the true machine shows."""
    timelines = true.runs(plan.decision, random.Random(7))
    seconds = (1.0,) * WARMUP + tuple(timeline.step_s for timeline in timelines)
    middle = next(one for one in timelines if one.step_s == median(t.step_s for t in timelines))
    return RunResult((), seconds, WARMUP, middle, (), (), (), timed_steps=tuple(timelines))


def planned(profile: Profile, **asked: object) -> Plan:
    return solve.solve(problem.make_problem(profile, global_batch=8, **asked))  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dump(TRUE.profile, tmp_path / "profile.json")
    return tmp_path


def teach(folder: Path, plan: Plan, options: RunOptions | None = None, given: Path | None = None) -> calibration.Lesson:
    return calibration.teach(plan, folder / "plan.json", given, options or RunOptions(), run(plan))


def test_a_run_teaches_the_profile_beside_the_plan_and_the_next_plan_counts_with_it(folder: Path) -> None:
    before = planned(TRUE.profile)
    lesson = teach(folder, before)
    learnt = load(folder / "profile.json", Profile)
    assert lesson.path == folder / "profile.json"
    assert "has learnt from 1 run" in lesson.text
    assert learnt.bare == TRUE.profile
    after = planned(learnt)
    assert after.inputs.corrections == learnt.calibration.corrections != ()
    true_s = TRUE.step_s(after.decision)
    assert abs(after.prediction.step_s / true_s - 1) < abs(before.prediction.step_s / TRUE.step_s(before.decision) - 1)
    assert check(after, learnt) == ()


def test_plans_stay_good_with_a_profile_that_has_learnt_since(folder: Path) -> None:
    before = planned(TRUE.profile)
    dump(before, folder / "plan.json")
    teach(folder, before)
    found = solve.profile_of(before, folder / "plan.json", None)
    assert found is not None
    assert found.calibration.corrections == ()
    assert solve.predict_again(before, load(folder / "profile.json", Profile))[0] == before.prediction
    assert check(before, load(folder / "profile.json", Profile)) == ()


def test_without_calibration_the_plan_is_as_before(folder: Path) -> None:
    before = planned(TRUE.profile)
    teach(folder, before)
    assert planned(load(folder / "profile.json", Profile), calibration=False) == before


def test_of_a_plan_the_newest_runs_are_kept_beside_those_of_others(folder: Path) -> None:
    other = plan_of(TRUE.profile, decision(random.Random(1), TRUE.profile, "three stages"))
    teach(folder, other)
    plan = planned(TRUE.profile)
    for _ in range(RUNS_KEPT + 1):
        lesson = teach(folder, plan)
    assert f"{RUNS_KEPT + 1} runs" in lesson.text
    assert [one.plan for one in load(folder / "profile.json", Profile).calibration.observations] == [
        fingerprint(other.decision),
        *[fingerprint(plan.decision)] * RUNS_KEPT,
    ]


def test_where_there_is_no_profile_of_the_plan_nothing_fails(tmp_path: Path) -> None:
    plan = planned(TRUE.profile)
    assert "no profile to learn" in teach(tmp_path, plan).text
    dump(replace(TRUE.profile, action_overhead_s={}), tmp_path / "profile.json")
    lesson = teach(tmp_path, plan)
    assert "was not made from" in lesson.text
    assert lesson.path is None
    assert load(tmp_path / "profile.json", Profile).calibration.observations == ()


def test_a_profile_elsewhere_may_be_named(folder: Path) -> None:
    (folder / "profile.json").rename(folder / "mine.json")
    assert teach(folder, planned(TRUE.profile), given=folder / "mine.json").path == folder / "mine.json"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (RunOptions(dtype="float64"), "float64"),
        (RunOptions(compiler="inductor"), "--compile inductor"),
        (RunOptions(optimizer="Adam"), "--optimizer Adam"),
        (RunOptions(clip_norm=1.0), "clip"),
        (RunOptions(accumulate=2), "wait for other steps"),
    ],
)
def test_runs_that_do_something_else_than_was_profiled_teach_nothing(
    folder: Path, options: RunOptions, reason: str
) -> None:
    lesson = teach(folder, planned(TRUE.profile), options)
    assert reason in lesson.text
    assert lesson.path is None


def test_a_short_run_teaches_nothing() -> None:
    plan = planned(TRUE.profile)
    result = run(plan)
    short = replace(result, step_seconds=result.step_seconds[: WARMUP + 2])
    assert "2 steps" in calibration.refused(plan, RunOptions(), short)
    assert "0 steps" in calibration.refused(plan, RunOptions(), replace(result, step_seconds=(1.0,)))
    assert calibration.refused(plan, RunOptions(), result) == ""


def test_explain_says_what_the_plan_counts_with() -> None:
    plan = planned(TRUE.profile)
    assert "calibrated" not in explain.headline(plan)
    kind = TRUE.profile.cluster.devices[0].kind
    corrections = (
        Correction(CostClass(FORWARD, kind), 1.06, 3),
        Correction(CostClass(FORWARD, kind, shared=True), 1.4, 2),
        Correction(CostClass(MESSAGES, "within-host"), 0.9, 3),
    )
    corrected = replace(plan, inputs=replace(plan.inputs, corrections=corrections))
    line = "calibrated by 3 runs: forward x1.06, forward (shared stages) x1.40, messages x0.90"
    assert line in explain.headline(corrected)


def test_kinds_of_device_are_told_apart_where_there_are_several() -> None:
    corrections = [Correction(CostClass(FORWARD, kind), 1.1, 2) for kind in ("fast", "slow")]
    assert calibration.corrections_text(corrections) == "forward (fast) x1.10, forward (slow) x1.10"


def test_a_run_over_another_transport_teaches_nothing(folder: Path) -> None:
    plan = planned(TRUE.profile)
    plan = replace(plan, prediction=replace(plan.prediction, transport="shared memory"))
    found = replace(run(plan), transport="gloo")
    lesson = calibration.teach(plan, folder / "plan.json", None, RunOptions(), found)
    assert "it ran over gloo, the profile's links were measured over shared memory" in lesson.text
    assert load(folder / "profile.json", Profile) == TRUE.profile
