"""Plans of candidates that were written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.solvers.candidates.choose import best_of, heuristic_plan
from planner.solvers.candidates.evaluate import Evaluator


def best_of_these(
    problem: Problem, candidates: Callable[[Problem, CostModel], Iterable[Candidate]], solver: str, method: str
) -> Plan:
    """The plan of the best candidate; no bound is known.  Raises as :func:`best_of`."""
    evaluator = Evaluator(problem, CostModel(problem.profile))
    return heuristic_plan(evaluator, best_of(evaluator, candidates(problem, evaluator.cost_model)), solver, method)
