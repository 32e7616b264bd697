"""Solvers by name: each is a function ``solve(problem, progress) -> Plan``.

``best-first`` and ``span-ilp`` are ours (:mod:`planner.solvers.best_first`, :mod:`planner.solvers.ilp`).  Others are
baselines: strategies of everyday use (:mod:`planner.solvers.everyday`), and those that extras add.

Modules:

    best_first         The exact search
    budget             What a search may spend: seconds by the clock, and within them work that is counted
    candidates         Points of the searched space: what may be chosen, how it becomes a plan, and what the simulator
                       says of it
    everyday           Plans that people make without a planner: one device, replicas on all, equally many layers a
                       device
    ilp                The integer program over spans of :mod:`planner.solvers.ilp.solver`: its tables, its rows,
                       its objective
    integer_program    Integer programs as blocks of rows, solved by HiGHS: the one over spans, and those of published
                       planners
    layouts            The best option (layout, recompute) of every layer of a stage, exactly
    progress           What a search reports while it runs
    requests           What no request may ask for: numbers that nothing can mean, and options that cannot be combined
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from planner.ir.errors import InfeasibleError, UnknownNameError
from planner.ir.extras import Additions, extras, joined
from planner.ir.plan import Plan
from planner.ir.planner_extra import PlannerExtra
from planner.ir.problem import ALWAYS, AUTO, NEVER, Problem
from planner.solvers.budget import part_of_current, under
from planner.solvers.progress import Progress, SearchProgress
from planner.solvers.requests import of_search, require_none

__all__ = ["Progress", "SearchProgress", "Solver", "baselines", "current_name", "names", "solver"]

_OWN = Additions(
    {"best-first": "planner.solvers.best_first.solver:solve", "span-ilp": "planner.solvers.ilp.solver:solve"}
)
_EVERYDAY = Additions(
    {
        "data-parallel": "planner.solvers.everyday:solve_data_parallel",
        "even-split": "planner.solvers.everyday:solve_even_split",
        "one-device": "planner.solvers.everyday:solve_one_device",
    }
)
_ALIASES = {"suffix-dp": "best-first"}  # names of older releases, in people's scripts

_COLLECTED_AFTER = 5000
"""Objects that a search makes before the collector looks at the young ones; Python's own is 700."""

Solver = Callable[[Problem, Progress | None], Plan]


def names() -> tuple[str, ...]:
    """Names of all solvers, sorted."""
    return tuple(sorted((*_OWN, *baselines())))


def baselines() -> tuple[str, ...]:
    """Names of the solvers that are published or everyday strategies, sorted."""
    return tuple(sorted((*_EVERYDAY, *_published())))


def current_name(name: str) -> str:
    """What a solver is called now that was called ``name``; other names as they are."""
    return _ALIASES.get(name, name)


def solver(name: str) -> Solver:
    """The solver called ``name``, or once called so.

    Where the optimiser's state may be divided (``auto``), it is only if nothing else fits.

    It raises :class:`UsageError` for what no request may ask for (:mod:`planner.solvers.requests`).

    Raises:
        UnknownNameError: there is none.
    """
    name = current_name(name)
    for solvers in (_OWN, _EVERYDAY, _published()):
        if name in solvers:
            return functools.partial(_settled, solvers[name], name)
    raise UnknownNameError(f"no solver {name!r}", [f"known: {', '.join(names())}"])


@functools.cache
def _published() -> Additions:
    """The planners that extras add."""
    return joined(extra.solvers for extra in extras(PlannerExtra))


def _settled(solve: Solver, name: str, problem: Problem, progress: Progress | None = None) -> Plan:
    require_none(of_search(problem, name))
    with under(part_of_current(problem.time_limit_s)), _few_collections():
        if problem.shard != AUTO:
            return solve(problem, progress)
        try:
            return solve(replace(problem, shard=NEVER), progress)
        except InfeasibleError:
            return solve(replace(problem, shard=ALWAYS), progress)


@contextmanager
def _few_collections() -> Iterator[None]:
    """Looks for cyclic garbage seldom: a search makes little of it, and many objects that stay."""
    first, *others = gc.get_threshold()
    gc.set_threshold(first and max(first, _COLLECTED_AFTER), *others)
    try:
        yield
    finally:
        gc.set_threshold(first, *others)
