"""Plans near a known one, a few of its stages solved again: never worse, allowed, and often the best there is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.scale import scale_profile
from planner.costs.cost_model import CostModel
from planner.ir.problem import Problem
from planner.solvers import everyday
from planner.solvers.best_first.graph_cuts import cuts_of
from planner.solvers.best_first.repair import Repair
from planner.solvers.best_first.warm_start import priced
from planner.solvers.budget import Budget
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from tests.planner.solvers.instances import best_by_exhaustion, random_problem
from tests.sampling import some


def repair_of(evaluator: Evaluator) -> Repair:
    """Over every way to cut the batch."""
    return Repair(evaluator, list(priced(evaluator, cuts_of(evaluator.cost_model))))


def start_of(problem: Problem) -> tuple[Evaluator, Evaluation] | None:
    """A plan on one device, if one fits there."""
    evaluator = Evaluator(problem, CostModel(problem.profile))
    plans = [evaluator.evaluate(candidate) for candidate in everyday.one_device(problem, evaluator.cost_model)]
    fitting = [plan for plan in plans if plan.fits]
    return (evaluator, min(fitting, key=lambda plan: plan.step_s)) if fitting else None


def uneven(kinds: int = 1) -> tuple[Evaluator, Evaluation]:
    """Four stages of two devices of which the last has nearly all layers."""
    problem = Problem(scale_profile(20, 8, kinds), 64, schedules=("1f1b",))
    evaluator = Evaluator(problem, CostModel(problem.profile))
    (even,) = (one for one in everyday.even_split(problem, evaluator.cost_model) if one.micro_batches[0] == 8)
    groups = tuple(tuple(range(first, first + 2)) for first in range(0, 8, 2))
    stage_of = tuple(min(layer // 2, 3) for layer in range(len(problem.profile.graph.layers)))
    candidate = replace(even, stage_of=stage_of, groups=groups, shares=((4,) * 2,) * 4, schedule="1f1b", windows=())
    return evaluator, evaluator.evaluate(candidate)


def test_plans_near_one_on_one_device_are_allowed_and_often_the_best_there_are() -> None:
    num_problems = num_best = 0
    for seed in some(range(60), 20):
        problem = random_problem(seed)
        best, _ = best_by_exhaustion(problem)
        if best is None or (start := start_of(problem)) is None:
            continue
        plan = repair_of(start[0]).improved(start[1], Budget(1e6).part())
        assert not start[0].unmet(plan.candidate), seed
        assert plan.fits, seed
        assert best.step_s * (1 - 1e-9) <= plan.step_s <= start[1].step_s, seed
        again = Evaluator(problem, CostModel(problem.profile)).evaluate(plan.candidate)
        assert again.step_s == pytest.approx(plan.step_s, rel=1e-12), seed
        num_problems += 1
        num_best += plan.step_s <= best.step_s * (1 + 1e-9)
    assert num_best >= 0.3 * num_problems


@pytest.mark.parametrize("kinds", [1, 2])
def test_stages_of_unlike_work_are_made_alike(kinds: int) -> None:
    evaluator, start = uneven(kinds)
    plan = repair_of(evaluator).improved(start, Budget(1e6).part())
    assert plan.fits
    assert plan.step_s < 0.5 * start.step_s


def test_nothing_is_looked_at_twice_and_nothing_without_time() -> None:
    evaluator, start = uneven()
    repair = repair_of(evaluator)
    assert repair.improved(start, Budget(0.0).part(0.0)) is start
    plan = repair.improved(start, Budget(1e6).part())
    num_simulated = evaluator.num_simulated
    assert repair.improved(plan, Budget(1e6).part()) is plan
    assert evaluator.num_simulated == num_simulated


def test_the_same_work_leads_to_the_same_plan() -> None:
    plans = []
    for _ in range(2):
        evaluator, start = uneven(2)
        plans.append(repair_of(evaluator).improved(start, evaluator.budget.part(0.3)).candidate)
    assert plans[0] == plans[1]
