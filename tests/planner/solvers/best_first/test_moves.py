"""Plans near a known one: of the same devices, never worse, allowed, and often the best there is."""

from __future__ import annotations

import pytest

from planner.costs.cost_model import CostModel
from planner.ir.problem import Problem
from planner.solvers import everyday
from planner.solvers.best_first.graph_cuts import cuts_of
from planner.solvers.best_first.moves import LocalSearch
from planner.solvers.budget import Budget
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from tests.planner.solvers.instances import best_by_exhaustion, random_problem
from tests.sampling import some


def start_of(problem: Problem) -> tuple[Evaluator, Evaluation] | None:
    """A plan on one device, if one fits there."""
    evaluator = Evaluator(problem, CostModel(problem.profile))
    plans = [evaluator.evaluate(candidate) for candidate in everyday.one_device(problem, evaluator.cost_model)]
    fitting = [plan for plan in plans if plan.fits]
    return (evaluator, min(fitting, key=lambda plan: plan.step_s)) if fitting else None


def improved(evaluator: Evaluator, start: Evaluation) -> Evaluation:
    """What moves from ``start`` lead to."""
    return LocalSearch(evaluator, cuts_of(evaluator.cost_model)).improved(start, Budget(1e6).part())


def test_plans_near_one_on_one_device_are_allowed_and_often_the_best_there_are() -> None:
    num_problems = num_best = 0
    for seed in some(range(60), 20):
        problem = random_problem(seed)
        best, _ = best_by_exhaustion(problem)
        if best is None or (start := start_of(problem)) is None:
            continue
        plan = improved(*start)
        assert not start[0].unmet(plan.candidate), seed
        assert plan.fits, seed
        assert best.step_s * (1 - 1e-9) <= plan.step_s <= start[1].step_s, seed
        again = Evaluator(problem, CostModel(problem.profile)).evaluate(plan.candidate)
        assert again.step_s == pytest.approx(plan.step_s, rel=1e-12), seed
        num_problems += 1
        num_best += plan.step_s <= best.step_s * (1 + 1e-9)
    assert num_best >= 0.4 * num_problems


def test_nothing_is_looked_at_twice_and_nothing_without_time() -> None:
    evaluator, start = start_of(random_problem(11)) or pytest.fail("it has a plan on one device")
    moves = LocalSearch(evaluator, cuts_of(evaluator.cost_model))
    assert moves.improved(start, Budget(0.0).part(0.0)) is start
    plan = moves.improved(start, Budget(1e6).part())
    num_simulated = evaluator.num_simulated
    assert moves.improved(plan, Budget(1e6).part()) is plan
    assert evaluator.num_simulated == num_simulated
