"""Streams of forward passes: the highest rate, and the least latency at a rate, held against exhaustive search."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from planner.costs.cost_model import CostModel
from planner.costs.predict import predict, sustained
from planner.ir.errors import InfeasibleError
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.solvers import solver
from planner.solvers.best_first.objectives import is_stream
from planner.solvers.candidates.candidate import decision_of
from planner.solvers.candidates.evaluate import Evaluator
from tests.oracles.plans import check
from tests.planner.factories import chain_decision
from tests.planner.solvers.instances import plans, random_problem

PRECISION = 2e-3


def of_forwards(seed: int) -> Problem:
    return replace(random_problem(seed), schedules=("forward",), time_limit_s=20.0)


def solved(problem: Problem) -> Plan:
    return solver("best-first")(problem, None)


@pytest.mark.parametrize("seed", range(8))
def test_throughput_of_forward_passes_is_the_highest_rate_of_a_stream(seed: int) -> None:
    problem = of_forwards(seed)
    assert is_stream(problem)
    evaluator = Evaluator(problem, CostModel(problem.profile))
    rates = [evaluator.sustained_per_s(each) for each in plans(problem) if evaluator.evaluate(each).fits]
    if not rates:
        with pytest.raises(InfeasibleError):
            solved(problem)
        return
    found = solved(problem)
    assert found.prediction.sustained_per_s >= max(rates) * (1 - PRECISION)
    assert found.search.binding[0].startswith("rate: no plan sustains more than ")
    assert float(found.search.binding[0].split()[6]) >= max(rates) * (1 - 1e-4)
    assert not check(found, problem.profile)


@pytest.mark.parametrize("seed", range(100, 108))
def test_at_a_rate_the_plan_of_least_latency_is_taken_or_the_rate_is_refused(seed: int) -> None:
    problem = of_forwards(seed)
    evaluator = Evaluator(problem, CostModel(problem.profile))
    fitting = [each for each in map(evaluator.evaluate, plans(problem)) if each.fits]
    if not fitting:
        return
    rate_of = {each.candidate: evaluator.sustained_per_s(each.candidate) for each in fitting}
    highest = max(rate_of.values())
    wanted = random.Random(seed).uniform(0.5, 1.0) * highest
    least_s = min(each.step_s for each in fitting if rate_of[each.candidate] >= wanted)
    found = solved(replace(problem, objective="latency", rate_per_s=wanted))
    assert found.prediction.step_s == pytest.approx(least_s, rel=1e-6)
    assert found.prediction.sustained_per_s >= wanted * (1 - 1e-6)
    assert not check(found, problem.profile)
    with pytest.raises(InfeasibleError, match="no plan sustains") as told:
        solved(replace(problem, objective="latency", rate_per_s=1.2 * highest))
    assert float(told.value.details[0].split()[0]) == pytest.approx(highest, rel=PRECISION)


@pytest.mark.parametrize("seed", range(200, 206))
def test_a_stream_is_simulated_alike_by_the_search_and_by_the_prediction(seed: int) -> None:
    problem = of_forwards(seed)
    evaluator = Evaluator(problem, CostModel(problem.profile))
    for candidate in list(plans(problem))[:40:7]:
        decision = decision_of(problem, candidate)
        period_s = sustained(evaluator.pricing, decision).period_s
        assert decision.global_batch / period_s == pytest.approx(evaluator.sustained_per_s(candidate), rel=1e-9)


def test_with_free_messages_the_period_is_the_slowest_stage() -> None:
    profile = chain_profile(4, 3, forward_s=(1e-3, 4e-3, 2e-3, 2e-3), bandwidth_bytes_per_s=1e15, loss_s=0.0)
    decision = chain_decision(profile, (1, 2), micro_batches=(1,), schedule="forward")
    found, _ = predict(profile, decision)
    assert found.sustained_per_s == pytest.approx(1 / 4e-3, rel=1e-6)
    assert found.step_s == pytest.approx(9e-3, rel=1e-6)


def test_a_plan_that_does_not_keep_what_was_asked_for_is_found_out() -> None:
    problem = replace(of_forwards(3), objective="latency")
    found = solved(problem)
    asked = replace(found.inputs.request, rate_per_s=2 * found.prediction.sustained_per_s)
    faults = check(replace(found, inputs=replace(found.inputs, request=asked)), problem.profile)
    assert any(fault.startswith("inputs.request.rate_per_s: asked for") for fault in faults)
    other = replace(found.prediction, sustained_per_s=1.5 * found.prediction.sustained_per_s)
    assert any(
        "prediction.sustained_per_s" in fault for fault in check(replace(found, prediction=other), problem.profile)
    )
