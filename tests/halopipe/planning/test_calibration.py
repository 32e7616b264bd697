"""What runs teach a profile, and what a run says of a machine that is another one by now."""

from __future__ import annotations

import functools
import importlib.metadata
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import pytest

from halopipe.planning import calibration, plan_files, problem, solve
from halopipe.reports import explain
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunResult
from halopipe.terminal.output_files import in_turn
from planner.costs.calibration.fit import RUNS_KEPT
from planner.ir.codec import dump, fingerprint, load
from planner.ir.errors import MissingFileError
from planner.ir.plan import Plan
from planner.ir.profile import FORWARD, MESSAGES, Correction, CostClass, Profile
from tests.oracles.plans import check
from tests.planner.costs.calibration.test_machine import passes
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
    if profile is TRUE.profile and not asked:
        return first_plan()
    return solve.solve(problem.make_problem(profile, global_batch=8, **asked))


@functools.cache
def first_plan() -> Plan:
    """Of the profile before any run."""
    return solve.solve(problem.make_problem(TRUE.profile, global_batch=8))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dump(TRUE.profile, tmp_path / "profile.json")
    return tmp_path


def teach(
    folder: Path, plan: Plan, options: RunOptions | None = None, given: Path | None = None
) -> calibration.CalibrationUpdate:
    return calibration.calibrate(plan, folder / "plan.json", given, options or RunOptions(), run(plan))


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
    learnt = load(folder / "profile.json", Profile)
    found = plan_files.profile_of(before, folder / "plan.json", None)
    assert found is not None
    assert found.calibration.corrections == ()
    assert solve.predict_again(before, learnt)[0] == before.prediction
    assert check(before, learnt) == ()
    assert planned(learnt, calibration=False) == before


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


def test_the_profile_of_the_plan_is_taught_and_no_other(folder: Path) -> None:
    plan = planned(TRUE.profile)
    (folder / "profile.json").rename(folder / "mine.json")
    assert "no profile to learn" in teach(folder, plan).text
    assert teach(folder, plan, given=folder / "mine.json").path == folder / "mine.json"
    dump(replace(TRUE.profile, action_overhead_s={}), folder / "profile.json")
    lesson = teach(folder, plan)
    assert "was not made from" in lesson.text
    assert lesson.path is None
    assert load(folder / "profile.json", Profile).calibration.observations == ()


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("options", "change", "reason"),
    [
        ({"dtype": "float64"}, {}, "float64"),
        ({"compiler": "inductor"}, {}, "--compile inductor"),
        ({"optimizer": "Adam"}, {}, "--optimizer Adam"),
        ({"clip_norm": 1.0}, {}, "clip"),
        ({"accumulate": 2}, {}, "wait for other steps"),
        ({}, {"step_seconds": (1.0,) * (WARMUP + 2)}, "2 steps"),
        ({}, {"step_seconds": (1.0,)}, "0 steps"),
        ({}, {"transport": "gloo"}, "it ran over gloo, the profile's links were measured over shared memory"),
    ],
)
def test_runs_that_do_something_else_than_was_profiled_teach_nothing(
    folder: Path, options: dict[str, object], change: dict[str, object], reason: str
) -> None:
    plan = planned(TRUE.profile)
    if "transport" in change:
        plan = replace(plan, prediction=replace(plan.prediction, transport="shared memory"))
    found = replace(run(plan), **change)
    lesson = calibration.calibrate(plan, folder / "plan.json", None, RunOptions(**options), found)
    assert reason in lesson.text
    assert (lesson.path, load(folder / "profile.json", Profile)) == (None, TRUE.profile)


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
    corrections = [Correction(CostClass(FORWARD, kind), 1.1, 2) for kind in ("fast", "slow")]
    assert calibration.corrections_text(corrections) == "forward (fast) x1.10, forward (slow) x1.10"


def test_a_plan_remembers_where_its_profile_was(folder: Path) -> None:
    (folder / "plans").mkdir()
    plan = plan_files.remembering(planned(TRUE.profile), folder / "profile.json", folder / "plans" / "plan.json")
    assert plan.inputs.profile_path == "../profile.json"
    lesson = calibration.calibrate(plan, folder / "plans" / "plan.json", None, RunOptions(), run(plan))
    assert lesson.path == folder / "profile.json"
    assert plan_files.profile_of(plan, folder / "plans" / "plan.json", None) == TRUE.profile
    dump(TRUE.profile, folder / "plans" / "profile.json")
    dump(replace(TRUE.profile, action_overhead_s={}), folder / "profile.json")
    lesson = calibration.calibrate(plan, folder / "plans" / "plan.json", None, RunOptions(), run(plan))
    assert lesson.path == folder / "plans" / "profile.json", "the one remembered is another by now"
    beside = plan_files.remembering(plan, folder / "plans" / "profile.json", folder / "plans" / "plan.json")
    assert beside == planned(TRUE.profile), "as before"


