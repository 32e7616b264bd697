"""First answers: as asked for, no worse than what a person writes down, and never worse on more devices."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from benchmarks.scale import BY_HAND_S, scale_profile
from planner.costs.cost_model import CostModel
from planner.ir.cluster import ACROSS_HOSTS, WITHIN_HOST, Cluster, DeviceSpec, Link
from planner.ir.problem import Problem
from planner.ir.profile import Optimizer, Profile
from planner.solvers import solver
from planner.solvers.best_first.first_answers import FirstAnswers, most_promising, pipelines_on
from planner.solvers.best_first.graph_cuts import cuts_of
from planner.solvers.best_first.like_stages import LikeStages
from planner.solvers.best_first.priced_groups import Freedom, GroupPrices
from planner.solvers.budget import Budget, under
from planner.solvers.candidates.candidate import micro_batches, pools
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.candidates.feasibility import micro_batch_sizes

WORK_S = 0.5
"""What each search may do; some do not end within it."""


def on_hosts(profile: Profile, kinds: list[str], each: int) -> Profile:
    """The profile on other devices of its kinds, ``each`` a host."""
    devices = tuple(
        DeviceSpec(f"n{number // each}/gpu{number % each}", kind, f"n{number // each}", 16 * 2**30, core_share=0.0)
        for number, kind in enumerate(kinds)
    )
    links = {WITHIN_HOST: Link(1e-5, 100e9)}
    if len(kinds) > each:
        links[ACROSS_HOSTS] = Link(2e-5, 12e9)
    return replace(profile, cluster=Cluster(devices, links))


def a_network(num_layers: int, draw: random.Random) -> Profile:
    """As uneven as networks are, on kinds of speed 1 and 0.55."""
    forward_s = [draw.uniform(2e-5, 2e-4) * draw.choice([1, 1, 1, 2]) * 50 / num_layers for _ in range(num_layers)]
    return chain_profile(
        num_layers,
        2,
        forward_s=forward_s,
        parameter_bytes=[4 * int(draw.uniform(1e6, 1e7) * 50 / num_layers) for _ in range(num_layers)],
        activation_bytes=[4 * int(draw.uniform(2e5, 1e6)) for _ in range(num_layers)],
        saved_bytes=[int(draw.uniform(1e6, 8e6) * 50 / num_layers) * 4 for _ in range(num_layers)],
        update_s=1e-4 * 50 / num_layers,
        speeds=[1.0, 0.55],
        memory_bytes=16 * 2**30,
        sizes=(1, 2, 4, 8, 16, 32),
    )


def answers_of(problem: Problem) -> list[Evaluation]:
    evaluator = Evaluator(problem, CostModel(problem.profile))
    freedom = Freedom.of(problem)
    cost_model = evaluator.cost_model
    spaces = [
        GroupPrices(problem, cost_model, pools(problem), cuts_of(cost_model), micro_batches(problem, size), freedom)
        for size in micro_batch_sizes(problem, cost_model)
    ]
    answers = FirstAnswers(evaluator, [LikeStages(prices, evaluator.budget) for prices in spaces])
    return [*answers.soon(), *answers.others()]


def test_fifty_layers_on_sixty_four_devices_start_from_no_worse_a_plan_than_anybody_would_write_down() -> None:
    problem = Problem(scale_profile(50, 64), global_batch=1024, time_limit_s=600, confidence=0.0)
    assert min(found.step_s for found in answers_of(problem)) <= BY_HAND_S


@pytest.mark.parametrize(
    "asked", [{"schedules": ("gpipe",)}, {"max_stages": 2}, {"recompute": "always"}, {"num_ranks": 5}, {"allow": ()}]
)
def test_first_answers_are_what_was_asked_for(asked: dict[str, object]) -> None:
    profile = on_hosts(a_network(12, random.Random(2)), ["kind-1"] * 4 + ["kind-0.55"] * 4, 4)
    problem = replace(Problem(profile, global_batch=16, confidence=0.0), **asked)  # type: ignore[arg-type]  # fields by name
    evaluator = Evaluator(problem, CostModel(profile))
    found = answers_of(problem)
    assert found
    for one in found:
        assert not evaluator.unmet(one.candidate)
        assert one.fits
        assert evaluator.evaluate(one.candidate).step_s == pytest.approx(one.step_s)


@pytest.mark.parametrize("memory_mib", [60, 66, 72, 80])
def test_where_memory_is_too_small_for_the_most_promising_ones_others_are_looked_at(memory_mib: int) -> None:
    """One stage keeps 128 MiB and a MiB for each sample and layer; pipelines of few, large micro-batches do not fit."""
    profile = chain_profile(
        32,
        16,
        parameter_bytes=2**20,
        saved_bytes=2**20,
        activation_bytes=1024,
        memory_bytes=memory_mib * 2**20,
        optimizer=Optimizer("Adam", {}, 2.0),
        sizes=(1, 2, 4, 8, 16),
        hosts=[f"n{device // 8}" for device in range(16)],
    )
    found = answers_of(Problem(profile, global_batch=64, confidence=0.0, memory_margin=0.0))
    assert found
    assert all(one.fits for one in found)


@pytest.mark.parametrize("seed", range(100))
def test_more_devices_are_never_worse(seed: int) -> None:
    """On random clusters, for equal work of the search: hosts of any size, one kind or two."""
    draw = random.Random(seed)
    each = draw.choice([2, 3, 4])
    num_hosts = draw.randint(2, 3)
    kinds = ["kind-1"] * (each * num_hosts)
    if draw.random() < 0.5:
        kinds[each * draw.randint(1, num_hosts - 1) :] = ["kind-0.55"] * len(kinds)
    profile = on_hosts(a_network(draw.randint(3, 8), draw), kinds[: each * num_hosts], each)
    problem = Problem(profile, global_batch=draw.choice([8, 16, 24]), time_limit_s=WORK_S, confidence=0.0)
    steps = []
    for count in (draw.choice([1, 2, each]), len(profile.cluster.devices)):
        with under(Budget(3600.0)):  # work is counted, and no clock ends the search
            plan = solver("best-first")(replace(problem, num_ranks=count), None)
        steps.append(plan.prediction.step_s)
    assert steps[1] <= steps[0] * (1 + 1e-9)


def test_prices_and_replays_are_counted_where_they_are_made() -> None:
    problem = Problem(scale_profile(12, 16, 2), 64, confidence=0.0)
    whole = Budget(60.0)
    evaluator = Evaluator(problem, CostModel(problem.profile), within=whole)
    freedom = Freedom.of(problem)
    of_devices = pools(problem)
    cuts = cuts_of(evaluator.cost_model)
    with under(whole):
        prices = GroupPrices(problem, evaluator.cost_model, of_devices, cuts, micro_batches(problem, 8), freedom)
        space = LikeStages(prices, whole)
        priced_s = whole.work_s
        pipelines = [*pipelines_on(space, ((4, 0), (0, 4)))]
        before_s = whole.work_s
        assert len(most_promising(pipelines, whole)) == len(pipelines)
    assert priced_s > 0.0  # all layers on two kinds, at all numbers of samples
    assert whole.work_s > before_s
