"""The planner: chooses stages, schedule, devices and layouts from a profile.  Needs no torch and no devices.

Who plans, prices or checks calls one of three functions, with what ``planner.ir`` reads from files or a caller makes:

    plan(problem)                the best ``Plan`` of what a ``Problem`` asks of a profile: the decision, what it costs,
                                 a bound, and how sure the search is that there is no better one
    predict(profile, decision)   the ``Prediction`` and the ``Timeline`` of a decision, whoever made it
    faults_of(plan, profile)     all that is wrong with a plan, each as "path in the file: what"; empty: it is good

What the user did wrong, and what cannot be, they raise as errors of :mod:`planner.ir.errors`.  All else is the
planner's own: the modules below are for whoever works on it.

Modules:

    check          The checker: whether a plan is legal, as it was asked for, and what the cost model forecasts of its
                   decision
    costs          What a plan costs: layers, links, memory, and the simulation of a whole step
    extras         What papers, peers and particular machines brought: a folder each, which the planner does without
    ir             The nouns that flow between profiler, planner and runtime: plain frozen dataclasses and two rules
    layers         Layer kinds: one class a kind, which states the kind's access relation, in a module for each family
    passes         Passes over action lists: list in, list out
    proof          Proofs of plans: what a search claims, in a form that little code verifies
    schedules      Schedules: one function each, ``order(pipeline) -> Schedule``, in a module for each family
    sites          Who owns which sites of a micro-batch of point clouds: blocks, their one order, intervals of it, and
                   their balance
    solvers        Solvers by name: each is a function ``solve(problem, progress) -> Plan``
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from planner.ir import validation
from planner.ir.lazy import lazily
from planner.ir.plan import Plan, Prediction
from planner.ir.problem import Problem
from planner.ir.profile import Profile
from planner.ir.quantities import Fault
from planner.ir.timeline import Timeline

if TYPE_CHECKING:
    from planner.check.verdict import faults_of
    from planner.costs.predict import predict
    from planner.solvers.progress import Progress

__all__ = ["Plan", "Prediction", "Problem", "Profile", "Timeline", "faults_of", "plan", "predict"]

__getattr__ = lazily(__name__, {"faults_of": "check.verdict", "predict": "costs.predict"})


def plan(problem: Problem, solver: str = "best-first", progress: Progress | None = None) -> Plan:
    """The best plan that a solver finds for what is asked.

    Args:
        solver: its name (:mod:`planner.solvers`): of the exact search, or of a rival's strategy.
        progress: is told of bounds and better plans while the search runs.

    Raises:
        UnknownNameError: there is no such solver.
        UsageError: numbers that no search can mean.
        InfeasibleError: nothing fits, or no plan of this strategy keeps to the side constraints.
        MissingMeasurementError: the profile does not say what layers cost at any size that may be used.
    """
    from planner.solvers import solver as solver_named  # late: a rank plans nothing

    return solver_named(solver)(problem, progress)


def _misfits(profile: Profile) -> Iterator[Fault]:
    from planner.layers.fitting import misfits  # late: a rank reads no profile

    yield from misfits(profile.graph)


validation.also(Profile, _misfits)  # floors: files are read below the layer kinds, which have a say in what makes sense
