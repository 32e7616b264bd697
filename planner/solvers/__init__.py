"""Solvers by name: each is a function ``solve(problem, progress) -> Plan``.

``best-first`` and ``span-ilp`` are ours (:mod:`planner.solvers.best_first`, :mod:`planner.solvers.ilp`); the others are
the strategies of papers and of everyday use (:mod:`planner.extras.baselines`).

Modules:

    best_first         The exact search
    budget             What a search may spend: seconds by the clock, and within them work that is counted
    candidates         Points of the searched space: what may be chosen, how it becomes a plan, and what the simulator
                       says of it
    ilp                The integer program over spans behind :mod:`planner.solvers.ilp.solver`: its tables, its rows,
                       its objective
    integer_program    Integer programs as blocks of rows, solved by HiGHS: the one over spans, and those of published
                       planners
    layouts            The best option (layout, recompute) of every layer of a stage, exactly
    progress           What a search reports while it runs
    requests           What no request may ask for: numbers that nothing can mean, and options that cannot be combined
    token_slices       Plans with token slices: stages, micro-batches and lengths of slices, after the best plan without
                       slices
"""

from __future__ import annotations

import functools
import gc
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from planner.ir.errors import InfeasibleError, UnknownNameError
from planner.ir.plan import Plan
from planner.ir.problem import ALWAYS, AUTO, NEVER, Problem
from planner.solvers.budget import part_of_current, under
from planner.solvers.progress import Progress, SearchProgress
from planner.solvers.requests import of_search, require_none

__all__ = ["Progress", "SearchProgress", "Solver", "baselines", "current_name", "names", "solver"]

_SOLVERS = {
    "best-first": "planner.solvers.best_first.solver:solve",
    "bapipe": "planner.extras.baselines.bapipe:solve",
    "dapple": "planner.extras.baselines.dapple:solve",
    "data-parallel": "planner.extras.baselines.everyday:solve_data_parallel",
    "dryden": "planner.extras.baselines.dryden:solve",
    "even-split": "planner.extras.baselines.everyday:solve_even_split",
    "one-device": "planner.extras.baselines.everyday:solve_one_device",
    "pipedream": "planner.extras.baselines.pipedream.solver:solve",
    "pipedream-hierarchical": "planner.extras.baselines.pipedream.solver:solve_hierarchical",
    "piper": "planner.extras.baselines.piper.solver:solve",
    "piper-equal": "planner.extras.baselines.piper.solver:solve_equal",
    "sparsepipe": "planner.extras.baselines.sparsepipe:solve",
    "span-ilp": "planner.solvers.ilp.solver:solve",
    "tarnawski": "planner.extras.baselines.tarnawski.solver:solve",
}
_ALIASES = {"suffix-dp": "best-first"}  # names of older releases, in people's scripts

_COLLECTED_AFTER = 5000
"""Objects that a search makes before the collector looks at the young ones; Python's own is 700."""

Solver = Callable[[Problem, Progress | None], Plan]


def names() -> tuple[str, ...]:
    """Names of all solvers, sorted."""
    return tuple(sorted(_SOLVERS))


def baselines() -> tuple[str, ...]:
    """Names of the solvers that are published or everyday strategies, sorted."""
    return tuple(name for name in names() if _SOLVERS[name].startswith("planner.extras.baselines."))


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
    if name not in _SOLVERS:
        raise UnknownNameError(f"no solver {name!r}", [f"known: {', '.join(names())}"])
    module, _, function = _SOLVERS[name].partition(":")
    return functools.partial(_settled, getattr(importlib.import_module(module), function), name)


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
