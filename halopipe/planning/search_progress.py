"""Searches with their progress on stderr: the best step so far, the bound below it, the gap between them."""

from __future__ import annotations

import time
from math import isfinite
from typing import TYPE_CHECKING

from halopipe.planning import problem as problems
from halopipe.planning import solve as planning
from halopipe.terminal import units
from halopipe.terminal.console import Reporter, remark
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.ir.profile import Profile

if TYPE_CHECKING:
    from halopipe.planning.pareto import Front
    from halopipe.planning.shadow_prices import ShadowPrices
    from halopipe.planning.what_if import PlanAnswer
    from planner.solvers import Progress, SearchProgress


def solve(problem: Problem, solver: str) -> Plan:
    """The plan that ``solver`` finds; Ctrl-C gives the best so far, marked stopped.  Says what a strategy took."""
    from planner import solvers
    from planner.solvers.budget import stated_s

    start_s = time.monotonic()
    try:
        return shown(problem, solver)
    finally:
        if solver in solvers.baselines():
            limit_s = min(stated_s(solver, problem.time_limit_s), problem.time_limit_s)
            took = units.seconds(time.monotonic() - start_s)
            remark(f"{solver} took {took} of {units.seconds(limit_s)} that it may take")


def shown(problem: Problem, solver: str, progress: Progress | None = None, *, quiet: bool = False) -> Plan:
    """The plan that ``solver`` finds; ``progress`` is told how far it is, else it is shown unless ``quiet``."""
    with Reporter("searching", quiet=quiet or progress is not None) as reporter:
        return planning.solve(problem, solver, progress or _shown(reporter, problem.time_limit_s, notes_first=True))


def baselines(problem: Problem, jobs: int = 1) -> planning.Baselines:
    """The published strategies on the problem."""
    with Reporter("solving baselines") as reporter:
        return planning.solve_baselines(problem, show=reporter.update, jobs=jobs)


def why_not(plan: Plan, profile: Profile | None, question: str) -> PlanAnswer:
    """As :func:`halopipe.planning.what_if.why_not`."""
    from halopipe.planning import what_if as asking

    with Reporter("searching") as reporter:
        return asking.why_not(plan, profile, question, _shown(reporter, _time_limit_s(plan, profile)))


def what_if(plan: Plan, profile: Profile, question: str) -> PlanAnswer:
    """As :func:`halopipe.planning.what_if.what_if`."""
    from halopipe.planning import what_if as asking

    with Reporter("searching") as reporter:
        return asking.what_if(plan, profile, question, _shown(reporter, _time_limit_s(plan, profile)))


def prices(plan: Plan, profile: Profile, time_limit_s: float) -> ShadowPrices:
    """As :func:`halopipe.planning.shadow_prices.prices`."""
    from halopipe.planning import shadow_prices

    with Reporter("pricing") as reporter:
        return shadow_prices.prices(plan, profile, time_limit_s, reporter.update)


def front(problem: Problem, solver: str, num_points: int, jobs: int) -> Front:
    """As :func:`halopipe.planning.pareto.front`."""
    from halopipe.planning import pareto

    with Reporter("searching") as reporter:
        return pareto.front(
            problem,
            num_points,
            solver,
            lambda done, total, what: reporter.update(done, total or None, f"plan {done + 1}, {what}"),
            jobs,
        )


def _time_limit_s(plan: Plan, profile: Profile | None) -> float:
    return problems.problem_of(plan, profile).time_limit_s if profile is not None else 1.0


def _shown(reporter: Reporter, time_limit_s: float, *, notes_first: bool = False) -> Progress:
    """Shows how far a search is.

    Args:
        notes_first: whether its first plan is a line of its own.
    """
    is_known = not notes_first

    def show(at: SearchProgress) -> None:
        best = f"best {units.seconds(at.best_s)}, gap {units.percent(at.gap)}" if isfinite(at.best_s) else "no plan yet"
        numbers = f"{best}, bound {units.seconds(at.bound_s)}, {at.num_simulated} simulated"
        nonlocal is_known
        if at.num_stages and not is_known:
            is_known = True
            pipeline = f"{units.count(at.num_stages, 'stage')} on {units.count(at.num_devices, 'device')}"
            reporter.note(f"first plan {units.seconds(at.best_s)}, gap {units.percent(at.gap)}, {pipeline}")
        reporter.update(at.elapsed_s, time_limit_s, numbers, max(0.0, time_limit_s - at.elapsed_s), at_most=True)

    return show
