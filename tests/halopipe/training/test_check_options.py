"""Options of a run that do not fit together, or not the plan, and steps that cannot be traced: each has a remedy."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch

from halopipe.run_spec.options import ON_NAN, RunOptions
from halopipe.training.check_options import require_consistent
from halopipe.training.torch_traces import TorchTraces, steps_of
from planner.ir.errors import UnknownNameError, UsageError
from planner.ir.plan import Plan
from runtime.monitor.activity import Activity
from runtime.numerics.finite import OnNan
from tests.halopipe import learners


@cache
def plan(schedule: str = "1f1b") -> Plan:
    return learners.plan(schedule=schedule)


def refused(schedule: str = "1f1b", **options: object) -> UsageError:
    with pytest.raises(UsageError) as caught:
        require_consistent(plan(schedule), RunOptions(**options))
    assert caught.value.exit_code == 2
    return caught.value


SAVED = {"checkpoint": "x"}
NO_CHECK = "--check-numerics needs a run from the first step"
APART = "leave one of them out"


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("options", "title", "remedy"),
    [
        ({"eval_every": 5}, "--eval-every needs --eval-data", "--eval-data halopipe.data:digits --eval-batches 8"),
        ({"eval_batches": 5}, "--eval-batches needs --eval-data", "--eval-data halopipe.data:digits"),
        *(
            ({name: 3}, f"--{name.replace('_', '-')} needs --checkpoint", "--checkpoint checkpoints")
            for name in ("checkpoint_every", "keep", "resume", "restarts")
        ),
        ({"data_from": "share"}, "--data-from share needs --data", "--data FACTORY of a Dataset"),
        (
            {"compiler": "eager", "lone_passes": "on"},
            "--calibrate on times stages as they were profiled, which ",
            APART,
        ),
        ({"resume": True, **SAVED, "check_numerics": True}, NO_CHECK, APART),
        ({"restarts": 1, **SAVED, "check_numerics": True}, NO_CHECK, APART),
        ({**SAVED, "accumulate": 3, "steps": 20}, "--steps 20 is no multiple of --accumulate 3", "--steps 21"),
        (
            {**SAVED, "accumulate": 2, "checkpoint_every": 5},
            "--checkpoint-every 5 is no multiple of --accumulate 2",
            "--checkpoint-every 6",
        ),
        (
            {"check_numerics": True, "accumulate": 30},
            "--check-numerics needs an update, the first is after 30 steps",
            "--steps 30",
        ),
    ],
)
def test_an_option_that_lacks_another_is_named_with_the_remedy(
    options: dict[str, object], title: str, remedy: str
) -> None:
    error = refused(**options)
    assert error.title.startswith(title)
    assert error.remedies[0] == remedy


@pytest.mark.every_case
@pytest.mark.parametrize(
    "options",
    [
        {"steps": 0},
        {"accumulate": 0},
        {"clip_norm": -1.0},
        {"clip_norm": float("nan")},
        {"eval_every": -1, "eval_data": "a:b"},
        {"checkpoint_every": -1, **SAVED},
    ],
)
def test_numbers_that_mean_nothing_are_refused(options: dict[str, object]) -> None:
    assert "least" in str(refused(**options))


def test_a_plan_of_forward_passes_takes_nothing_that_trains() -> None:
    trains = ("optimizer", "SGD"), ("scheduler", "StepLR:step_size=1"), ("clip_norm", 1.0), ("accumulate", 2)
    for name, value in (*trains, ("checkpoint", "x"), ("eval_data", "a:b"), ("check_numerics", True)):
        assert "is for training, this plan has forward passes alone" in refused("forward", **{name: value}).title
    require_consistent(plan("forward"), RunOptions(data="a:b", metrics="x"))


def test_unknown_names_are_answered_with_the_nearest() -> None:
    for options in ({"data_from": "frist"}, {"optimizer": "AdamV"}, {"scheduler": "StepLF"}, {"on_nan": "skop"}):
        with pytest.raises(UnknownNameError, match="did you mean"):
            require_consistent(plan(), RunOptions(**options))


def test_a_folder_with_checkpoints_is_not_written_to_by_another_run(tmp_path: Path) -> None:
    require_consistent(plan(), RunOptions(checkpoint=str(tmp_path)))
    (tmp_path / "step-3").mkdir()
    error = refused(checkpoint=str(tmp_path))
    assert error.details == ("steps 3",)
    assert error.remedies[0] == "--resume, to go on from the newest"
    for resume in (True, "auto"):
        require_consistent(plan(), RunOptions(checkpoint=str(tmp_path), resume=resume))
    (tmp_path / "file").touch()
    assert "is no folder" in refused(checkpoint=str(tmp_path / "file")).title


def test_what_is_done_about_nan_fits_the_schedule() -> None:
    assert tuple(OnNan) == ON_NAN
    error = refused("pipedream", on_nan="skip")
    assert error.title.startswith("--on-nan skip needs a schedule that updates the weights at the end of a step")
    assert error.remedies == ("--on-nan stop", "halopipe plan --schedule 1f1b")
    for each in ON_NAN:
        require_consistent(plan(), RunOptions(on_nan=each))


def test_the_steps_asked_for_are_traced_with_what_the_rank_says_of_itself(tmp_path: Path) -> None:
    activity = Activity()
    options = RunOptions(steps=4, profile_steps="2:3", profile_folder=str(tmp_path / "t"))
    traces = TorchTraces(options, 1, activity, 0)
    for number in range(1, 5):
        with traces.around(number):
            activity.begin("0F0")
            torch.ones(3) + number
            activity.begin("0B0")
    assert activity.listener is None
    events = json.loads((tmp_path / "t" / "rank-1.json").read_text())["traceEvents"]
    ranges = sorted((e for e in events if e.get("cat") == "user_annotation"), key=lambda e: e["ts"])
    assert [e["name"] for e in ranges] == ["step 2", "0F0", "0B0", "step 3", "0F0", "0B0"]
    added = [e for e in events if e.get("name") == "aten::add"]
    forward = ranges[1]
    assert forward["ts"] <= added[0]["ts"] <= forward["ts"] + forward["dur"]


def test_steps_that_cannot_be_traced_are_refused_with_what_can() -> None:
    for text, message in (("5:3", "no range"), ("a", "no range"), ("3:9", "beyond the last step")):
        with pytest.raises(UsageError, match=message) as caught:
            steps_of(RunOptions(steps=8, profile_steps=text))
        assert caught.value.remedies
    assert steps_of(RunOptions(steps=8, profile_steps="4")) == range(4, 5)
    with pytest.raises(UsageError, match="are done already") as caught:
        TorchTraces(RunOptions(steps=20, profile_steps="3:5"), 0, Activity(), 10)
    assert caught.value.remedies == ("--profile-steps 11:13",)
