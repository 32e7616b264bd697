"""A search with its progress on stderr: the best step so far, the bound below it, the gap between them."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from halopipe import planning, units
from halopipe.progress import Reporter
from planner.ir.plan import Plan
from planner.ir.problem import Problem

if TYPE_CHECKING:
    from planner.solvers import SearchProgress


def solve(problem: Problem, solver: str) -> Plan:
    """The plan that ``solver`` finds; Ctrl-C gives the best so far, marked stopped."""
    with Reporter("searching") as reporter:

        def show(at: SearchProgress) -> None:
            best = (
                f"best {units.seconds(at.best_s)}, gap {units.percent(at.gap)}"
                if isfinite(at.best_s)
                else "no plan yet"
            )
            numbers = f"{best}, bound {units.seconds(at.bound_s)}, {at.num_simulated} simulated"
            left_s = max(0.0, problem.time_limit_s - at.elapsed_s)
            reporter.update(at.elapsed_s, problem.time_limit_s, numbers, left_s)

        return planning.solve(problem, solver, show)
