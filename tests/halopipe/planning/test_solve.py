from __future__ import annotations

import pytest

from benchmarks.chains import chain_profile
from halopipe.planning import problem as problems
from halopipe.planning import solve
from planner.ir.constraints import broken
from planner.ir.errors import InfeasibleError, UnknownNameError
from tests.planner.factories import chain_decision, plan_of

PROFILE = chain_profile(4, memory_bytes=2**30)
PLAN = plan_of(PROFILE, chain_decision(PROFILE, cuts=(2,)))


def test_the_limits_of_the_problem_are_those_of_the_plan() -> None:
    plan = solve.solve(problems.make_problem(PROFILE, memory_bytes=300_000_001), "one-device")
    assert {rank.memory_limit_bytes for rank in plan.prediction.ranks} == {300_000_001}
    prediction, _ = solve.predict_again(plan, PROFILE)
    assert prediction == plan.prediction


@pytest.mark.parametrize("rule", ["l2=stage:1", "*=replicas:1", "l0=device:n0/cpu1"])
def test_side_constraints_are_kept(rule: str) -> None:
    problem = problems.make_problem(PROFILE, fix=[rule])
    plan = solve.solve(problem)
    assert broken(problem.fix, (), plan.decision, PROFILE.cluster) == ()


def test_a_solver_that_knows_nothing_of_a_side_constraint_is_not_believed() -> None:
    problem = problems.make_problem(PROFILE, forbid=["*=replicas:1"])
    with pytest.raises(InfeasibleError, match="no plan of this strategy keeps to the side constraints"):
        solve.solve(problem, "one-device")
    assert "side constraints" in solve.solve_baselines(problem, ["one-device"]).infeasible["one-device"]


def test_an_unknown_solver_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="no solver 'one-devise'") as caught:
        solve.solve(problems.make_problem(PROFILE), "one-devise")
    assert caught.value.remedies == ("one-device (did you mean that?)",)


def test_baselines_that_do_not_fit_say_why() -> None:
    solved = solve.solve_baselines(problems.make_problem(PROFILE))
    assert {"one-device", "data-parallel", "even-split"} <= set(solved.plans)
    tight = problems.make_problem(chain_profile(4, parameter_bytes=2**20), memory_bytes=3 * 2**20)
    assert "no plan fits" in solve.solve_baselines(tight, ["one-device"]).infeasible["one-device"]


def test_some_baselines_can_be_asked_for_and_each_is_announced() -> None:
    shown: list[tuple[int, int, str]] = []
    problem = problems.make_problem(PROFILE)
    solved = solve.solve_baselines(problem, ["one-device", "even-split"], lambda *at: shown.append(at))
    assert list(solved.plans) == ["one-device", "even-split"]
    assert shown == [(0, 2, "one-device"), (1, 2, "even-split")]
    with pytest.raises(UnknownNameError, match="no baseline 'best-first'"):
        solve.solve_baselines(problem, ["best-first"])


def test_baselines_that_share_a_limit_have_a_part_of_it_each() -> None:
    solved = solve.solve_baselines(problems.make_problem(PROFILE), ["even-split", "one-device"], within_s=6.0)
    assert solved.limits_s["even-split"] <= 3.0
    assert solved.limits_s["one-device"] <= 6.0
