"""What may be asked of the exact search beside a short step: recomputation, side constraints, objectives, schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle

import pytest

from planner.costs.cost_model import CostModel
from planner.ir.constraints import broken, parse_rule
from planner.ir.errors import InfeasibleError, UsageError
from planner.ir.plan import Plan
from planner.ir.problem import Problem, Rule
from planner.ir.profile import Optimizer
from planner.schedules import names, traits
from planner.solvers import solver
from planner.solvers.best_first.solver import solve
from planner.solvers.candidates.candidate import decision_of
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.ilp.solver import solve as solve_by_ilp
from tests.oracles.plans import check
from tests.planner.solvers.best_first.test_solver import heavy
from tests.planner.solvers.instances import (
    attention_problem,
    best_by_exhaustion,
    branching_problem,
    plans,
    random_problem,
)
from tests.sampling import some

MAKERS = pytest.mark.parametrize("make", [random_problem, branching_problem], ids=["chains", "branches"])


def step_or_nothing(problem: Problem) -> float | None:
    try:
        return solve(problem).prediction.step_s
    except InfeasibleError:
        return None


@MAKERS
def test_with_recomputation_the_plan_is_the_best_of_all_plans(make: Callable[[int], Problem]) -> None:
    recomputed = 0
    for seed in some((700, 712, 729, 769, 785, 804, 811), 3):
        problem = replace(make(seed), recompute="auto")
        best, _ = best_by_exhaustion(problem)
        found = step_or_nothing(problem)
        assert (best is None) == (found is None), seed
        if best is not None:
            assert found == pytest.approx(best.step_s, rel=1e-9), seed
            recomputed += any(best.candidate.recompute)
    assert recomputed > 0


ATTENTION_SEEDS = (4, 234, 378, 16, 293, 206, 319, 352, 58, 6)


@pytest.mark.parametrize("recompute", ["auto", "selective"])
def test_with_attentions_core_computed_again_the_plan_is_the_best_of_all_plans(recompute: str) -> None:
    chosen = 0
    for seed in some(ATTENTION_SEEDS, 4):
        problem = replace(attention_problem(seed), recompute=recompute)
        best, _ = best_by_exhaustion(problem)
        plain = replace(problem, schedules=("gpipe", "1f1b"))
        for asked, solve_it in ((problem, solve), (plain, solve_by_ilp)):
            expected = best if asked is problem else best_by_exhaustion(plain)[0]
            try:
                plan = solve_it(asked)
            except InfeasibleError:
                assert expected is None, seed
                continue
            assert expected is not None
            assert plan.prediction.step_s == pytest.approx(expected.step_s, rel=1e-9), (seed, solve_it)
            assert not check(plan, asked.profile), seed
            chosen += any(stage.recomputed for stage in plan.decision.stages)
    assert chosen > 0


@MAKERS
def test_with_a_divided_optimiser_the_plan_is_the_best_of_all_plans(make: Callable[[int], Problem]) -> None:
    divided = 0
    for seed, zero in zip(some((0, 1, 3, 8, 11, 12, 13), 3), cycle((1, 2, 3)), strict=False):
        problem = replace(with_adam(make(seed)), shard="always", zero=zero)
        best, _ = best_by_exhaustion(problem)
        for solve_it in (solve, solve_by_ilp) if make is random_problem else (solve,):
            try:
                plan = solve_it(problem)
            except InfeasibleError:
                assert best is None, seed
                continue
            assert best is not None, seed
            assert plan.prediction.step_s == pytest.approx(best.step_s, rel=1e-9), seed
            assert all(stage.level == zero * (len(stage.ranks) > 1) for stage in plan.decision.stages)
            assert check(plan, problem.profile) == (), seed
            divided += any(stage.sharded for stage in plan.decision.stages)
    assert divided > 0


def test_the_optimiser_is_divided_where_nothing_else_fits() -> None:
    problem = replace(with_adam(heavy()), fix=(parse_rule("l*=replicas:2"),), shard="auto")
    whole, divided = (solver("best-first")(replace(problem, shard=way)) for way in ("never", "always"))
    assert peak_bytes(divided) < peak_bytes(whole)
    roomy = solver("best-first")(replace(problem, memory_bytes=peak_bytes(whole)))
    tight = solver("best-first")(replace(problem, memory_bytes=peak_bytes(divided)))
    assert not any(stage.sharded for stage in roomy.decision.stages)
    assert all(stage.sharded for stage in tight.decision.stages)


def with_adam(problem: Problem) -> Problem:
    return replace(problem, profile=replace(problem.profile, optimizer=Optimizer("Adam", {}, 2.0)))


RULES = ("l0=together", "l*=replicas:1", "l0=stage:0", "l1=stage:1", "l1=device:*/cpu0", "l1=kind:kind-1")


@pytest.mark.parametrize("fixed", [True, False], ids=["fix", "forbid"])
@pytest.mark.parametrize("text", RULES)
def test_side_constraints_leave_the_best_of_what_they_allow(text: str, fixed: bool) -> None:
    rule = parse_rule(text)
    for seed in (3, 5, 8, 11, 14):
        problem = replace(random_problem(seed), schedules=("1f1b",))
        asked = replace(problem, fix=(rule,)) if fixed else replace(problem, forbid=(rule,))
        best = best_that_keeps_to(problem, asked.fix, asked.forbid)
        found = step_or_nothing(asked)
        assert (best is None) == (found is None), seed
        if best is not None:
            assert found == pytest.approx(best, rel=1e-9), seed


def best_that_keeps_to(problem: Problem, fix: tuple[Rule, ...], forbid: tuple[Rule, ...]) -> float | None:
    evaluator = Evaluator(problem, CostModel(problem.profile))
    best = None
    for candidate in plans(problem):
        found = evaluator.evaluate(candidate)
        if found.fits and (best is None or found.step_s < best):
            decision = decision_of(problem, candidate)
            if not broken(fix, forbid, decision, problem.profile.cluster):
                best = found.step_s
    return best


def test_least_memory_is_less_than_that_of_the_fastest_plan_and_no_less_exists() -> None:
    problem = replace(heavy(), recompute="auto")
    fastest, leanest = solve(problem), solve(replace(problem, objective="memory"))
    held = peak_bytes(leanest)
    assert held < peak_bytes(fastest)
    assert leanest.prediction.step_s >= fastest.prediction.step_s
    assert "no plan holds less than" in leanest.search.binding[0]
    with pytest.raises(InfeasibleError):
        solve(replace(problem, memory_bytes=int(held * 0.99)))


def peak_bytes(plan: Plan) -> int:
    return max(rank.peak_bytes for rank in plan.prediction.ranks)


def test_latency_is_that_of_forward_passes() -> None:
    plan = solve(replace(heavy(), objective="latency"))
    assert plan.decision.schedule == "forward"
    assert not any("B" in action for row in plan.decision.program for action in row)
    assert plan.search.status == "proven"
    assert plan.prediction.step_s < solve(heavy()).prediction.step_s / 2
    with pytest.raises(UsageError, match="forward alone"):
        solve(replace(heavy(), objective="latency", schedules=("gpipe",)))


@pytest.mark.parametrize("name", names())
def test_every_schedule_can_be_asked_for(name: str) -> None:
    plan = solve(replace(heavy(), schedules=(name,)))
    assert plan.decision.schedule == name
    assert check(plan, heavy().profile) == ()
    if traits(name).stages_per_position == 1:
        assert plan.search.status == "proven"
    else:
        assert plan.search.bound_s <= plan.prediction.step_s


def test_several_stages_a_position_shorten_the_bubble() -> None:
    by_name = {name: solve(replace(heavy(), schedules=(name,))) for name in ("1f1b", "interleaved", "zb-v")}
    assert len(by_name["interleaved"].decision.stages) > 2
    assert by_name["zb-v"].prediction.step_s < by_name["1f1b"].prediction.step_s


def test_the_plan_remembers_what_was_asked() -> None:
    problem = replace(heavy(), max_stages=2, fix=(parse_rule("l0=stage:0"),), gap=0.1)
    assert Problem.of(problem.profile, 8, solve(problem).inputs.request) == replace(problem, time_limit_s=60.0)
