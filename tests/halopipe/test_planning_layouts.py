"""Plans cut along space and channels, from the command line: planned, checked and explained."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from halopipe.cli.app import app
from planner.ir.codec import dump, load
from planner.ir.plan import Plan
from planner.solvers import names
from tests.planner.networks import mesh_like, plain, priced, residual

LAYOUTS = [
    (name, allow)
    for name, allow in (("dryden", "sample,spatial"), ("best-first", "sample,spatial,channel"))
    if name in names()
]


def call(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize(("solver", "allow"), LAYOUTS)
def test_a_plan_with_layouts_from_end_to_end(tmp_path: Path, solver: str, allow: str) -> None:
    profile, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    dump(priced(*mesh_like(samples=1, height=256), speeds=(1.0, 1.0)), profile)
    code, text = call("plan", profile, "--solver", solver, "--allow", allow, "--global-batch", 1, "-o", plan)
    assert code == 0, text
    assert call("check", plan, "--profile", profile) == (0, f"{plan} is good\n")
    found = load(plan, Plan)
    assert any(set(placed.cuts) & {"height", "width"} for placed in found.decision.layers.values())
    code, text = call("explain", plan, "--profile", profile)
    assert code == 0, text
    assert "height" in text or "width" in text


def test_shares_follow_the_speeds_of_devices(tmp_path: Path) -> None:
    profile, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    dump(priced(*mesh_like(samples=1, height=512), speeds=(1.0, 3.0)), profile)
    code, text = call("plan", profile, "--allow", "sample,spatial", "--global-batch", 1, "-o", plan)
    assert code == 0, text
    cuts = load(plan, Plan).decision.layers["conv0"].cuts
    assert list(cuts.values()) == [(0, 64, 256)]
    assert call("check", plan, "--profile", profile)[0] == 0


def test_a_halo_depth_is_used_where_latency_rules(tmp_path: Path) -> None:
    profile, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    made = plain(samples=1, height=64, filters=(8,) * 4)
    dump(priced(*made, latency_s=1.5e-5, bandwidth_bytes_per_s=1e11), profile)
    arguments = ("plan", profile, "--allow", "sample,spatial", "--global-batch", 1, "-o", plan)
    assert call(*arguments)[0] == 0
    shallow = load(plan, Plan)
    assert call(*arguments, "--halo-depth", 3)[0] == 0
    deep = load(plan, Plan)
    assert max(placed.margin for placed in shallow.decision.layers.values()) == 0
    assert max(placed.margin for placed in deep.decision.layers.values()) == 3
    assert deep.prediction.step_s < shallow.prediction.step_s
    assert call("check", plan, "--profile", profile) == (0, f"{plan} is good\n")


def test_an_unknown_family_of_dims_is_named(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    dump(priced(*mesh_like()), profile)
    code, text = call("plan", profile, "--allow", "sample,spatail")
    assert code == 2
    assert "no family of dims 'spatail'" in text
    assert "known: sample, spatial, channel" in text


def test_a_layer_that_cannot_be_cut_so_is_refused_with_three_remedies(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    dump(priced(*residual()), profile)
    code, text = call("plan", profile, "--allow", "sample,spatial", "--fix", "linear*=spatial:2")
    assert code == 4
    for words in (
        "cannot be cut in 2 parts along spatial",
        "gather: leave spatial uncut",
        "register a rule",
        "elementw",
    ):
        assert words in text