def test_runs_that_end_at_once_take_their_turns(folder: Path) -> None:
    shapes = ("two stages", "three stages", "data parallel", "hybrid")
    plans = [plan_of(TRUE.profile, decision(random.Random(1), TRUE.profile, shape)) for shape in shapes]
    with ThreadPoolExecutor(len(plans)) as pool:
        lessons = list(pool.map(lambda plan: teach(folder, plan), plans))
    assert all(lesson.path for lesson in lessons)
    learnt = load(folder / "profile.json", Profile)
    assert {one.plan for one in learnt.calibration.observations} == {fingerprint(plan.decision) for plan in plans}
    assert [path.name for path in folder.iterdir()] == ["profile.json"]


def test_a_profile_that_cannot_be_written_is_a_word(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MissingFileError("cannot write profile.json", ["Read-only file system"])

    before = (folder / "profile.json").read_bytes()
    monkeypatch.setattr(calibration, "dump", refuse)
    lesson = teach(folder, planned(TRUE.profile))
    assert lesson.path is None
    assert "has not learnt from this run: cannot write profile.json; Read-only file system" in lesson.text
    monkeypatch.setattr(calibration, "_PATIENCE_S", 0.05)
    with in_turn(folder / "profile.json", 0.0):
        assert "is being written by another run" in teach(folder, planned(TRUE.profile)).text
    assert (folder / "profile.json").read_bytes() == before


def slower(plan: Plan, factor: float, true: Machine = TRUE) -> RunResult:
    """A run on a machine that computes ``factor`` times as long as the true one, with its stages timed alone."""
    found = run(plan, true)
    lone = passes(plan.decision, lambda _: factor, true.profile)
    return replace(found, isolated_passes=tuple(lone))


def test_a_run_says_what_the_machine_has_changed_and_what_the_model_missed(folder: Path) -> None:
    plan = planned(TRUE.profile)
    found = calibration.drift(TRUE.profile, plan, RunOptions(), slower(plan, 1.25))
    assert found is not None
    machine, model = calibration.drift_lines(found)
    assert "+25 %" in machine
    assert f"makes the step {found.machine:.0%}".replace("%", " %") in machine
    assert model.startswith("model: what it missed makes the step ")
    error = (1 + found.machine) * (1 + found.model)
    assert error == pytest.approx(run(plan).measured(plan.prediction).step_s / plan.prediction.step_s)
    assert calibration.drift(TRUE.profile, plan, RunOptions(), run(plan)) is None
    assert calibration.drift(TRUE.profile, plan, RunOptions(dtype="float64"), slower(plan, 1.25)) is None


def test_a_profile_that_is_old_or_of_a_faster_machine_is_said_so(folder: Path) -> None:
    plan = planned(TRUE.profile)
    now = datetime(2026, 11, 23, 20, 0, tzinfo=UTC)

    def text(measured_at: str, factor: float | None) -> str:
        provenance = replace(TRUE.profile.provenance, measured_at=measured_at)
        result = run(plan) if factor is None else slower(plan, factor)
        found = calibration.drift(TRUE.profile, plan, RunOptions(), result)
        return calibration.changed_text(replace(TRUE.profile, provenance=provenance), found, now)

    today = "2026-11-23T08:00Z"
    week = "2026-11-16T08:00Z"
    assert text(today, None) == text(today, 1.0) == text("", None) == text(week, 1.0) == ""
    assert text(week, None).startswith("the profile was measured 7 days ago: profile again, or ")
    assert text(today, 1.25).startswith("the machine is 25 % slower than in its profile; by chance it differs by")
    assert "20 % faster" in text(today, 0.8)
    assert "; the profile was measured 7 days ago: a run that teaches the profile re-scales it" in text(week, 1.25)


def test_a_profile_of_another_torch_is_said_so() -> None:
    def text(version: str) -> str:
        provenance = replace(TRUE.profile.provenance, versions={"torch": version} if version else {})
        return calibration.other_torch(replace(TRUE.profile, provenance=provenance))

    here = importlib.metadata.version("torch").partition("+")[0]
    assert text(here) == text(f"{here}+cu999") == text("") == ""
    assert text("1.2.3+cpu").startswith(f"the profile was measured with torch 1.2.3, this run was with {here}: ")


def test_a_run_with_its_stages_alone_rescales_the_profile(folder: Path) -> None:
    plan = planned(TRUE.profile)
    lesson = calibration.calibrate(plan, folder / "plan.json", None, RunOptions(), slower(plan, 1.25))
    assert "has learnt from 1 run: machine x1.25" in lesson.text
    after = planned(load(folder / "profile.json", Profile))
    assert "calibrated by 1 run: machine x1.25" in explain.headline(after)
    assert check(after, load(folder / "profile.json", Profile)) == ()
