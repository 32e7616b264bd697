"""``halopipe run``: what it asks for, and what it writes; the run itself is given."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from halopipe.launch import run
from planner.costs.predict import predict
from planner.ir.codec import load
from planner.ir.plan import Plan
from planner.ir.profile import Correction, CostClass
from planner.ir.timeline import Span, Timeline, TimelineFile
from tests.halopipe.commands import PROFILE, call
from tests.planner.costs.calibration.test_machine import passes


def test_a_run_tells_machine_and_model_apart_and_teaches_the_profile_that_its_plan_remembers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a machine that computes 1.3 times as long as its profile, and a tenth longer than the model says."""
    (folder / "plans").mkdir()
    assert call("plan", "profile.json", "--global-batch", "8", "-o", "plans/plan.json").exit_code == 0
    plan = load("plans/plan.json", Plan)
    slow = PROFILE.corrected_by((Correction(CostClass("machine", PROFILE.cluster.devices[0].kind), 1.3, 1),))
    timeline = replace(predict(slow, plan.decision)[1], source="measured")
    timeline = replace(timeline, step_s=1.1 * timeline.step_s)

    def run_plan(plan: Plan, options: run.RunOptions, progress: object, replanner: object) -> run.RunResult:
        lone = tuple(passes(plan.decision, lambda _: 1.3, PROFILE)) if options.lone_passes == "on" else ()
        return run.RunResult((2.3,) * 9, (timeline.step_s,) * 9, 1, timeline, (), (), (), isolated_passes=lone)

    monkeypatch.setattr(run, "run_plan", run_plan)
    before = Path("profile.json").read_bytes()
    quiet = call("run", "plans/plan.json", "--no-learn", "--calibrate", "on", "--json")
    assert (quiet.exit_code, Path("profile.json").read_bytes()) == (0, before), quiet.stderr
    assert "the machine is 30 % slower than in its profile" in quiet.stderr
    drift = json.loads(quiet.stdout)["drift"]
    assert drift["model"] == pytest.approx(0.1)
    assert (1 + drift["machine"]) * 1.1 == pytest.approx(timeline.step_s / plan.prediction.step_s)
    assert load("timeline.json", TimelineFile).drift is not None
    taught = call("run", "plans/plan.json", "--calibrate", "on")
    assert taught.exit_code == 0, taught.stderr
    assert "profile.json has learnt from 1 run: machine x1.30" in taught.stderr
    assert "\nmachine: stages alone take " in taught.stdout
    assert "\nmodel: what it missed makes the step 10 % longer\n" in taught.stdout
    assert load("plans/plan.json", Plan) == plan, "it is --update that writes into the plan"
    plain = call("run", "plans/plan.json", "--json")
    assert json.loads(plain.stdout)["drift"] is None


def test_a_run_writes_its_timeline_and_on_request_a_trace_and_the_plan(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[run.RunOptions] = []

    def run_plan(plan: Plan, options: run.RunOptions, progress: object, replanner: object) -> run.RunResult:
        asked.append(options)
        timeline = Timeline("measured", 0.011, (Span(0, "0F0", 0.0, 0.01),))
        return run.RunResult((2.3, 2.2), (0.012, 0.011), 1, timeline, (0.01, 0.0), (0.0, 0.0), (1, 1))

    monkeypatch.setattr(run, "run_plan", run_plan)
    before = load("alone/by_hand.json", Plan)
    assert call("run", "alone/by_hand.json", "--steps", "2").exit_code == 0
    assert load("by_hand.timeline.json", TimelineFile).predicted.spans == ()
    assert asked[0] == run.RunOptions(2)
    assert load("alone/by_hand.json", Plan) == before
    options = ["--check-numerics", "--dtype", "float64", "--data", "a:b", "--seed", "3", "--deadline", "9"]
    files = ["--update", "--trace", "t.json", "-o", "x.json", "--profile", "profile.json"]
    result = call("run", "by_hand.json", "--steps", "2", *options, *files, "--json")
    assert result.exit_code == 0, result.stderr
    assert asked[1] == run.RunOptions(2, seed=3, data="a:b", check_numerics=True, dtype="float64", deadline_s=9.0)
    assert json.loads(result.stdout)["losses"] == [2.3, 2.2]
    training = "--data-from first --optimizer Adam --scheduler StepLR:step_size=1 --clip-norm 2 --accumulate 3"
    evaluation = "--eval-data c:d --eval-every 4 --eval-batches 5 --metrics m.jsonl"
    checkpoints = "--checkpoint saved --checkpoint-every 6 --keep 7 --resume"
    assert call("run", "by_hand.json", *f"{training} {evaluation} {checkpoints}".split()).exit_code == 0
    assert asked[2] == run.RunOptions(
        data_from="first",
        optimizer="Adam",
        scheduler="StepLR:step_size=1",
        clip_norm=2.0,
        accumulate=3,
        eval_data="c:d",
        eval_every=4,
        eval_batches=5,
        metrics=str(folder / "m.jsonl"),
        checkpoint=str(folder / "saved"),
        checkpoint_every=6,
        keep=7,
        resume=True,
    )
    measured = load("by_hand.json", Plan).measured
    assert measured is not None
    assert measured.step_s == 0.011
    assert load("x.json", TimelineFile).predicted.spans != ()
    assert {event["pid"] for event in json.loads((folder / "t.json").read_text())["traceEvents"]} == {0, 1}
