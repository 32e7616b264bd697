"""Plans for what is left of the machines, and for machines at another speed."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.chains import chain_profile
from halopipe.cli.app import app
from halopipe.planning import problem as problems
from halopipe.planning import solve
from halopipe.planning.problem import standing_text
from halopipe.planning.replan import LEAST_GAIN, HeardSpeeds, is_worth, replan
from planner.costs.predict import predict
from planner.ir.codec import dump, load
from planner.ir.errors import InfeasibleError, UnknownNameError
from planner.ir.plan import Plan
from planner.ir.profile import Profile
from tests.oracles.plans import check

GLOBAL_BATCH = 8


def made(*speeds: float, **others: object) -> Profile:
    return chain_profile(
        7,
        len(speeds),
        forward_s=(1e-3, 3e-3, 2e-3, 4e-3, 1e-3, 2e-3, 3e-3),
        speeds=speeds,
        latency_s=1e-5,
        activation_bytes=2**14,
        parameter_bytes=2**18,
        **others,  # type: ignore[arg-type]
    )


PROFILE = made(1.0, 1.0, 1.0)


def planned(profile: Profile, **asked: object) -> Plan:
    given = {"global_batch": GLOBAL_BATCH, "confidence": 0.0, **asked}
    return solve.solve(problems.make_problem(profile, **given))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(PROFILE)


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("speeds", [{"n0/cpu0": 0.0}, {"n0/cpu1": 0.0, "n0/cpu2": 0.0}, {"n0/cpu1": 0.5}])
def test_it_is_the_best_plan_for_the_machines_as_they_stand(plan: Plan, speeds: dict[str, float], free: bool) -> None:
    found = replan(plan, PROFILE, speeds, free=free)
    left = [1.0 * speeds.get(f"n0/cpu{rank}", 1.0) for rank in range(3)]
    batches = plan.decision.micro_batches
    alone = made(*(speed for speed in left if speed), memory_bytes=2**30)
    assert found.after_s == pytest.approx(
        planned(alone, micro_batch=[] if free else list(set(batches))).prediction.step_s, rel=1e-9
    )
    assert found.plan.search.status == "proven"
    assert check(found.plan, PROFILE) == ()
    assert {name for stage in found.plan.decision.stages for name in stage.devices}.isdisjoint(
        name for name, speed in speeds.items() if not speed
    )
    assert sum(found.plan.decision.micro_batches) == GLOBAL_BATCH
    assert free or found.plan.decision.micro_batches == batches
    assert standing_text(speeds) in found.headline()
    assert json.loads(json.dumps(found.data()))["step_s"] == found.after_s


def test_before_is_the_plan_in_force_on_the_machines_as_they_stand(plan: Plan) -> None:
    found = replan(plan, PROFILE, {"n0/cpu1": 0.5})
    assert found.before_s == pytest.approx(predict(made(1.0, 0.5, 1.0), plan.decision)[0].step_s, rel=1e-12)
    assert found.after_s < found.before_s
    gone = replan(plan, PROFILE, {"n0/cpu1": 0.0})
    assert gone.before_s == plan.prediction.step_s < gone.after_s
    back = replan(plan, PROFILE, {}, in_force=gone.plan)
    assert (back.plan.decision, back.before_s) == (plan.decision, gone.after_s)


def test_no_plan_is_slower_than_one_device_or_an_even_split(plan: Plan) -> None:
    left = problems.standing(problems.problem_of(plan, PROFILE), {"n0/cpu2": 0.0})
    rivals = [solve.solve(left, name).prediction.step_s for name in ("one-device", "even-split", "data-parallel")]
    assert replan(plan, PROFILE, {"n0/cpu2": 0.0}, free=True).after_s <= min(rivals) * (1 + 1e-9)


@pytest.mark.parametrize("asked", [{"fix": ["l6=stage:2"]}, {"fix": ["*=replicas:3"]}])
def test_where_the_search_finds_nothing_in_time_the_plan_in_force_is_cut_anew(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, list[str]]
) -> None:
    before = planned(PROFILE, **asked)
    free = replace(before, inputs=replace(before.inputs, request=replace(before.inputs.request, fix=())))

    def nothing(*given: object, **named: object) -> Plan:
        raise InfeasibleError("no plan found in time")

    monkeypatch.setattr(solve, "solve", nothing)
    found = replan(free, PROFILE, {"n0/cpu1": 0.0})
    stages = [stage for stage in before.decision.stages if stage.devices != ("n0/cpu1",)]
    assert [stage.devices for stage in found.plan.decision.stages] == [
        tuple(name for name in stage.devices if name != "n0/cpu1") for stage in stages
    ]
    assert found.plan.decision.micro_batches == before.decision.micro_batches
    assert check(found.plan, PROFILE) == ()


def test_a_plan_whose_layers_are_divided_each_otherwise_is_not_cut_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    before = planned(PROFILE, fix=["*=replicas:3"])
    layers = dict(before.decision.layers)
    layers["l3"] = replace(layers["l3"], cuts={})  # every rank does all of it
    inputs = replace(before.inputs, request=replace(before.inputs.request, fix=()))
    mixed = replace(before, decision=replace(before.decision, layers=layers), inputs=inputs)

    def nothing(*given: object, **named: object) -> Plan:
        raise InfeasibleError("no plan found in time")

    monkeypatch.setattr(solve, "solve", nothing)
    with pytest.raises(InfeasibleError, match="no plan fits without n0/cpu1"):
        replan(mixed, PROFILE, {"n0/cpu1": 0.0})


def test_micro_batches_stay_unless_they_are_free() -> None:
    profile = made(1.0, 1.0, 1.0)
    asked = planned(profile, micro_batch=[1], schedules=["gpipe"])
    found = replan(asked, profile, {"n0/cpu0": 0.0, "n0/cpu1": 0.0})
    assert found.plan.decision.micro_batches == (1,) * 8
    found = replan(asked, profile, {"n0/cpu0": 0.0, "n0/cpu1": 0.0}, free=True)
    assert found.plan.inputs.request.micro_batch_sizes == ()
    assert found.plan.inputs.request.schedules == ("gpipe",)


def test_what_does_not_fit_says_why_with_both_numbers_and_what_to_do() -> None:
    profile = made(1.0, 1.0, 1.0, memory_bytes=3 * 2**20)
    plan = planned(profile)
    with pytest.raises(InfeasibleError, match="no plan fits without n0/cpu0, n0/cpu2") as caught:
        replan(plan, profile, {"n0/cpu0": 0.0, "n0/cpu2": 0.0})
    told = "\n".join(caught.value.details)
    assert "left: n0/cpu1" in told
    assert "needs 3.7 MiB" in told
    assert "usable 2.8 MiB" in told
    assert any("--resume" in remedy for remedy in caught.value.remedies)
    with pytest.raises(InfeasibleError, match="no device is left"):
        replan(plan, profile, {f"n0/cpu{rank}": 0.0 for rank in range(3)})


def test_rules_about_a_device_that_is_gone() -> None:
    forbidden = planned(PROFILE, forbid=["l0=device:n0/cpu1"])
    assert replan(forbidden, PROFILE, {"n0/cpu1": 0.0}).plan.inputs.request.forbid == ()
    fixed = planned(PROFILE, fix=["l0=device:n0/cpu1"])
    assert replan(fixed, PROFILE, {"n0/cpu0": 0.0}).plan.decision.stages
    with pytest.raises(InfeasibleError, match="the side constraint l0=device:n0/cpu1 needs a device that is gone"):
        replan(fixed, PROFILE, {"n0/cpu1": 0.0})
    with pytest.raises(UnknownNameError, match="no device 'n0/cpu7'"):
        replan(fixed, PROFILE, {"n0/cpu7": 0.0})


def told(
    speeds: HeardSpeeds, true: dict[str, float], steps: int, draw: random.Random, noise: float = 0.1
) -> dict[str, float]:
    """What comes of steps in which devices are so fast, as far as a launcher sees it; the first change that shows."""
    for _ in range(steps):
        for device, speed in true.items():
            expected_s = 1 / speeds.planned.get(device, 1.0)
            took_s = max(0.1, draw.gauss(1.0, noise)) / speed
            speeds.hear(device, took_s / expected_s)
        if speeds.changed():
            return speeds.changed()
    return {}


def test_noise_never_changes_a_plan_and_a_straggler_changes_it_once_nearly_as_well_as_can_be(plan: Plan) -> None:
    names = [device.name for device in PROFILE.cluster.devices]
    true = made(1.0, 1 / 1.5, 1.0)
    best_s = planned(true).prediction.step_s
    for seed in range(20):
        draw = random.Random(seed)
        speeds = HeardSpeeds()
        assert told(speeds, dict.fromkeys(names, 1.0), 300, draw) == {}
        slow = {names[0]: 1.0, names[1]: 1 / 1.5, names[2]: 1.0}
        changed = told(speeds, slow, 300, draw)
        assert list(changed) == [names[1]]
        speeds.plan_with(changed)
        assert told(speeds, slow, 300, draw) == {}, "once"
        if seed < 5:
            found = replan(plan, PROFILE, changed, free=True)
            assert best_s >= 0.95 * predict(true, found.plan.decision)[0].step_s
            assert is_worth(found.before_s, found.after_s, 10_000, 10.0)


def test_a_change_must_save_more_over_the_rest_of_the_job_than_it_costs() -> None:
    assert is_worth(1.0, 0.8, 100, 19.9)
    assert not is_worth(1.0, 0.8, 100, 20.1)
    assert not is_worth(1.0, 1 - 0.9 * LEAST_GAIN, 10**9, 0.0), "less than predictions are sure of"
    assert not is_worth(0.8, 1.0, 100, 0.0)


def test_a_plan_may_be_asked_for_without_a_device_before_one_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: Plan
) -> None:
    monkeypatch.chdir(tmp_path)
    dump(PROFILE, "profile.json")
    dump(plan, "plan.json")
    done = CliRunner().invoke(
        app, ["plan", "profile.json", "--without", "n0/cpu[12]", "--global-batch", "8", "-o", "one.json"]
    )
    assert done.exit_code == 0, done.stderr
    assert "machines  without n0/cpu1, n0/cpu2" in done.stdout
    found = load("one.json", Plan)
    assert found.inputs.request.speeds == {"n0/cpu1": 0.0, "n0/cpu2": 0.0}
    for verb in (["check", "one.json"], ["explain", "one.json"], ["check", "one.json", "--profile", "profile.json"]):
        done = CliRunner().invoke(app, verb)
        assert done.exit_code == 0, done.stderr
        assert "without --profile" not in done.stdout, "the profile of all devices is found, and is its own"
    asked = CliRunner().invoke(app, ["explain", "plan.json", "--what-if", "without=n0/cpu1+n0/cpu2"])
    assert asked.exit_code == 0, asked.stderr
    assert "slower" in asked.stdout
    refused = CliRunner().invoke(app, ["plan", "profile.json", "--without", "n0/gpu1"])
    assert (refused.exit_code, "no device 'n0/gpu1'" in refused.stderr) == (2, True)
    everything = CliRunner().invoke(app, ["plan", "profile.json", "--without", "*"])
    assert (everything.exit_code, "no device is left" in everything.stderr) == (4, True)
