from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from planner.costs.cost_model import CostModel
from planner.ir.constraints import parse_rule
from planner.ir.errors import HalopipeError, InfeasibleError, MissingMeasurementError
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.schedules import names, traits
from planner.solvers.best_first.solver import solve
from planner.solvers.candidates.evaluate import Evaluator
from tests.oracles.plans import check
from tests.planner.solvers.instances import (
    best_by_exhaustion,
    random_problem,
    several_a_position,
    virtual_plans,
    with_branches,
)
from tests.sampling import some

NAMES = tuple(name for name in names() if traits(name).trains and traits(name).stages_per_position != 1)


@pytest.mark.parametrize("branches", [False, True], ids=["chains", "branches"])
@pytest.mark.parametrize("name", NAMES)
def test_the_plan_is_the_best_of_all_pipelines_of_the_schedule(name: str, branches: bool) -> None:
    num_infeasible = num_simulated = num_all = 0
    seeds = some(range(60), 4)
    for seed in seeds:
        problem = several_a_position(seed, name)
        problem = with_branches(problem, seed) if branches else problem
        best, num_plans = best_by_exhaustion(problem, virtual_plans)
        plan = plan_or_none(problem)
        assert (plan is None) == (best is None), seed
        num_infeasible += plan is None
        if plan is None or best is None:
            continue
        assert plan.search.status == "proven", seed
        assert plan.search.bound_s == pytest.approx(plan.prediction.step_s, rel=1e-8)
        assert plan.prediction.step_s == pytest.approx(best.step_s, rel=1e-9), seed
        assert check(plan, problem.profile) == (), seed
        num_simulated, num_all = num_simulated + plan.search.num_simulated, num_all + num_plans
    assert num_infeasible < len(seeds)
    assert num_simulated < num_all


def plan_or_none(problem: Problem) -> Plan | None:
    try:
        return solve(problem)
    except HalopipeError:
        return None


