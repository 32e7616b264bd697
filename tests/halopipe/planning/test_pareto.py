from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from halopipe.planning import pareto, solve
from halopipe.planning import problem as problems
from planner.ir.errors import InfeasibleError
from planner.ir.plan import Plan
from planner.ir.problem import MEMORY, Problem
from tests.planner.factories import chain_decision, plan_of

PROFILE = chain_profile(6)
POINTS = ((1.0, 100), (2.0, 60), (2.0, 55), (3.0, 40), (5.0, 12), (6.0, 11))
"""(step, peak) of the plans that the solver below knows; (2.0, 60) is no better than (2.0, 55)."""


def made(step_s: float, peak: int, status: str = "proven") -> Plan:
    plan = plan_of(PROFILE, chain_decision(PROFILE, cuts=(3,)), step_s)
    ranks = tuple(replace(rank, peak_bytes=peak - number) for number, rank in enumerate(plan.prediction.ranks))
    return replace(
        plan,
        prediction=replace(plan.prediction, ranks=ranks),
        search=replace(plan.search, status=status, bound_s=step_s if status == "proven" else step_s / 2),
    )


class Solver:
    """Solves by looking at ``POINTS``; remembers what it was asked."""

    def __init__(self, status: str = "proven", heeds_objective: bool = True) -> None:
        self.status, self.heeds_objective = status, heeds_objective
        self.asked: list[tuple[int, str]] = []

    def __call__(self, problem: Problem, name: str = "", progress: object = None) -> Plan:
        self.asked.append((problem.memory_bytes, problem.objective))
        fitting = [point for point in POINTS if not problem.memory_bytes or point[1] <= problem.memory_bytes]
        if not fitting:
            raise InfeasibleError("no plan fits")
        if problem.objective == MEMORY and self.heeds_objective:
            return made(*min(fitting, key=lambda point: point[1]), self.status)
        return made(*min(fitting, key=lambda point: point[0]), self.status)


@pytest.fixture
def solver(monkeypatch: pytest.MonkeyPatch) -> Solver:
    found = Solver()
    monkeypatch.setattr(solve, "solve", found)
    return found


def found(front: pareto.Front) -> list[tuple[float, int]]:
    return [(plan.prediction.step_s, plan.prediction.peak_bytes) for plan in front.plans]


PROBLEM = problems.make_problem(PROFILE)


def test_the_whole_front_is_found_by_limits_just_below_each_peak(solver: Solver) -> None:
    front = pareto.front(PROBLEM)
    assert found(front) == [(1.0, 100), (2.0, 55), (3.0, 40), (5.0, 12), (6.0, 11)]
    assert front.complete
    assert [limit for limit, _ in solver.asked] == [0, 99, 59, 54, 39, 11, 10]


def test_a_limit_of_ones_own_is_kept(solver: Solver) -> None:
    assert found(pareto.front(replace(PROBLEM, memory_bytes=50))) == [(3.0, 40), (5.0, 12), (6.0, 11)]
    assert max(limit for limit, _ in solver.asked) == 50


def test_some_points_are_spread_over_the_memory(solver: Solver) -> None:
    front = pareto.front(PROBLEM, num_points=4)
    assert len(front.plans) == 4
    assert {(1.0, 100), (6.0, 11)} <= set(found(front))
    assert not front.complete


def test_more_points_than_there_are_end_with_the_whole_front(solver: Solver) -> None:
    front = pareto.front(PROBLEM, num_points=50)
    assert found(front) == [(1.0, 100), (2.0, 55), (3.0, 40), (5.0, 12), (6.0, 11)]
    assert front.complete


def test_a_solver_that_knows_no_objective_is_limited_in_strides(
    solver: Solver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solve, "solve", Solver(heeds_objective=False))
    front = pareto.front(PROBLEM, num_points=4)
    assert found(front)[0] == (1.0, 100)
    assert 2 <= len(front.plans) <= 4
    assert not front.complete


def test_without_proofs_the_front_is_not_called_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solve, "solve", Solver("time limit"))
    front = pareto.front(PROBLEM)
    assert not front.complete
    assert "or not all of it proven" in front.render()


def test_ctrl_c_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solve, "solve", Solver("stopped"))
    assert found(pareto.front(PROBLEM)) == [(1.0, 100)]


def test_nothing_that_fits_is_an_error(solver: Solver) -> None:
    with pytest.raises(InfeasibleError):
        pareto.front(replace(PROBLEM, memory_bytes=5))


def test_rows_frame_and_table_say_the_same(solver: Solver) -> None:
    front = pareto.front(PROBLEM)
    frame = front.frame()
    assert list(frame["peak_bytes"]) == [100, 55, 40, 12, 11]
    assert frame.loc[1, "slower"] == 0
    assert front.data()["points"][1]["step_s"] == 2.0
    assert front.render().splitlines()[0] == "Step against memory of the fullest rank (the whole front, proven)"


def test_on_a_real_search_less_memory_is_never_faster() -> None:
    profile = chain_profile(4, parameter_bytes=2**16, activation_bytes=2**18, sizes=(1, 2, 4))
    front = pareto.front(problems.make_problem(profile, global_batch=4))
    pairs = found(front)
    assert pairs == sorted(pairs)
    assert [peak for _, peak in pairs] == sorted((peak for _, peak in pairs), reverse=True)
    assert len(set(pairs)) == len(pairs)
    for plan in front.plans:
        assert plan.prediction.peak_bytes <= max(rank.memory_limit_bytes for rank in plan.prediction.ranks)
