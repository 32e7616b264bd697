"""``halopipe export``: a trace, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.ir.codec import dump
from planner.ir.timeline import Span, Timeline, TimelineFile
from tests.halopipe.cli.conftest import folder as folder
from tests.halopipe.cli.test_files_at_odds import require_refused
from tests.halopipe.commands import call, require_said


def test_a_trace_shows_predicted_and_measured(folder: Path) -> None:
    spans = (Span(0, "0F0", 0.0, 1.0),)
    dump(TimelineFile(Timeline("predicted", 1.0, spans), Timeline("measured", 1.1, spans), (1.1,), (2.3,)), "t.json")
    result = call("export", "by_hand.json", "--to", "chrome-trace", "--timeline", "t.json")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    names = [event["args"] for event in json.loads((folder / "trace.json").read_text())["traceEvents"][:1]]
    assert names == [{"name": "predicted"}]
    assert call("export", "by_hand.json", "--to", "chrome-trace", "--profile", "profile.json").exit_code == 0


def test_what_is_no_file_of_ways_says_what_it_is(folder: Path) -> None:
    assert "it is a halopipe plan file" in call("export", "by_hand.json", "--to", "megatron").stderr
    Path("pipe.json").write_text("{}", "utf-8")
    assert "it has no best, global_batch, transformer" in call("export", "pipe.json", "--to", "megatron").stderr


@pytest.mark.parametrize(
    ("arguments", "exit_code", "text"),
    [
        (["export", "by_hand.json", "--to", "perfetto"], 2, "no export format 'perfetto'"),
        (["export", "alone/by_hand.json", "--to", "chrome-trace"], 2, "a trace needs a timeline"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_goes_wrong_is_said_on_stderr_with_its_exit_code(
    folder: Path, arguments: list[str], exit_code: int, text: str
) -> None:
    require_said(folder, arguments, exit_code, text)


def test_a_plan_with_a_renamed_layer_is_refused(folder: Path) -> None:
    require_refused("export renamed.json --to torch-pipelining")
