"""Plans cut along space and channels, from the command line: planned, checked and explained."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from halopipe.cli import app
from planner.ir.codec import dump, load
from planner.ir.plan import Plan
from tests.planner.networks import mesh_like, priced


def call(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize(("solver", "allow"), [("dryden", "sample,spatial"), ("suffix-dp", "sample,spatial,channel")])
def test_a_plan_with_layouts_from_end_to_end(tmp_path: Path, solver: str, allow: str) -> None:
    profile, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    dump(priced(*mesh_like(samples=2, height=64), speeds=(1.0, 1.0)), profile)
    code, text = call("plan", profile, "--solver", solver, "--allow", allow, "--global-batch", 2, "-o", plan)
    assert code == 0, text
    assert call("check", plan, "--profile", profile) == (0, f"{plan} is good\n")
    found = load(plan, Plan)
    assert any(set(placed.cuts) & {"height", "width"} for placed in found.decision.layers.values())
    code, text = call("explain", plan, "--profile", profile)
    assert code == 0, text
    assert "height" in text or "width" in text
