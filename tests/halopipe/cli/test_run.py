"""``halopipe run`` and ``checkpoint``: what a run is given, what it writes, and going on under another plan."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from halopipe.launch import run
from planner.costs.predict import predict
from planner.ir.codec import dump, load
from planner.ir.plan import Plan
from planner.ir.profile import Correction, CostClass
from planner.ir.timeline import Span, Timeline, TimelineFile
from runtime.checkpoint import Checkpoint, complete_steps
from tests.halopipe import learners
from tests.halopipe.commands import HOME, PROFILE, call, require_said
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


DATA = "tests.halopipe.learners:dataset"
RECIPE = f"--data {DATA} --optimizer AdamW:lr=0.05 --scheduler StepLR:step_size=2 --clip-norm 0.5 --accumulate 2"
SAVED = "--checkpoint saved --checkpoint-every 2 --keep 2 --metrics logs/m.jsonl"


@pytest.fixture
def plans(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Plans of two ranks and of one."""
    monkeypatch.setenv("PYTHONPATH", str(HOME))
    dump(learners.plan(), "two.json")
    dump(learners.plan([]), "one.json")
    return folder


def typed(text: str) -> Result:
    return call(*text.split())


def losses(result: Result) -> list[float]:
    assert result.exit_code == 0, result.stderr
    found: list[float] = json.loads(result.stdout)["losses"]
    return found


def test_a_run_is_stopped_and_goes_on_under_another_plan(plans: Path) -> None:
    """Takes 6 s: three jobs of processes, from the command line to the files that they leave."""
    whole = losses(typed(f"run one.json --steps 8 {RECIPE} --json"))
    evaluation = f"--eval-data {DATA} --eval-every 2"
    kept = f"{SAVED} {evaluation} --data-from share --update --resume auto"
    begun = typed(f"run two.json --steps 4 {RECIPE} {kept} --details")
    assert begun.exit_code == 0, begun.stderr
    assert "evaluation after step 2: loss " in begun.stdout
    call_text = f"data: {DATA}(global_batch=6, input_shape=(4, 5), seed=0) gave a Dataset of 19 samples"
    assert call_text in begun.stderr
    assert "stage 1 compute" in begun.stdout
    assert load("two.json", Plan).measured is not None
    assert complete_steps(plans / "saved") == (2, 4)
    rest = typed(f"run two.json --steps 8 {RECIPE} {SAVED} {evaluation} --data-from first --resume --json")
    assert losses(rest) == pytest.approx(whole[4:], rel=1e-10)
    found = json.loads(rest.stdout)
    assert found["first_step"] == 4
    assert [each["step"] for each in found["evaluations"]] == [6, 8]
    assert complete_steps(plans / "saved") == (6, 8)
    lines = [json.loads(line) for line in (plans / "logs" / "m.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["loss"] for line in steps] == pytest.approx(whole, rel=1e-10)
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 4, 6, 8]
    assert load("two.timeline.json", TimelineFile).losses == tuple(found["losses"])

    shown = typed("checkpoint saved --step 6")
    assert "8 steps" not in shown.stdout
    assert "step-6: 6 steps done" in shown.stdout
    assert typed("checkpoint saved --to model.pt").exit_code == 0
    learners.classifier()[0].load_state_dict(torch.load("model.pt", weights_only=True))
    assert typed("checkpoint nowhere").exit_code == 3
    again = typed(f"run two.json --steps 8 {RECIPE} {SAVED}")
    assert (again.exit_code, "has checkpoints of another run" in again.stderr) == (2, True)
    done = typed(f"run one.json --steps 8 {RECIPE} {SAVED} --resume")
    assert (done.exit_code, "all 8 steps are done" in done.stderr) == (2, True)
    done = typed(f"run one.json --steps 8 {RECIPE} {SAVED} --resume auto --json")
    assert (done.exit_code, "all 8 steps are done: " in done.stderr) == (0, True), done.stderr
    found = json.loads(done.stdout)
    assert (found["first_step"], found["losses"], found["measured"]) == (8, [], None)
    assert found["end"].endswith("saved/step-8")


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--eval-every 3", "--eval-every needs --eval-data"),
        ("--resume", "--resume needs --checkpoint"),
        ("--restarts 2", "--restarts needs --checkpoint"),
        ("--checkpoint saved --resume=older", "no way to resume 'older'"),
        ("--data-from share", "--data-from share needs --data"),
        ("--data-from all", "no way to read data 'all'"),
        ("--optimizer AdamV", "no optimiser 'AdamV'"),
        ("--profile-steps 5:3", "--profile-steps 5:3 is no range of steps"),
        ("--profile-steps 2 --update", "would write steps into the plan that are slower"),
        ("--profile-folder traces", "--profile-folder needs --profile-steps"),
    ],
)
def test_a_wrong_use_ends_before_any_process_starts(plans: Path, options: str, message: str) -> None:
    require_said(plans, ["run", "two.json", *options.split()], 2, "error[H2", message)


def test_a_folder_that_nothing_goes_on_from_is_not_made(plans: Path) -> None:
    require_said(plans, ["run", "two.json", "--checkpoint", "no/where", "--resume"], 3, "error[H3", "no/where")


@pytest.mark.exhaustive("a run is ended many times")
def test_a_run_that_is_ended_while_it_saves_leaves_only_whole_checkpoints(plans: Path) -> None:
    command = f"run two.json --steps 100000 --data {DATA} --checkpoint saved --checkpoint-every 1 --metrics m.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "halopipe", *command.split()], env=dict(os.environ), stderr=subprocess.PIPE
    )
    end_s = time.monotonic() + 60
    while len(complete_steps(plans / "saved")) < 3 and time.monotonic() < end_s and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 7, stderr  # it saved once more
    steps = complete_steps(plans / "saved")
    assert len(steps) >= 3, stderr
    Checkpoint.open(plans / "saved").verify()
    lines = [json.loads(line) for line in (plans / "m.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    result = typed(f"run one.json --steps {steps[-1] + 2} --data {DATA} --checkpoint saved --resume --json")
    assert len(losses(result)) == 2
