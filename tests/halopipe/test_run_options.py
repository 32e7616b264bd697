"""``halopipe run`` and ``halopipe checkpoint`` with everything that training asks for, in real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from halopipe.cli.app import app
from planner.ir.codec import dump, load
from planner.ir.plan import Plan
from planner.ir.timeline import TimelineFile
from runtime.checkpoint import Checkpoint, complete_steps
from tests.halopipe import learners

ROOT = Path(__file__).resolve().parent.parent.parent
DATA = "tests.halopipe.learners:dataset"
RECIPE = f"--data {DATA} --optimizer AdamW:lr=0.05 --scheduler StepLR:step_size=2 --clip-norm 0.5 --accumulate 2"
SAVED = "--checkpoint saved --checkpoint-every 2 --keep 2 --metrics logs/m.jsonl"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with plans of two ranks and of one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    dump(learners.plan(), "two.json")
    dump(learners.plan([]), "one.json")
    return tmp_path


def call(text: str) -> Result:
    return CliRunner().invoke(app, text.split())


def losses(result: Result) -> list[float]:
    assert result.exit_code == 0, result.stderr
    found: list[float] = json.loads(result.stdout)["losses"]
    return found


def test_a_run_is_stopped_and_goes_on_under_another_plan(folder: Path) -> None:
    """Takes 6 s: three jobs of processes, from the command line to the files that they leave."""
    whole = losses(call(f"run one.json --steps 8 {RECIPE} --json"))
    evaluation = f"--eval-data {DATA} --eval-every 2"
    begun = call(f"run two.json --steps 4 {RECIPE} {SAVED} {evaluation} --data-from share --update --resume auto")
    assert begun.exit_code == 0, begun.stderr
    assert "evaluation after step 2: loss " in begun.stdout
    call_text = f"data: {DATA}(global_batch=6, input_shape=(4, 5), seed=0) gave a Dataset of 19 samples"
    assert call_text in begun.stderr
    assert "stage 1 compute" in begun.stdout
    assert load("two.json", Plan).measured is not None
    assert complete_steps(folder / "saved") == (2, 4)
    rest = call(f"run two.json --steps 8 {RECIPE} {SAVED} {evaluation} --data-from first --resume --json")
    assert losses(rest) == pytest.approx(whole[4:], rel=1e-10)
    found = json.loads(rest.stdout)
    assert found["first_step"] == 4
    assert [each["step"] for each in found["evaluations"]] == [6, 8]
    assert complete_steps(folder / "saved") == (6, 8)
    lines = [json.loads(line) for line in (folder / "logs" / "m.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["loss"] for line in steps] == pytest.approx(whole, rel=1e-10)
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 4, 6, 8]
    assert load("two.timeline.json", TimelineFile).losses == tuple(found["losses"])

    shown = call("checkpoint saved --step 6")
    assert "8 steps" not in shown.stdout
    assert "step-6: 6 steps done" in shown.stdout
    assert call("checkpoint saved --to model.pt").exit_code == 0
    learners.classifier()[0].load_state_dict(torch.load("model.pt", weights_only=True))
    assert call("checkpoint nowhere").exit_code == 3
    again = call(f"run two.json --steps 8 {RECIPE} {SAVED}")
    assert (again.exit_code, "has checkpoints of another run" in again.stderr) == (2, True)
    done = call(f"run one.json --steps 8 {RECIPE} {SAVED} --resume")
    assert (done.exit_code, "all 8 steps are done" in done.stderr) == (2, True)
    done = call(f"run one.json --steps 8 {RECIPE} {SAVED} --resume auto --json")
    assert (done.exit_code, "all 8 steps are done: " in done.stderr) == (0, True), done.stderr
    found = json.loads(done.stdout)
    assert (found["first_step"], found["losses"], found["measured"]) == (8, [], None)
    assert found["end"].endswith("saved/step-8")


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
def test_a_wrong_use_ends_before_any_process_starts(folder: Path, options: str, message: str) -> None:
    result = call(f"run two.json {options}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error[H2")
    assert message in result.stderr
    assert "\n  try: " in result.stderr


@pytest.mark.exhaustive("a run is ended many times")
def test_a_run_that_is_ended_while_it_saves_leaves_only_whole_checkpoints(folder: Path) -> None:
    command = f"run two.json --steps 100000 --data {DATA} --checkpoint saved --checkpoint-every 1 --metrics m.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "halopipe", *command.split()], env=dict(os.environ), stderr=subprocess.PIPE
    )
    end_s = time.monotonic() + 60
    while len(complete_steps(folder / "saved")) < 3 and time.monotonic() < end_s and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 7, stderr  # it saved once more
    steps = complete_steps(folder / "saved")
    assert len(steps) >= 3, stderr
    Checkpoint.open(folder / "saved").verify()
    lines = [json.loads(line) for line in (folder / "m.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    result = call(f"run one.json --steps {steps[-1] + 2} --data {DATA} --checkpoint saved --resume --json")
    assert len(losses(result)) == 2
