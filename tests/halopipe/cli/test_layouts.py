"""Plans cut along space and channels: planned, checked and explained; which split of a layer wins."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.chains import chain_profile
from halopipe.reports import layer
from halopipe.reports.layer import describe_layer, layer_data
from planner.ir.codec import dump, load
from planner.ir.errors import UnknownNameError
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.ir.profile import Profile
from planner.solvers import names, solver
from tests.halopipe.commands import call, code_and_output
from tests.planner.factories import chain_decision, plan_of
from tests.planner.networks import mesh_like, plain, priced, residual

LAYOUTS = [
    (name, allow)
    for name, allow in (("dryden", "sample,spatial"), ("best-first", "sample,spatial,channel"))
    if name in names()
]


@pytest.mark.parametrize(("solver", "allow"), LAYOUTS)
def test_a_plan_with_layouts_from_end_to_end(tmp_path: Path, solver: str, allow: str) -> None:
    profile = tmp_path / "profile.json"
    plan = tmp_path / "plan.json"
    dump(priced(*mesh_like(samples=1, height=256), speeds=(1.0, 1.0)), profile)
    code, text = code_and_output("plan", profile, "--solver", solver, "--allow", allow, "--global-batch", 1, "-o", plan)
    assert code == 0, text
    assert code_and_output("check", plan, "--profile", profile) == (0, f"{plan} is good\n")
    found = load(plan, Plan)
    assert any(set(placed.cuts) & {"height", "width"} for placed in found.decision.layers.values())
    code, text = code_and_output("explain", plan, "--profile", profile)
    assert code == 0, text
    assert "height" in text or "width" in text


def test_space_is_cut_where_nobody_says_anything_and_not_where_samples_alone_may_be(tmp_path: Path) -> None:
    profile, plan, proof = (tmp_path / name for name in ("profile.json", "plan.json", "proof.json"))
    dump(priced(*mesh_like(samples=1, height=256), speeds=(1.0, 1.0)), profile)
    steps_s = {}
    for asked in ((), ("--allow", "sample")):
        code, text = code_and_output("plan", profile, "--global-batch", 1, *asked, "-o", plan)
        assert code == 0, text
        assert ("best of: samples, space" in text, "not tried space" in text) == (not asked, bool(asked))
        found = load(plan, Plan)
        cut = {dim for placed in found.decision.layers.values() for dim in placed.cuts}
        assert bool(cut & {"height", "width"}) is (not asked)
        assert code_and_output("check", plan, "--profile", profile) == (0, f"{plan} is good\n")
        assert code_and_output("compare", plan, "--profile", profile, "--baselines")[0] == 0
        steps_s[asked] = found.prediction.step_s
    text = code_and_output("plan", profile, "--global-batch", 1, "--solver", "span-ilp", "-o", plan)[1]
    assert "best of: samples, one stage a device" in text
    assert steps_s[()] < steps_s["--allow", "sample"]
    assert code_and_output("plan", profile, "--global-batch", 1, "-o", plan, "--proof", proof)[0] == 0
    assert load(plan, Plan).inputs.request.allow == ("sample",)
    assert code_and_output("check", plan, "--proof", proof)[0] == 0


def test_shares_follow_the_speeds_of_devices(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    plan = tmp_path / "plan.json"
    dump(priced(*mesh_like(samples=1, height=512), speeds=(1.0, 3.0)), profile)
    code, text = code_and_output("plan", profile, "--allow", "sample,spatial", "--global-batch", 1, "-o", plan)
    assert code == 0, text
    cuts = load(plan, Plan).decision.layers["conv0"].cuts
    assert list(cuts.values()) == [(0, 64, 256)]
    assert code_and_output("check", plan, "--profile", profile)[0] == 0


def test_a_halo_depth_is_used_where_latency_rules(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    plan = tmp_path / "plan.json"
    made = plain(samples=1, height=64, filters=(8,) * 4)
    dump(priced(*made, latency_s=1.5e-5, bandwidth_bytes_per_s=1e11), profile)
    arguments = ("plan", profile, "--allow", "sample,spatial", "--global-batch", 1, "-o", plan)
    assert code_and_output(*arguments)[0] == 0
    shallow = load(plan, Plan)
    assert code_and_output(*arguments, "--halo-depth", 3)[0] == 0
    deep = load(plan, Plan)
    assert max(placed.margin for placed in shallow.decision.layers.values()) == 0
    assert max(placed.margin for placed in deep.decision.layers.values()) == 3
    assert deep.prediction.step_s < shallow.prediction.step_s
    assert code_and_output("check", plan, "--profile", profile) == (0, f"{plan} is good\n")


def test_an_unknown_family_of_dims_is_named(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    dump(priced(*mesh_like()), profile)
    code, text = code_and_output("plan", profile, "--allow", "sample,spatail")
    assert code == 2
    assert "no family of dims 'spatail'" in text
    assert "known: sample, spatial, channel" in text


def test_a_layer_that_cannot_be_cut_so_is_refused_with_three_remedies(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    dump(priced(*residual()), profile)
    code, text = code_and_output("plan", profile, "--allow", "sample,spatial", "--fix", "linear*=spatial:2")
    assert code == 4
    for words in (
        "cannot be cut in 2 parts along spatial",
        "gather: leave spatial uncut",
        "register a rule",
        "elementw",
    ):
        assert words in text


@pytest.fixture(scope="module")
def profile() -> Profile:
    return priced(*mesh_like(samples=2, height=64), speeds=(1.0, 1.0))


@pytest.fixture(scope="module")
def plan(profile: Profile) -> Plan:
    if "dryden" not in names():
        pytest.skip("plans of one stage in space are those of an extra")
    return solver("dryden")(Problem(profile, 2, allow=("sample", "spatial"), micro_batch_sizes=(1,), confidence=0.0))


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


def test_a_worse_choice_by_hand_is_code_and_output(plan: Plan, profile: Profile) -> None:
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
    shown = call(*arguments)
    assert shown.exit_code == 0
    assert "wins, by" in shown.output
    data = json.loads(call(*arguments, "--json").stdout)
    assert data["winner"]


CHAIN = chain_profile(6, parameter_bytes=2**20, activation_bytes=2**16)
PLAN = plan_of(CHAIN, chain_decision(CHAIN, cuts=(3,), micro_batches=(2, 2, 2, 2)))


def test_a_layer_is_described() -> None:
    shown = describe_layer(PLAN, CHAIN, "l3")
    assert shown.startswith("l3: stage 1, on n0/cpu1\n  linear (aten.linear.default)\n  reads l2 from stage 0\n")
    assert "reads y, an input of the step" in describe_layer(PLAN, CHAIN, "loss")
    assert "add --profile" in describe_layer(PLAN, None, "l3")
    with pytest.raises(UnknownNameError, match="no layer 'l33'"):
        describe_layer(PLAN, CHAIN, "l33")


def test_how_it_is_divided_and_whether_it_is_computed_again_is_said() -> None:
    shared = chain_decision(CHAIN, micro_batches=(4,), ranks=((0, 1),), shares=((3, 1),))
    again = replace(shared, stages=tuple(replace(stage, recompute=True) for stage in shared.stages))
    shown = describe_layer(plan_of(CHAIN, again), CHAIN, "l1")
    assert "divided over the ranks: samples 3:1" in shown
    assert "computed again before the backward" in shown
