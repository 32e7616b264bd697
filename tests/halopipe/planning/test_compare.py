"""Plans beside one another: what they decide otherwise, which is better, and a front of step against memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from halopipe.planning import pareto, solve
from halopipe.planning import problem as problems
from halopipe.planning.compare import Comparison, differences, proof_text, tie_text
from halopipe.planning.solve import Baselines
from planner.ir.errors import InfeasibleError
from planner.ir.plan import Decision, Measured, Plan, Search, Tie
from planner.ir.problem import MEMORY, Problem
from tests.planner.factories import chain_decision, plan_of

PROFILE = chain_profile(6)
REFERENCE = chain_decision(PROFILE, cuts=(3,))
OTHER_MODEL = chain_decision(chain_profile(7), cuts=(3,))
REPLICAS = chain_decision(PROFILE, micro_batches=(4,), ranks=((0, 1),), shares=((2, 2),))
GPIPE = chain_decision(PROFILE, cuts=(3,), micro_batches=(1, 1, 1, 1), schedule="gpipe")


def reordered(decision: Decision) -> Decision:
    first, *rest = decision.program
    return replace(decision, program=((*first[:-2], *reversed(first[-2:])), *rest))


def cut_by_height(decision: Decision) -> Decision:
    cut = {**decision.layers, "l2": replace(decision.layers["l2"], cuts={"height": (0, 5, 8)})}
    return replace(decision, layers=cut)


def divided(zero: int) -> Decision:
    stages = tuple(replace(stage, sharded=zero > 0, zero=max(1, zero)) for stage in REFERENCE.stages)
    return replace(REFERENCE, stages=stages)


def recomputed(decision: Decision) -> Decision:
    first, *rest = decision.stages
    return replace(decision, stages=(replace(first, recompute=True), *rest))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("one", "other", "lines"),
    [
        (REFERENCE, chain_decision(PROFILE, cuts=(3,)), ()),
        (REFERENCE, chain_decision(PROFILE, cuts=(5,)), ("2 layers l3 ... l4: on n0/cpu0 instead of n0/cpu1",)),
        (  # by devices, not by number
            REFERENCE,
            chain_decision(PROFILE, cuts=(3,), ranks=((1,), (0,))),
            (
                "3 layers l0 ... l2: on n0/cpu1 instead of n0/cpu0",
                "4 layers l3 ... loss: on n0/cpu0 instead of n0/cpu1",
            ),
        ),
        (
            REFERENCE,
            chain_decision(PROFILE, micro_batches=(4,), ranks=((0, 1),), shares=((3, 1),), schedule="gpipe"),
            (
                "schedule: gpipe instead of 1f1b",
                "micro-batches: 1 micro-batch of 4 instead of 2 micro-batches of 2",
                "stages: 1 instead of 2",
                "3 layers l0 ... l2: on n0/cpu0 and n0/cpu1 (samples 3:1) instead of n0/cpu0",
                "4 layers l3 ... loss: on n0/cpu0 and n0/cpu1 (samples 3:1) instead of n0/cpu1",
            ),
        ),
        (REFERENCE, reordered(REFERENCE), ("the order of actions differs",)),
        (
            REFERENCE,
            recomputed(GPIPE),
            (
                "schedule: gpipe instead of 1f1b",
                "micro-batches: 4 micro-batches of 1 instead of 2 micro-batches of 2",
                "stage 0 on n0/cpu0: computes activations again",
                "stage 0 on n0/cpu0: 4 micro-batches in flight instead of 2",
                "stage 1 on n0/cpu1: 4 micro-batches in flight instead of 1",
            ),
        ),
        (recomputed(GPIPE), GPIPE, ("stage 0 on n0/cpu0: keeps its activations",)),
        (
            REPLICAS,
            cut_by_height(REPLICAS),
            ("layer l2: on n0/cpu0 and n0/cpu1 (height 5:3) instead of n0/cpu0 and n0/cpu1 (samples 2:2)",),
        ),
        (REFERENCE, OTHER_MODEL, ("layer l6: only in this plan",)),
        (OTHER_MODEL, REFERENCE, ("layer l6: not in this plan",)),
    ],
)
def test_what_two_plans_decide_otherwise_is_named(one: Decision, other: Decision, lines: tuple[str, ...]) -> None:
    assert differences(one, other) == lines


def test_what_ranks_divide_is_named() -> None:
    levels = [divided(zero) for zero in range(4)]
    assert differences(REFERENCE, levels[1])[0] == "stage 0 on n0/cpu0: its ranks divide the optimiser's state"
    assert differences(levels[1], levels[2])[0].endswith("divide the optimiser's state and gradients")
    assert differences(levels[3], REFERENCE)[0].endswith("keep the optimiser's state whole")


def test_the_table_says_which_is_best_and_what_does_not_fit() -> None:
    slow = plan_of(PROFILE, chain_decision(PROFILE, cuts=(5,)), step_s=3e-3)
    fast = plan_of(PROFILE, REFERENCE, step_s=2e-3)
    took_s = {"one-device": 0.012, "dapple": 8.0}
    limits_s = {"one-device": 60.0, "dapple": 8.0}
    solved = Baselines({}, {"one-device": "needs 9 GiB"}, took_s, limits_s)
    comparison = Comparison({"slow.json": slow, "fast.json": fast}, None, solved)
    lines = comparison.render().splitlines()
    assert lines[1].split()[:6] == ["slow.json", "3.00", "ms", "1,333", "+50", "%"]
    assert " best " in lines[2]
    assert "  one-device: no plan: needs 9 GiB" in lines
    assert "  planned in: one-device 12.0 ms, dapple 8.00 s (all of 8.00 s)" in lines
    assert comparison.data()["planning_s"] == took_s
    assert "fast.json, against slow.json:" in lines
    assert "  2 layers l3 ... l4: on n0/cpu1 instead of n0/cpu0" in lines
    assert comparison.data()["differences"] == {"fast.json": ["2 layers l3 ... l4: on n0/cpu1 instead of n0/cpu0"]}


def test_what_was_measured_stands_beside_what_was_predicted_in_the_same_units() -> None:
    ran = plan_of(PROFILE, REFERENCE, step_s=2e-3)
    ran = replace(ran, measured=Measured.of_steps((4e-3,), ran.prediction, "", ()))
    header, (one, other) = Comparison({"ran": ran, "not": plan_of(PROFILE, REFERENCE, step_s=2e-3)}).table()
    assert header[1:5] == ["step", "samples/s", "measured step", "measured samples/s"]
    assert (one[3:5], other[3:5]) == (["4.00 ms", "1,000"], ["–", "–"])


@pytest.mark.parametrize(
    ("status", "gap", "text"),
    [
        ("proven", 0.0, "proven"),
        ("within gap", 0.021, "within 2.1 %"),
        ("within gap", 1e-5, "within 0.1 %"),
        ("time limit", 0.124, "time limit, within 12 %"),
        ("searched", 4.61, "searched, within 461 %"),
    ],
)
def test_a_proof_says_how_far_from_the_best_a_plan_can_be(status: str, gap: float, text: str) -> None:
    assert proof_text(Search("m", "s", status, 1e-3, gap, 0, 0)) == text
    assert proof_text(Search("m", "s", "heuristic", 0.0, 0.0, 0, 0)) == "heuristic"


def test_plans_that_decide_the_same_are_told_of_together_and_those_for_other_things_are_remarked_on() -> None:
    first = plan_of(PROFILE, REFERENCE)
    other = plan_of(PROFILE, chain_decision(PROFILE, cuts=(5,)))
    shown = Comparison({"a": first, "b": other, "c": first, "d": other}).render()
    assert "b, d, against a:\n  2 layers l3 ... l4" in shown
    assert "c, against a:\n  the same decision" in shown
    assert "different models" in Comparison({"a": first, "b": plan_of(chain_profile(7), OTHER_MODEL)}).render()
    larger = plan_of(PROFILE, chain_decision(PROFILE, cuts=(3,), micro_batches=(4, 4)))
    comparison = Comparison({"a": first, "b": larger}, profile=PROFILE)
    assert "global batches differ (4, 8)" in comparison.render()
    assert comparison.ties == {}


@pytest.mark.parametrize(
    ("num_ranks", "said"),
    [
        (3, "uses 2 ranks rather than 3, and gives up 6.5 % at the mean"),
        (2, "exchanges less on as many ranks, and gives up 6.5 % at the mean"),
        (0, "is simpler, and gives up 6.5 % at the mean"),  # a file of before
    ],
)
def test_what_a_plan_was_taken_for_and_what_that_costs_is_said(num_ranks: int, said: str) -> None:
    tie = Tie("3 stages on 3 ranks, 1f1b, 2 micro-batches", 0.01, 0.065, 0.68, num_ranks)
    plan = plan_of(PROFILE, REFERENCE)
    plan = replace(plan, search=replace(plan.search, tie=tie))
    assert tie_text(plan, tie) == said
    assert f"  mine {said}: {tie.over}, is faster there" in str(Comparison({"mine": plan}))


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
        self.status = status
        self.heeds_objective = heeds_objective
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
WHOLE = [(1.0, 100), (2.0, 55), (3.0, 40), (5.0, 12), (6.0, 11)]


def test_the_whole_front_is_found_by_limits_just_below_each_peak(solver: Solver) -> None:
    front = pareto.front(PROBLEM)
    assert found(front) == WHOLE
    assert front.complete
    assert [limit for limit, _ in solver.asked] == [0, 99, 59, 54, 39, 11, 10]
    frame = front.frame()
    assert list(frame["peak_bytes"]) == [peak for _, peak in WHOLE]
    assert frame.loc[1, "slower"] == 0
    assert front.data()["points"][1]["step_s"] == 2.0
    of = "the whole front, proven of: samples, one stage a device"
    assert front.render().splitlines()[0] == f"Step against memory of the fullest rank ({of})"


def test_a_limit_of_ones_own_is_kept(solver: Solver) -> None:
    assert found(pareto.front(replace(PROBLEM, memory_bytes=50))) == WHOLE[2:]
    assert max(limit for limit, _ in solver.asked) == 50
    with pytest.raises(InfeasibleError):
        pareto.front(replace(PROBLEM, memory_bytes=5))


def test_some_points_are_spread_over_the_memory(solver: Solver, monkeypatch: pytest.MonkeyPatch) -> None:
    front = pareto.front(PROBLEM, num_points=4)
    assert len(front.plans) == 4
    assert {WHOLE[0], WHOLE[-1]} <= set(found(front))
    assert not front.complete
    more = pareto.front(PROBLEM, num_points=50)
    assert (found(more), more.complete) == (WHOLE, True)
    monkeypatch.setattr(solve, "solve", Solver(heeds_objective=False))  # it is limited in strides
    front = pareto.front(PROBLEM, num_points=4)
    assert found(front)[0] == WHOLE[0]
    assert 2 <= len(front.plans) <= 4
    assert not front.complete


def test_without_proofs_the_front_is_not_called_complete_and_ctrl_c_keeps_what_was_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(solve, "solve", Solver("time limit"))
    front = pareto.front(PROBLEM)
    assert not front.complete
    assert "or not all of it proven" in front.render()
    monkeypatch.setattr(solve, "solve", Solver("stopped"))
    assert found(pareto.front(PROBLEM)) == WHOLE[:1]


def test_on_a_real_search_less_memory_is_never_faster() -> None:
    profile = chain_profile(4, parameter_bytes=2**16, activation_bytes=2**18, sizes=(1, 2, 4))
    front = pareto.front(problems.make_problem(profile, global_batch=4))
    pairs = found(front)
    assert pairs == sorted(pairs)
    assert [peak for _, peak in pairs] == sorted((peak for _, peak in pairs), reverse=True)
    assert len(set(pairs)) == len(pairs)
    for plan in front.plans:
        assert plan.prediction.peak_bytes <= max(rank.memory_limit_bytes for rank in plan.prediction.ranks)
