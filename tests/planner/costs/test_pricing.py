"""One way from a decision to its price: a candidate and the plan's file that is written of it are the same to it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from planner.costs.candidate import candidate_of
from planner.costs.cost_model import CostModel
from planner.costs.predict import forecast
from planner.costs.pricing import Pricing
from planner.ir.problem import Problem
from planner.ir.schedule import Action
from planner.solvers import solver
from planner.solvers.candidates.candidate import decision_of, divided
from planner.solvers.candidates.evaluate import Evaluator
from tests.planner.solvers.laid_out_plans import EVERYTHING, random_candidate, random_network


@pytest.mark.parametrize("seed", range(12))
def test_a_candidate_costs_what_its_file_does(seed: int) -> None:
    draw = random.Random(seed)
    problem = Problem(random_network(draw), 4, allow=EVERYTHING, halo_depth=draw.choice([0, 2]), shard="always")
    evaluator = Evaluator(problem, CostModel(problem.profile))
    candidate = random_candidate(draw, evaluator)
    written = forecast(Pricing.of(problem.profile), decision_of(problem, candidate), problem.memory_margin, num_draws=0)
    unwritten = evaluator.forecast(candidate, num_draws=0)
    assert unwritten.prediction.step_s == pytest.approx(written.prediction.step_s, rel=1e-12)
    assert unwritten.memories == written.memories
    assert unwritten.timeline.spans == written.timeline.spans


def test_a_file_says_what_its_candidate_did() -> None:
    problem = Problem(chain_profile(4, 3), 6, shard="always", zero=2)
    plan = solver("best-first")(problem, None)
    candidate = candidate_of(problem.profile.graph, plan.decision)
    assert decision_of(problem, candidate) == plan.decision
    assert divided(problem, candidate).zero == candidate.zero
    assert candidate.rows == Pricing.of(problem.profile).with_rows(replace(candidate, rows=())).rows


def test_a_search_reads_no_rows_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(text: str) -> Action:
        raise AssertionError(f"{text} was read inside a search")

    monkeypatch.setattr(Action, "parse", refuse)
    plan = solver("best-first")(Problem(chain_profile(5, 3), 6, confidence=0.8), None)
    assert plan.alternatives
