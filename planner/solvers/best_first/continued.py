"""Searches that go on where best-first search ended, among plans that are not in its space; extras add them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planner.ir.extras import extras
from planner.ir.planner_extra import PlannerExtra
from planner.ir.problem import Problem

HALO_ROWS = "rows computed twice to save halos"


@dataclass(frozen=True)
class ContinuedSearch:
    """One such search.

    Attributes:
        applies: whether a problem leaves such plans open.
        outcome: ``(evaluator, outcome, budget)`` to the outcome of the search so far, continued.
        plan: ``(evaluator, plan)`` to that plan, a better one, or one that is asked for, until the evaluator's time is
            up; raises :class:`InfeasibleError` where what is asked for does not fit.
        require: ``(problem, cost_model)``: raises :class:`UnsupportedModelError` where no such plan runs the network.
        covers: what the search before it leaves out, and this one looks at.
        takes_half: whether half of what may be spent is kept for it.
    """

    applies: Callable[[Problem], bool]
    outcome: Callable[..., Any] = lambda evaluator, outcome, budget: outcome
    plan: Callable[..., Any] = lambda evaluator, plan: plan
    require: Callable[..., None] = lambda problem, cost_model: None
    covers: tuple[str, ...] = ()
    takes_half: bool = False


def continued_searches(problem: Problem) -> tuple[ContinuedSearch, ...]:
    """Those that there are plans for."""
    searches = (search for extra in extras(PlannerExtra) for search in extra.searches())
    return tuple(search for search in searches if search.applies(problem))
