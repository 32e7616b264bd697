"""The bounds that the search over layouts rests on: never above a plan, and exact where nothing is left out."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks.chains import chain_profile
from planner.costs.cost_model import PriceBook
from planner.ir.problem import Problem
from planner.solvers.best_first.bound import least_work_s
from planner.solvers.best_first.layout_bound import Chains, TableMaker, links_of
from planner.solvers.budget import Budget
from planner.solvers.candidates.candidate import Candidate, micro_batches, pools
from planner.solvers.candidates.constraints import Constraints
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.candidates.feasibility import cut_positions
from planner.solvers.layouts.stage import WHOLE
from tests.planner.networks import plain, priced
from tests.planner.parts import with_parts
from tests.planner.solvers.laid_out_plans import EVERYTHING, random_candidate, random_network, with_random_parts


def made(problem: Problem, size: int) -> tuple[Evaluator, Chains]:
    evaluator = Evaluator(problem, PriceBook(problem.profile))
    maker = TableMaker(evaluator, Constraints.of(problem), size, WHOLE, Budget(60.0), 60.0)
    found = pools(problem)
    tables = {
        (number, count): maker.table(pool.ranks[:count])
        for number, pool in enumerate(found)
        for count in range(1, len(pool.ranks) + 1)
    }
    links = links_of(problem, size, WHOLE)
    return evaluator, Chains(found, tables, cut_positions(problem.profile.graph), links, maker.num_full, 0)


@pytest.mark.parametrize("seed", range(20))
def test_no_plan_takes_less_device_time_than_the_least_work(seed: int) -> None:
    draw = random.Random(seed)
    profile = random_network(draw)
    profile = with_random_parts(draw, profile) if seed % 2 else profile
    problem = Problem(profile, draw.choice([4, 6, 8]), allow=EVERYTHING)
    evaluator = Evaluator(problem, PriceBook(problem.profile))
    candidate = random_candidate(draw, evaluator)
    backward = "least" if candidate.schedule == "zb-h1" else WHOLE
    work_s = least_work_s(evaluator, max(candidate.micro_batches), backward).sum()
    assert evaluator.evaluate(candidate).step_s * len(problem.ranks) >= work_s * (1 - 1e-9)


def test_the_work_of_costs_in_proportion_to_samples_is_exact() -> None:
    profile = chain_profile(4, 1, forward_s=(1e-3, 2e-3, 1e-3, 3e-3))
    evaluator = Evaluator(Problem(profile, 8), PriceBook(profile))
    for size in (1, 2, 8):
        assert least_work_s(evaluator, size, WHOLE).sum() == pytest.approx(8 * 3 * 7e-3)
        assert least_work_s(evaluator, size, "none").sum() == pytest.approx(8 * 7e-3)


@pytest.mark.parametrize("latency_s", [0.0, 1e-5])
def test_of_one_micro_batch_on_single_ranks_only_updates_are_left_out(latency_s: float) -> None:
    profile = priced(*plain(samples=4, height=16), speeds=(1.0, 1.0), latency_s=latency_s, bandwidth_bytes_per_s=1e8)
    evaluator, chains = made(Problem(profile, 4, allow=EVERYTHING), 4)
    last, num_checked = len(profile.graph.layers), 0
    for chain in chains.best_first(lambda: math.inf):
        if [len(ranks) for _, _, ranks, _ in chain.stages] != [1, 1]:
            continue
        cut = chain.stages[0][1]
        candidate = Candidate.chain(
            (0, cut, last), ((0,), (1,)), ((4,), (4,)), micro_batches(evaluator.problem, 4), "gpipe"
        )
        step_s = evaluator.evaluate(candidate).step_s
        update_s = sum(cost.update_s for cost in profile.parameters["kind-1"].values())
        assert chain.bound_s <= step_s * (1 + 1e-9)
        assert chain.bound_s >= (step_s - update_s) * (1 - 1e-9) or cut == last - 1  # the loss reads in its own way
        num_checked += 1
    assert num_checked == last - 1


def test_chains_come_by_their_bounds_and_none_is_below_that_of_all() -> None:
    profile = priced(*plain(samples=4, height=32), speeds=(1.0,) * 3, latency_s=1e-6)
    _, chains = made(Problem(profile, 8, allow=EVERYTHING), 2)
    found = [chain.bound_s for chain in chains.best_first(lambda: math.inf)]
    assert len(found) > 20
    assert found == sorted(found)
    assert found[0] >= chains.bound_s()
    limit = found[len(found) // 2]
    assert [chain.bound_s for chain in chains.best_first(lambda: limit)] == [each for each in found if each < limit]


def test_parts_that_take_less_than_their_share_lower_the_least_work() -> None:
    profile = priced(*plain(samples=4, height=32), speeds=(1.0, 1.0))
    quick = with_parts(profile, (1, 2, 4), 2, lambda layer, samples, part: 0.25)
    least = [
        least_work_s(Evaluator(Problem(each, 4, allow=EVERYTHING), PriceBook(each)), 4, WHOLE)
        for each in (profile, quick)
    ]
    cut = [k for k, layer in enumerate(profile.graph.layers) if layer.kind == "conv"]
    assert (least[1][cut] < 0.3 * least[0][cut]).all()
