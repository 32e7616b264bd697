"""The oracle and the planner agree about plans made under corrections, whatever these and the layouts are."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from planner.costs.cost_model import CostModel
from planner.ir.problem import Problem
from planner.solvers import solver
from planner.solvers.candidates.evaluate import Evaluator
from tests.oracles.plans import check
from tests.planner.corrections import random_corrections
from tests.planner.solvers.instances import random_problem
from tests.planner.solvers.laid_out_plans import EVERYTHING, plan_of_candidate, random_candidate, random_network


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_with_any_layouts_is_reckoned_the_same(seed: int) -> None:
    draw = random.Random(seed)
    profile = random_network(draw)
    profile = profile.corrected_by(random_corrections(draw, profile))
    problem = Problem(profile, 4, allow=EVERYTHING)
    evaluator = Evaluator(problem, CostModel(profile))
    plan = plan_of_candidate(evaluator, random_candidate(draw, evaluator))
    assert plan.inputs.corrections == profile.calibration.corrections
    assert check(plan, profile) == ()
    assert check(plan, profile.bare) == (), "the plan itself says under which corrections it was made"
    uncorrected = replace(plan, inputs=replace(plan.inputs, corrections=()))
    assert any("the predicted step is" in fault for fault in check(uncorrected, profile))


@pytest.mark.parametrize("seed", range(8))
def test_a_found_plan_is_reckoned_the_same(seed: int) -> None:
    problem = random_problem(seed)
    corrections = random_corrections(random.Random(seed), problem.profile)
    problem = replace(problem, profile=problem.profile.corrected_by(corrections))
    plan = solver("best-first")(problem, None)
    assert check(plan, problem.profile) == ()
