"""Pipelines of several stages a device: over hosts and kinds, beside other schedules, and what lacks for them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from benchmarks.chains import chain_profile
from planner.check.verdict import faults_of
from planner.costs.cost_model import CostModel
from planner.ir.constraints import parse_rule
from planner.ir.errors import InfeasibleError
from planner.ir.plan import SEVERAL_STAGES
from planner.ir.problem import Problem
from planner.schedules import chunked_names, names, traits
from planner.solvers.best_first.solver import solve
from planner.solvers.best_first.virtual_bound import Tables
from planner.solvers.best_first.virtual_pipelines import Family
from planner.solvers.best_first.warm_start import all_families
from planner.solvers.candidates.evaluate import Evaluator
from tests.planner.solvers.instances import random_problem, several_a_position

NAMES = tuple(name for name in names() if traits(name).trains and traits(name).stages_per_position != 1)


@pytest.mark.parametrize("name", NAMES)
def test_hosts_of_one_device_each_have_a_pipeline(name: str) -> None:
    plan = solve(Problem(chain_profile(6, 2, hosts=["a", "b"]), 8, schedules=(name,), confidence=0.0))
    assert plan.search.status == "proven"
    assert plan.decision.used_ranks == (0, 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_pipeline_reaches_over_hosts_and_kinds_of_devices(name: str) -> None:
    hosts = ["a", "a", "b", "b"]
    speeds = (1.0, 1.0, 2.0, 2.0)
    profile = chain_profile(15, 4, hosts=hosts, speeds=speeds)
    plan = solve(Problem(profile, 8, schedules=(name,), gap=0.5, confidence=0.0))
    assert len(plan.decision.used_ranks) == 4
    assert plan.search.gap <= 0.5
    one_host = solve(Problem(profile, 8, schedules=(name,), gap=0.5, num_ranks=2, confidence=0.0))
    assert plan.prediction.step_s < one_host.prediction.step_s


def test_the_faster_devices_have_more_of_the_layers() -> None:
    plan = solve(Problem(chain_profile(8, 2, speeds=(1.0, 3.0)), 8, schedules=("zb-v",), gap=0.05, confidence=0.0))
    layers = [0, 0]
    for number, stage in enumerate(plan.decision.stages):
        layers[stage.ranks[0]] += len(plan.decision.layers_of(number))
    assert layers[1] > layers[0]


def test_a_larger_cluster_has_pipelines_of_groups_of_one_size_over_all_hosts() -> None:
    hosts = [f"n{rank // 4}" for rank in range(16)]
    problem = Problem(
        chain_profile(12, 16, hosts=hosts),
        16,
        schedules=("interleaved",),
        micro_batch_sizes=(4,),
        gap=2.0,
        confidence=0.0,
    )
    plan = solve(problem)
    assert len(plan.decision.used_ranks) > 4
    assert len({len(stage.ranks) for stage in plan.decision.stages}) == 1
    assert plan.search.status == "within gap"
    assert "interleaved: unequal groups of devices" in [rejected.what for rejected in plan.search.rejected]


def test_what_is_not_searched_is_named() -> None:
    plan = solve(Problem(chain_profile(4, 2), 4, schedules=("greedy",), recompute="auto", confidence=0.0))
    assert [rejected.what for rejected in plan.search.rejected if rejected.what.startswith("greedy")] == [
        "greedy: more than 4 stages a device",
        "greedy: other windows than its own",
        "greedy: recomputation of some stages",
    ]


def test_beside_a_schedule_of_one_stage_a_device_both_are_proven() -> None:
    profile = chain_profile(6, 2, parameter_bytes=10**7, bandwidth_bytes_per_s=1e9)
    both = solve(Problem(profile, 8, schedules=("1f1b", "zb-v"), confidence=0.0))
    alone = [solve(Problem(profile, 8, schedules=(name,), confidence=0.0)) for name in ("1f1b", "zb-v")]
    assert both.search.status == "proven"
    assert both.prediction.step_s == pytest.approx(min(plan.prediction.step_s for plan in alone), rel=1e-9)


@pytest.mark.parametrize(("num_layers", "devices"), [(24, 2), (24, 4), (6, 2)])
def test_where_no_schedule_is_named_they_are_looked_at_after_the_others(num_layers: int, devices: int) -> None:
    draw = random.Random(num_layers)
    profile = chain_profile(
        num_layers,
        devices,
        forward_s=[draw.uniform(1e-3, 4e-3) for _ in range(num_layers)],
        backward_s=[draw.uniform(2e-3, 8e-3) for _ in range(num_layers)],
        parameter_bytes=1 << 25,
        activation_bytes=1 << 16,
        memory_bytes=1 << 34,
        latency_s=1e-5,
    )
    alone, beside = (solve(Problem(profile, 8, chunks=chunks, confidence=0.0)) for chunks in ("never", "auto"))
    named = solve(Problem(profile, 8, schedules=chunked_names(), time_limit_s=0.5, confidence=0.0))
    assert beside.prediction.step_s <= alone.prediction.step_s
    assert beside.search.status == "proven"
    assert (beside.decision.schedule in chunked_names()) is (num_layers > 6)
    assert beside.search.bound_s <= named.prediction.step_s
    assert faults_of(beside, profile) == ()
    is_left_out = any(rejected.what == SEVERAL_STAGES for rejected in beside.search.rejected)
    assert is_left_out or beside.prediction.step_s <= named.prediction.step_s * (1 + 1e-9)
    rejected = faults_of(replace(beside, inputs=alone.inputs), profile)
    assert bool(rejected) is (num_layers > 6)  # nobody asked for such a schedule


def families_of(problem: Problem) -> tuple[Evaluator, list[Family]]:
    evaluator = Evaluator(problem, CostModel(problem.profile))
    return evaluator, [family for each in all_families(evaluator) for family in each.members()]


@pytest.mark.cases(20)
@pytest.mark.parametrize("seed", range(20 * len(NAMES)))
def test_no_pipeline_is_faster_than_the_bounds_of_its_family_its_first_stages_and_its_order(seed: int) -> None:
    draw = random.Random(seed)
    evaluator, families = families_of(several_a_position(seed, NAMES[seed % len(NAMES)]))
    for family in draw.sample(families, min(6, len(families))):
        tables = family.tables(float("inf"))
        if tables.bound_s == float("inf"):  # no such stages
            continue
        cuts = np.zeros((1, 1), dtype=np.int64)
        for _ in family.where:
            longer, bounds = tables.grown(cuts, float("inf"))
            if not len(longer):
                break
            number = draw.randrange(len(longer))
            cuts = longer[number : number + 1]
            best_s = least_of(evaluator, family, longer[number].tolist())
            assert bounds[number] <= best_s * (1 + 1e-9)
            assert tables.bound_s <= best_s * (1 + 1e-9)


def least_of(evaluator: Evaluator, family: Family, begun: list[int]) -> float:
    """The fastest pipeline of a family with these first cuts, by simulation of all."""
    last = family.stage_prices.prices.cuts.last
    missing = len(family.where) + 1 - len(begun)
    best_s = float("inf")
    for rest in combinations(range(begun[-1] + 1, last), missing - 1) if missing else ((),):
        cuts = (*begun, *rest, last) if missing else tuple(begun)
        if cuts[-1] == last and family.stage_prices.prices.cuts.inside[list(cuts[:-1]), list(cuts[1:])].all():
            candidate = family.candidate(cuts)
            tried = None if evaluator.unmet(candidate) else evaluator.tried(candidate)
            if tried is not None and tried.fits:
                best_s = min(best_s, tried.step_s)
    return best_s


@pytest.mark.parametrize("name", [name for name in NAMES if not traits(name).timed])
def test_where_messages_take_no_time_a_pipeline_takes_what_its_order_says(name: str) -> None:
    draw = random.Random(1)
    forward_s = [draw.uniform(1e-3, 4e-3) for _ in range(9)]
    problem = Problem(
        chain_profile(9, 4, forward_s=forward_s, bandwidth_bytes_per_s=1e15, accumulate_s=1e-4),
        8,
        schedules=(name,),
        micro_batch_sizes=(1, 2),
        confidence=0.0,
    )
    evaluator, families = families_of(problem)
    alike = [family for family in families if len({group.counts for group in family.groups}) == 1]
    for family in draw.sample(alike, min(6, len(alike))):
        cuts = family.tables(float("inf")).promising(float("inf"))[0]
        tables = Tables.of(family.stage_prices, family.groups, family.where, name)
        simulated = evaluator.tried(family.candidate(cuts.tolist()))
        assert simulated is not None
        assert tables.order is not None
        assert tables.order.steps_s(tables.seconds(cuts[None, :]))[0] == pytest.approx(simulated.step_s, rel=1e-3)


@pytest.mark.parametrize("seed", range(12))
def test_none_is_left_out_where_they_were_all_looked_at(seed: int) -> None:
    problem = replace(random_problem(seed), schedules=(), chunks="auto")
    try:
        plan = solve(problem)
    except InfeasibleError:
        return
    alone = solve(replace(problem, chunks="never"))
    assert plan.prediction.step_s <= alone.prediction.step_s * (1 + 1e-9)
    assert alone.search.status == "proven"
    if any(rejected.what == SEVERAL_STAGES for rejected in plan.search.rejected):
        return
    with suppress(InfeasibleError):
        named = solve(replace(problem, schedules=chunked_names()))
        assert plan.prediction.step_s <= named.prediction.step_s * (1 + 1e-9)
        assert plan.search.status == "proven"


REASONS: Mapping[str, tuple[Problem, str]] = {
    "few layers": (
        Problem(chain_profile(1, 2), 4, schedules=("zb-v",), confidence=0.0),
        "zb-v: 4 stages are the fewest, and the network can be cut into 2",
    ),
    "few stages": (
        Problem(chain_profile(6, 2), 4, schedules=("zb-v",), max_stages=3, confidence=0.0),
        "zb-v: 4 stages are the fewest, and at most 3 were asked for",
    ),
    "one device": (
        Problem(chain_profile(6, 1), 4, schedules=("chimera",), confidence=0.0),
        "chimera: every stage is on two devices, and 1 may be",
    ),
    "few samples": (
        Problem(chain_profile(6, 2), 1, schedules=("chimera",), confidence=0.0),
        "chimera: in micro-batches of 1 not every device of a stage has a sample",
    ),
    "memory": (
        Problem(chain_profile(6, 2, memory_bytes=20_000), 4, schedules=("hanayo",), confidence=0.0),
        "the leanest plan needs",
    ),
    "a rule": (
        Problem(chain_profile(6, 2), 4, schedules=("greedy",), fix=(parse_rule("*=device:*/cpu0"),), confidence=0.0),
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
