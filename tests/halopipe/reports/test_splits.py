"""``explain --layer``: which split wins, by how much, and the runner-up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.chains import chain_profile
from halopipe.cli.app import app
from halopipe.reports import layer
from halopipe.reports.layer import describe_layer, layer_data
from planner.ir.codec import dump
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.ir.profile import Profile
from planner.solvers import names, solver
from tests.planner.factories import chain_decision, plan_of
from tests.planner.networks import mesh_like, priced


@pytest.fixture(scope="module")
def profile() -> Profile:
    return priced(*mesh_like(samples=2, height=64), speeds=(1.0, 1.0))


@pytest.fixture(scope="module")
def plan(profile: Profile) -> Plan:
    if "dryden" not in names():
        pytest.skip("plans of one stage in space are those of an extra")
    return solver("dryden")(Problem(profile, 2, allow=("sample", "spatial"), micro_batch_sizes=(1,)))


def test_the_winner_and_the_runner_up_are_named(plan: Plan, profile: Profile) -> None:
    found = layer.splits_of(plan, profile, "conv0")
    assert found[0].rival.is_chosen
    shown = describe_layer(plan, profile, "conv0")
    assert "Layouts of this layer on 2 devices, all others as planned" in shown
    assert f"{found[0].layout} wins, by " in shown
    assert f"runner-up {found[1].layout}" in shown
    assert "as planned" in shown
    assert "not allowed (--allow)" in shown  # channels
    assert {split.layout for split in found} >= {"height:2", "width:2", "channel:2"}


def test_the_same_in_json(plan: Plan, profile: Profile) -> None:
    found = json.loads(json.dumps(layer_data(plan, profile, "conv0")))
    assert found["winner"] == found["layouts"][0]["layout"]
    assert found["runner_up"] == found["layouts"][1]["layout"]
    assert found["lead_s"] == pytest.approx(found["layouts"][1]["total_s"] - found["layouts"][0]["total_s"])
    parts = ("compute_s", "messages_s", "statistics_s", "reduction_s", "update_s")
    for each in found["layouts"]:
        assert each["total_s"] == pytest.approx(sum(each[part] for part in parts))
    assert [each["chosen"] for each in found["layouts"]].count(True) == 1
    assert [each["allowed"] for each in found["layouts"] if "channel" in each["cuts"]] == [False]


def test_a_worse_choice_by_hand_is_told(plan: Plan, profile: Profile) -> None:
    decision = plan.decision
    cut = next(iter(decision.layers["conv0"].cuts))
    other = {"height": (0, 16, 32)} if cut == "width" else {"width": (0, 16, 32)}
    layers = {**decision.layers, "conv0": replace(decision.layers["conv0"], cuts=other)}
    shown = describe_layer(replace(plan, decision=replace(decision, layers=layers)), profile, "conv0")
    assert f"{cut}:2 wins, by " in shown
    assert f"as planned ({next(iter(other))}:2) takes " in shown


def test_margins_and_shared_channels_are_described(plan: Plan, profile: Profile) -> None:
    decision = plan.decision
    layers = {
        **decision.layers,
        "conv0": replace(decision.layers["conv0"], margin=2),
        "conv3": replace(decision.layers["conv3"], cuts={"channel": (0, 4, 8)}, ways=2),
    }
    edited = replace(plan, decision=replace(decision, layers=layers))
    assert "each rank works 2 rows beyond its part" in describe_layer(edited, profile, "conv0")
    shown = describe_layer(edited, profile, "conv3")
    assert "2 ranks share its input channels" in shown
    assert "channel:2 channels shared by 2" in shown


def test_on_one_device_nothing_is_divided() -> None:
    chain = chain_profile(6)
    alone = plan_of(chain, chain_decision(chain, cuts=(3,), micro_batches=(2, 2, 2, 2)))
    assert layer.splits_of(alone, chain, "l3") == ()
    assert "its stage has one device: nothing is divided" in describe_layer(alone, chain, "l3")
    assert layer_data(alone, chain, "l3")["winner"] is None


def test_from_the_command_line(tmp_path: Path, plan: Plan, profile: Profile) -> None:
    dump(plan, tmp_path / "plan.json")
    dump(profile, tmp_path / "profile.json")
    arguments = ["explain", str(tmp_path / "plan.json"), "--layer", "conv0"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0
    assert "wins, by" in shown.output
    data = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert data["winner"]
