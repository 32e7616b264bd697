"""From problems to plans, baselines and predicted timelines.  No torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from halopipe.planning.jobs import Jobs
from halopipe.planning.options import DEFAULT_SOLVER
from halopipe.terminal.units import require_known
from planner.ir.errors import HalopipeError
from planner.ir.plan import Plan, Prediction
from planner.ir.problem import Problem
from planner.ir.profile import Profile
from planner.ir.timeline import Timeline

if TYPE_CHECKING:
    from planner.costs.ties import Ties
    from planner.solvers import Progress


@dataclass(frozen=True, slots=True)
class Baselines:
    """The published strategies by name.

    Attributes:
        plans: of those that fit.
        infeasible: why the others do not.
        took_s: what each took, by the clock.
        limits_s: what each might have taken.
    """

    plans: dict[str, Plan]
    infeasible: dict[str, str]
    took_s: dict[str, float] = field(default_factory=dict)
    limits_s: dict[str, float] = field(default_factory=dict)


def solve(problem: Problem, name: str = DEFAULT_SOLVER, progress: Progress | None = None) -> Plan:
    """The plan that solver ``name`` finds; it keeps to the side constraints.

    Raises:
        UnknownNameError: there is no such solver.
        InfeasibleError: nothing fits, or no plan of this strategy keeps to the side constraints.
    """
    from planner import plan

    return plan(problem, known_solver(name), progress)


def known_solver(name: str) -> str:
    """What solver ``name`` is called now.

    Raises:
        UnknownNameError: there is none, and never was; the error says which name is nearest.
    """
    from planner import solvers

    name = solvers.current_name(name)
    require_known("solver", [name], solvers.names())
    return name


def solve_baselines(
    problem: Problem,
    wanted: Sequence[str] = (),
    show: Callable[[int, int, str], None] | None = None,
    within_s: float = math.inf,
    jobs: int = 1,
) -> Baselines:
    """The published strategies, each as its authors do it, on the same problem.

    Each may take what its authors state (:func:`planner.solvers.budget.stated_s`), else all of the problem's time
    limit.

    Args:
        wanted: their names; empty: all.
        show: called with (done, total, what comes next).
        within_s: what all of them together may take at most: each then has an equal part of what is left.
        jobs: processes that they are shared out to.
    """
    from planner import solvers

    require_known("baseline", wanted, solvers.baselines())
    solved = Baselines({}, {})
    names = tuple(wanted) or solvers.baselines()
    ends_s = time.monotonic() + within_s
    with Jobs(jobs) as processes:
        shares = [min(1.0, jobs / (len(names) - number)) for number in range(len(names))]
        trials = [
            processes.submit(_tried, problem, name, ends_s, share) for name, share in zip(names, shares, strict=True)
        ]
        for number, (name, trial) in enumerate(zip(names, trials, strict=True)):
            if show is not None:
                show(number, len(names), name)
            answer, solved.took_s[name], solved.limits_s[name] = trial()
            if isinstance(answer, Plan):
                solved.plans[name] = answer
            else:  # what the strategy's own restrictions rule out is no failure of the comparison
                solved.infeasible[name] = "; ".join((answer.title, *answer.details[:1]))
    return solved


def _tried(problem: Problem, name: str, ends_s: float, share: float) -> tuple[Plan | HalopipeError, float, float]:
    """What a strategy comes to, the seconds that it took, and those that it might have taken.

    Args:
        ends_s: by the clock, which all processes of a machine share.
        share: of what is then left of it.
    """
    from planner.solvers.budget import stated_s

    start_s = time.monotonic()
    limit_s = min(stated_s(name, problem.time_limit_s), max(0.0, ends_s - start_s) * share)
    answer: Plan | HalopipeError
    try:
        answer = solve(replace(problem, time_limit_s=limit_s), name)
    except HalopipeError as error:
        answer = error
    return answer, time.monotonic() - start_s, limit_s


def predict_again(plan: Plan, profile: Profile) -> tuple[Prediction, Timeline]:
    """The simulator's word on the plan's decision, which may have been edited since; under the plan's corrections."""
    from planner import predict

    request = plan.inputs.request
    return predict(plan.inputs.as_seen(profile), plan.decision, request.memory_margin, request.memory_bytes)


def ties_of(profile: Profile) -> Ties:
    """Plans of the profile held against one another."""
    from planner.costs.pricing import Pricing
    from planner.costs.ties import Ties

    return Ties(Pricing.of(profile))
