from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from benchmarks.chains import chain_profile
from halopipe.cli.app import app
from planner.ir.codec import dump
from tests.planner.factories import chain_decision, plan_of

PROFILE = chain_profile(6)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    dump(PROFILE, "profile.json")
    dump(plan_of(PROFILE, chain_decision(PROFILE, cuts=(3,))), "plan.json")
    return tmp_path


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["export", *arguments])


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
    result = call("plan.json", "--to", "torch-pipelining", *output)
    assert (result.exit_code, result.stdout) == (0, ""), result.stderr
    described = json.loads((folder / description).read_text())
    assert described["csv"] == schedule
    assert described["split_spec"] == {"l3": "BEGINNING"}
    assert (folder / schedule).read_text().splitlines()[1] == "1F0,1B0,1F1,1B1"
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        {"plan.json", "profile.json", description, schedule}
    )


def test_a_cut_inside_a_module_is_a_remark(folder: Path) -> None:
    profile = chain_profile(6, parameter_bytes=0)
    layers = tuple(replace(layer, attributes={"op": f"aten.{layer.name}.default"}) for layer in profile.graph.layers)
    profile = replace(profile, graph=replace(profile.graph, layers=layers))
    dump(profile, "profile.json")
    dump(plan_of(profile, chain_decision(profile, cuts=(3,))), "plan.json")
    result = call("plan.json", "--to", "torch-pipelining")
    assert result.exit_code == 0, result.stderr
    assert "stage 1 begins between l2 and l3: inside a module, where torch cannot split" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "exit_code", "text"),
    [
        (["skewed.json"], 2, "stage 0 is on ranks 0, 1 (samples 3:1): torch runs a stage on one rank"),
        (["plan.json", "-o", "schedule.csv"], 2, "schedule.csv is the name of the schedule"),
        (["plan.json", "-o", "nowhere/pipeline.json"], 3, "error[H301] cannot write nowhere/pipeline.json"),
        (["alone/plan.json"], 2, "split points need the model's graph"),
    ],
)
def test_what_cannot_be_written_is_said(folder: Path, arguments: list[str], exit_code: int, text: str) -> None:
    skewed = chain_decision(PROFILE, micro_batches=(4, 4), ranks=((0, 1),), shares=((3, 1),))
    dump(plan_of(PROFILE, skewed), "skewed.json")
    (folder / "alone").mkdir()
    (folder / "alone" / "plan.json").write_text((folder / "plan.json").read_text())
    before = sorted(folder.rglob("*"))
    result = call(*arguments, "--to", "torch-pipelining")
    assert (result.exit_code, text in result.stderr) == (exit_code, True), result.stderr
    assert sorted(folder.rglob("*")) == before
