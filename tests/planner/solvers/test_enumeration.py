"""No proof is beaten by any plan of a small problem, and no problem is refused that has one.

Every cut, sequence of groups, share of every rank, micro-batch, schedule, window and recomputation is enumerated, on
devices that are alike as on others.
"""

from __future__ import annotations

import random

import pytest

from benchmarks.chains import chain_profile
from planner.costs.cost_model import CostModel
from planner.costs.predict import forecast
from planner.costs.pricing import Pricing
from planner.ir.errors import InfeasibleError
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.solvers import solver
from planner.solvers.candidates.candidate import decision_of
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from tests.planner.solvers.instances import plans, uneven_problem
from tests.sampling import some

ROUNDING = 1e-9


def best_of_all(problem: Problem, seed: int) -> Evaluation | None:
    """The fastest plan that fits; what the fast evaluation says of it, and of some others, is what a forecast says."""
    cost_model = CostModel(problem.profile)
    evaluator = Evaluator(problem, cost_model)
    fitting = [each for each in map(evaluator.evaluate, plans(problem, every_share=True)) if each.fits]
    best = min(fitting, key=lambda each: each.step_s, default=None)
    for each in random.Random(seed).sample(fitting, min(3, len(fitting))) + [best] * (best is not None):
        public = forecast(
            Pricing(cost_model), decision_of(problem, each.candidate), problem.memory_margin, num_draws=0
        ).prediction
        assert public.step_s == pytest.approx(each.step_s, rel=1e-12)
        assert all(rank.peak_bytes <= rank.memory_limit_bytes for rank in public.ranks)
    return best


def plan_or_none(problem: Problem) -> Plan | None:
    try:
        return solver("best-first")(problem, None)
    except InfeasibleError:
        return None


@pytest.mark.parametrize("first", range(0, 2000, 50))
def test_no_proof_is_beaten_and_no_problem_is_refused_that_has_a_plan(first: int) -> None:
    for seed in some(range(first, first + 50), 1):
        problem = uneven_problem(seed)
        plan, best = plan_or_none(problem), best_of_all(problem, seed)
        assert (plan is None) == (best is None), seed
        if plan is None or best is None:
            continue
        assert plan.search.bound_s <= best.step_s * (1 + ROUNDING), seed
        assert plan.search.status == "proven", seed
        assert plan.prediction.step_s <= best.step_s * (1 + ROUNDING), seed


def test_the_random_problems_have_plans_of_unequal_shares_as_their_best() -> None:
    best = [best_of_all(uneven_problem(seed), seed) for seed in (12, 16, 30)]
    unequal = [any(len(set(shares)) > 1 for shares in each.candidate.shares) for each in best if each is not None]
    assert any(unequal)


def test_unlike_devices_share_by_measured_times_and_not_by_rounded_speed() -> None:
    profile = chain_profile(2, 2, speeds=[1.0, 1.6], parameter_bytes=400, bandwidth_bytes_per_s=1e7, sizes=(1, 2, 4, 8))
    plan = solver("best-first")(Problem(profile, 4), None)
    assert plan.search.status == "proven"
    assert plan.decision.layout_of(0).samples(4) == (1, 3)
    assert plan.prediction.step_s == pytest.approx(11.3524e-3)
