"""Plans whose layers have layouts of their own: the file, the quick evaluation and the checker agree."""

from __future__ import annotations

import random

import pytest

from planner.costs.cost_model import CostModel
from planner.ir.codec import dumps, loads
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.solvers.candidates.evaluate import Evaluator
from tests.oracles.plans import check
from tests.planner.solvers.laid_out_plans import (
    EVERYTHING,
    plan_of_candidate,
    random_candidate,
    random_network,
    with_random_parts,
)


@pytest.mark.parametrize("seed", range(40))
def test_evaluation_prediction_and_checker_agree(seed: int) -> None:
    draw = random.Random(seed)
    profile = random_network(draw)
    profile = with_random_parts(draw, profile) if seed % 3 == 0 else profile
    problem = Problem(profile, draw.choice([4, 6, 8]), allow=EVERYTHING, halo_depth=draw.choice([0, 2]))
    evaluator = Evaluator(problem, CostModel(problem.profile))
    for _ in range(2):
        candidate = random_candidate(draw, evaluator)
        found = evaluator.evaluate(candidate)
        plan = plan_of_candidate(evaluator, candidate)
        assert check(plan, problem.profile) == ()
        assert found.step_s == pytest.approx(plan.prediction.step_s, rel=1e-12)
        assert [m.peak_bytes for m in found.memories] == [rank.peak_bytes for rank in plan.prediction.ranks]
        assert dumps(loads(dumps(plan), Plan)) == dumps(plan)
