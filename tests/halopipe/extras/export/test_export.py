"""``halopipe export``: split points and a schedule for torch, a trace, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.chains import chain_profile
from planner.ir.codec import dump
from planner.ir.timeline import Span, Timeline, TimelineFile
from tests.halopipe.commands import PROFILE, RENAMED, call, good, require_said
from tests.planner.factories import chain_decision, plan_of


@pytest.mark.parametrize(
    ("output", "description", "schedule"),
    [
        ((), "pipeline.json", "pipeline.csv"),
        (("-o", "torch.json"), "torch.json", "torch.csv"),
        (("-o", "."), "pipeline.json", "pipeline.csv"),
    ],
)
def test_split_points_and_schedule_lie_side_by_side(
    folder: Path, output: tuple[str, ...], description: str, schedule: str
) -> None:
    result = call("export", "by_hand.json", "--to", "torch-pipelining", *output)
    assert (result.exit_code, result.stdout) == (0, ""), result.stderr
    described = json.loads((folder / description).read_text())
    assert described["csv"] == schedule
    assert described["split_spec"] == {"l3": "BEGINNING"}
    assert (folder / schedule).read_text().splitlines()[1] == "1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3"
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        {"alone", "by_hand.json", "profile.json", description, schedule}
    )


def test_a_cut_inside_a_module_is_a_remark(folder: Path) -> None:
    profile = chain_profile(6, parameter_bytes=0)
    layers = tuple(replace(layer, attributes={"op": f"aten.{layer.name}.default"}) for layer in profile.graph.layers)
    profile = replace(profile, graph=replace(profile.graph, layers=layers))
    dump(profile, "profile.json")
    dump(plan_of(profile, chain_decision(profile, cuts=(3,))), "by_hand.json")
    result = good("export", "by_hand.json", "--to", "torch-pipelining")
    assert "stage 1 begins between l2 and l3: inside a module, where torch cannot split" in result.stderr


def test_a_trace_shows_predicted_and_measured(folder: Path) -> None:
    spans = (Span(0, "0F0", 0.0, 1.0),)
    dump(TimelineFile(Timeline("predicted", 1.0, spans), Timeline("measured", 1.1, spans), (1.1,), (2.3,)), "t.json")
    result = good("export", "by_hand.json", "--to", "chrome-trace", "--timeline", "t.json")
    assert result.stdout == ""
    names = [event["args"] for event in json.loads((folder / "trace.json").read_text())["traceEvents"][:1]]
    assert names == [{"name": "predicted"}]
    assert call("export", "by_hand.json", "--to", "chrome-trace", "--profile", "profile.json").exit_code == 0


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("words", "exit_code", "texts"),
    [
        ("by_hand.json --to perfetto", 2, ["no export format 'perfetto'"]),
        ("alone/by_hand.json --to chrome-trace", 2, ["a trace needs a timeline"]),
        ("by_hand.json --to megatron", 3, ["it is a halopipe plan file"]),
        ("empty.json --to megatron", 3, ["it has no best, global_batch, transformer"]),
        ("renamed.json --to torch-pipelining", 6, RENAMED),
        ("skewed.json --to torch-pipelining", 2, ["is on ranks 0, 1 (samples 3:1): torch runs a stage on one rank"]),
        ("by_hand.json --to torch-pipelining -o schedule.csv", 2, ["schedule.csv is the name of the schedule"]),
        ("empty.json --to deepspeed -o x.sh", 2, ["x.sh is the name of the script", "-o deepspeed.json"]),
        ("by_hand.json --to chrome-trace --version 2", 2, ["--version is of launchers, and chrome-trace is none"]),
        ("empty.json --to torchtitan --version 0.1", 2, ["no version of torchtitan '0.1'", "known: 2026-08, 0.2"]),
        ("by_hand.json --to torch-pipelining -o no/x.json", 3, ["error[H301] cannot write no/x.json"]),
        ("alone/by_hand.json --to torch-pipelining", 2, ["split points need the model's graph"]),
    ],
)
def test_what_goes_wrong_is_said_on_stderr_with_its_exit_code(
    folder: Path, words: str, exit_code: int, texts: list[str]
) -> None:
    Path("empty.json").write_text("{}", "utf-8")
    dump(
        plan_of(PROFILE, chain_decision(PROFILE, micro_batches=(4, 4), ranks=((0, 1),), shares=((3, 1),))),
        "skewed.json",
    )
    require_said(folder, ["export", *words.split()], exit_code, *texts)
