from __future__ import annotations

import pytest

from planner.check import check
from planner.ir.errors import HalopipeError
from planner.solvers.best_first.solver import solve
from tests.planner.solvers.instances import best_by_exhaustion, several_a_position, virtual_plans
from tests.sampling import some

NAMES = ("interleaved", "zb-v", "hanayo", "chimera", "greedy")


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_of_a_schedule_for_several_stages_a_position_is_the_best_of_all(name: str) -> None:
    num_infeasible = num_saved = 0
    seeds = some(range(60), 4)
    for seed in seeds:
        problem = several_a_position(seed, name)
        best, num_plans = best_by_exhaustion(problem, virtual_plans)
        try:
            plan = solve(problem)
        except HalopipeError:
            plan = None
        if plan is None:
            assert best is None, seed
            num_infeasible += 1
            continue
        assert best is not None, seed
        assert plan.search.status == "proven", seed
        assert plan.search.bound_s == pytest.approx(plan.prediction.step_s, rel=1e-8)
        assert plan.prediction.step_s == pytest.approx(best.step_s, rel=1e-9), seed
        assert check(plan, problem.profile) == (), seed
        num_saved += plan.search.num_simulated < num_plans
    assert num_infeasible < len(seeds)