@pytest.mark.parametrize("name", NAMES)
def test_hosts_of_one_device_each_have_a_pipeline(name: str) -> None:
    plan = solve(Problem(chain_profile(6, 2, hosts=["a", "b"]), 8, (name,)))
    assert plan.search.status == "proven"
    assert plan.decision.used_ranks == (0, 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_pipeline_reaches_over_hosts_and_kinds_of_devices(name: str) -> None:
    hosts, speeds = ["a", "a", "b", "b"], (1.0, 1.0, 2.0, 2.0)
    profile = chain_profile(15, 4, hosts=hosts, speeds=speeds)
    plan = solve(Problem(profile, 8, (name,), gap=0.5))
    assert len(plan.decision.used_ranks) == 4
    assert plan.search.gap <= 0.5
    one_host = solve(Problem(profile, 8, (name,), gap=0.5, num_ranks=2))
    assert plan.prediction.step_s < one_host.prediction.step_s


def test_four_devices_on_two_hosts_are_faster_than_two_on_one() -> None:
    profile = chain_profile(15, 4, hosts=["a", "a", "b", "b"])
    assert solve(Problem(profile, 8, ("interleaved",), gap=0.2)).prediction.step_s <= 0.1080


def test_the_faster_devices_have_more_of_the_layers() -> None:
    plan = solve(Problem(chain_profile(8, 2, speeds=(1.0, 3.0)), 8, ("zb-v",), gap=0.05))
    layers = [0, 0]
    for number, stage in enumerate(plan.decision.stages):
        layers[stage.ranks[0]] += len(plan.decision.layers_of(number))
    assert layers[1] > layers[0]


def test_a_larger_cluster_has_pipelines_of_groups_of_one_size_over_all_hosts() -> None:
    hosts = [f"n{rank // 4}" for rank in range(16)]
    problem = Problem(chain_profile(12, 16, hosts=hosts), 16, ("interleaved",), micro_batch_sizes=(4,), gap=2.0)
    plan = solve(problem)
    assert len(plan.decision.used_ranks) > 4
    assert len({len(stage.ranks) for stage in plan.decision.stages}) == 1
    assert plan.search.status == "within gap"
    assert "interleaved: unequal groups of devices" in [rejected.what for rejected in plan.search.rejected]


def test_what_is_not_searched_is_named() -> None:
    plan = solve(Problem(chain_profile(4, 2), 4, ("greedy",), recompute="auto"))
    assert [rejected.what for rejected in plan.search.rejected if rejected.what.startswith("greedy")] == [
        "greedy: more than 4 stages a device",
        "greedy: other windows than its own",
        "greedy: recomputation of some stages",
    ]


def test_beside_a_schedule_of_one_stage_a_device_both_are_proven() -> None:
    profile = chain_profile(6, 2, parameter_bytes=10**7, bandwidth_bytes_per_s=1e9)
    both = solve(Problem(profile, 8, ("1f1b", "zb-v")))
    alone = [solve(Problem(profile, 8, (name,))) for name in ("1f1b", "zb-v")]
    assert both.search.status == "proven"
    assert both.prediction.step_s == pytest.approx(min(plan.prediction.step_s for plan in alone), rel=1e-9)


def test_memory_that_balanced_stages_lack_is_met_by_other_cuts() -> None:
    saved = (40_000, 1000, 1000, 1000, 1000, 1000)
    profile = chain_profile(6, 2, saved_bytes=saved, parameter_bytes=100, activation_bytes=100, memory_bytes=200_000)
    problem = Problem(profile, 4, ("interleaved",), memory_margin=0.0)
    best, _ = best_by_exhaustion(problem, virtual_plans)
    assert best is not None
    assert solve(problem).prediction.step_s == pytest.approx(best.step_s, rel=1e-9)


REASONS: Mapping[str, tuple[Problem, str]] = {
    "few layers": (
        Problem(chain_profile(1, 2), 4, ("zb-v",)),
        "zb-v: 4 stages are the fewest, and the network can be cut into 2",
    ),
    "few stages": (
        Problem(chain_profile(6, 2), 4, ("zb-v",), max_stages=3),
        "zb-v: 4 stages are the fewest, and at most 3 were asked for",
    ),
    "one device": (
        Problem(chain_profile(6, 1), 4, ("chimera",)),
        "chimera: every stage is on two devices, and 1 may be",
    ),
    "few samples": (
        Problem(chain_profile(6, 2), 1, ("chimera",)),
        "chimera: in micro-batches of 1 not every device of a stage has a sample",
    ),
    "memory": (
        Problem(chain_profile(6, 2, memory_bytes=20_000), 4, ("hanayo",)),
        "the leanest plan needs",
    ),
    "a rule": (
        Problem(chain_profile(6, 2), 4, ("greedy",), fix=(parse_rule("*=device:*/cpu0"),)),
        "no plan keeps to the side constraints",
    ),
}


@pytest.mark.every_case
@pytest.mark.parametrize("case", REASONS)
def test_an_error_says_what_really_lacks(case: str) -> None:
    problem, text = REASONS[case]
    with pytest.raises(InfeasibleError) as refused:
        solve(problem)
    assert text in str(refused.value)


def test_sizes_that_were_not_measured_are_the_reason_only_where_none_was() -> None:
    with pytest.raises(MissingMeasurementError, match="no micro-batch size that may be used was measured"):
        solve(Problem(chain_profile(6, 2, sizes=(4,)), 2, ("interleaved",)))


def test_a_plan_is_within_the_gap_only_if_it_is() -> None:
    statuses = set()
    for seed in some(range(80), 16):
        gap = (0.0, 0.0, 0.1, 1.0)[seed % 4]
        if seed % 2:
            problem = several_a_position(seed, NAMES[seed % len(NAMES)])
        else:
            problem = replace(random_problem(seed), allow=("sample", "spatial"))
        plan = plan_or_none(replace(problem, gap=gap))
        if plan is None:
            continue
        statuses.add(plan.search.status)
        assert check(plan, problem.profile) == (), seed
        assert is_true(plan, gap), (seed, plan.search)
    assert len(statuses) > 1


def is_true(plan: Plan, gap: float) -> bool:
    """Whether the status is what bound and gap say."""
    status, own = plan.search.status, plan.search.gap
    if status == "proven":
        return own <= 1e-8
    return 0 < own <= gap * (1 + 1e-8) if status == "within gap" else own > gap and status in ("searched", "time limit")


def test_no_bound_is_above_what_a_pipeline_takes() -> None:
    for seed in some(range(40), 6):
        problem = several_a_position(seed, NAMES[seed % len(NAMES)])
        evaluator = Evaluator(problem, CostModel(problem.profile))
        plan = plan_or_none(replace(problem, gap=10.0))
        if plan is None:
            continue
        steps = [evaluator.evaluate(candidate).step_s for candidate in virtual_plans(problem)]
        assert plan.search.bounds_s["suffix DP"] <= min(steps) * (1 + 1e-9), seed
