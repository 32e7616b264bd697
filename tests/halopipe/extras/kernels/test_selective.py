"""``--recompute selective`` on a network of one's own: planned, told, checked, explained and refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halopipe.cli.app import app
from planner.ir.codec import dump, load
from planner.ir.graph import Graph
from planner.ir.plan import Plan
from planner.ir.profile import Profile
from planner.layers.recomputed import attention_cores
from tests.oracles.plans import check

GPT = ("vocabulary=48", "width=16", "layers=2", "heads=4", "context=32", "dropout=0.1", "fused=false")

SELECTIVE = ("--recompute", "selective", "--micro-batch", "1", "--max-stages", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of two ranks, of attention that is written in operators."""
    made = tmp_path_factory.mktemp("selective")
    words = [word for each in GPT for word in ("--arg", each)]
    given = ["--input", "2,32", *words, "--on", "a100-dgx", "--workers", "2", "--sizes", "1,2"]
    found = run("profile", "profiler.models.gpt:gpt", *given, "-o", str(made / "profile.json"))
    assert not found[0], found
    return made


def run(*arguments: str) -> tuple[int, str]:
    told = CliRunner().invoke(app, [*arguments])
    return told.exit_code, told.output


def graph_of(folder: Path) -> Graph:
    return load(folder / "profile.json", Profile).graph


def test_every_attention_is_computed_again_and_what_that_wins_is_told(folder: Path) -> None:
    path, plan = str(folder / "profile.json"), str(folder / "plan.json")
    code, told = run("plan", path, *SELECTIVE, "-o", plan)
    assert code == 0, told
    assert "2 spans of layers computed again in the backward: the fullest rank holds" in told
    found, profile = load(plan, Plan), load(path, Profile)
    spans = [span for stage in found.decision.stages for span in stage.recomputed]
    assert sorted(spans) == sorted(attention_cores(profile.graph))
    assert not any(stage.recompute for stage in found.decision.stages)
    assert not check(found, profile)
    assert "12 layers" in run("explain", plan, "--profile", path)[1]
    core = attention_cores(profile.graph)[0]
    assert f"{len(core)} layers, {core[0]} to {core[-1]}" in run("explain", plan, "--layer", core[1])[1]


def test_other_spans_than_were_asked_for_are_a_fault_and_priced_by_the_checker(folder: Path) -> None:
    path = str(folder / "profile.json")
    code, told = run("plan", path, *SELECTIVE, "-o", str(folder / "other.json"))
    assert code == 0, told
    plan, profile = load(folder / "other.json", Plan), load(path, Profile)
    bare = tuple(replace(stage, recomputed=()) for stage in plan.decision.stages)
    faults = check(replace(plan, decision=replace(plan.decision, stages=bare)), profile)
    assert any("asked for recompute selective" in fault for fault in faults), faults
    assert any("is predicted to hold" in fault for fault in faults), faults
    assert any("the predicted step is" in fault for fault in faults), faults
    never = replace(plan, inputs=replace(plan.inputs, request=replace(plan.inputs.request, recompute="never")))
    assert any("asked for recompute never" in fault for fault in check(never, profile))


def test_what_cannot_be_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    path = str(folder / "profile.json")
    code, told = run("plan", path, "--recompute", "core")
    assert code == 2
    assert "selective" in told
    profile = load(path, Profile)
    plain = tuple(replace(each, kind="pointwise") if each.kind == "softmax" else each for each in profile.graph.layers)
    dump(replace(profile, graph=replace(profile.graph, layers=plain)), tmp_path / "none.json")
    code, told = run("plan", str(tmp_path / "none.json"), "--recompute", "selective")
    assert code == 2
    assert "no attention is found" in told
