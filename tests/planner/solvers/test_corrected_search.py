"""Under corrections, those of shared stages among them, searches still find the best plan and prove it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from planner.ir.errors import InfeasibleError
from planner.ir.problem import Problem
from planner.solvers import solver
from tests.planner.corrections import random_corrections
from tests.planner.solvers.instances import best_by_exhaustion, branching_problem, heavy_problem, random_problem
from tests.planner.solvers.test_bounds import pipelines

MAKERS = pytest.mark.parametrize(
    "make", [random_problem, branching_problem, heavy_problem], ids=["chains", "branches", "heavy"]
)


def corrected(problem: Problem, seed: int) -> Problem:
    corrections = random_corrections(random.Random(seed), problem.profile)
    return replace(problem, profile=problem.profile.corrected_by(corrections))


@MAKERS
@pytest.mark.parametrize("first", range(300, 304, 2))
def test_the_plan_is_the_best_of_all_plans(first: int, make: Callable[[int], Problem]) -> None:
    for seed in range(first, first + 2):
        problem = corrected(make(seed), seed)
        best, _ = best_by_exhaustion(problem)
        try:
            plan = solver("best-first")(problem, None)
        except InfeasibleError:
            assert best is None, seed
            continue
        assert best is not None, seed
        assert plan.search.status == "proven", seed
        assert plan.search.bound_s <= plan.prediction.step_s * (1 + 1e-9)
        assert plan.prediction.step_s == pytest.approx(best.step_s, rel=1e-9), seed


@MAKERS
@pytest.mark.parametrize("seed", range(320, 322))
def test_no_bound_lies_above_the_simulated_step(seed: int, make: Callable[[int], Problem]) -> None:
    for path, bound_s, step_s in pipelines(corrected(make(seed), seed)):
        assert max(*path, bound_s) <= step_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(340, 342))
def test_both_exact_searches_agree(seed: int) -> None:
    problem = corrected(random_problem(seed), seed)
    found = []
    for name in ("best-first", "span-ilp"):
        try:
            found.append(solver(name)(problem, None).prediction.step_s)
        except InfeasibleError:
            found.append(float("inf"))
    assert found[0] == pytest.approx(found[1], rel=1e-6)
