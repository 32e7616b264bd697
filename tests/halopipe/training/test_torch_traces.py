from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from halopipe.run_spec.options import RunOptions
from halopipe.training.torch_traces import TorchTraces, steps_of
from planner.ir.errors import UsageError
from runtime.monitor.activity import Activity


def test_the_steps_asked_for_are_traced_with_what_the_rank_says_of_itself(tmp_path: Path) -> None:
    activity, options = Activity(), RunOptions(steps=4, profile_steps="2:3", profile_folder=str(tmp_path / "t"))
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


@pytest.mark.parametrize(("text", "message"), [("5:3", "no range"), ("a", "no range"), ("3:9", "beyond the last step")])
def test_steps_that_cannot_be_traced_are_refused_with_what_can(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        steps_of(RunOptions(steps=8, profile_steps=text))
    assert caught.value.remedies
    assert steps_of(RunOptions(steps=8, profile_steps="4")) == range(4, 5)


def test_steps_that_are_done_already_are_refused() -> None:
    with pytest.raises(UsageError, match="are done already") as caught:
        TorchTraces(RunOptions(steps=20, profile_steps="3:5"), 0, Activity(), 10)
    assert caught.value.remedies == ("--profile-steps 11:13",)
