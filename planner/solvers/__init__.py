"""Solvers: one module a solver, ``solve(problem, progress) -> Plan``.  The registry is the folder's listing.

A module's name with hyphens is the solver's (``data_parallel.py`` is ``data-parallel``); modules without ``solve`` are
helpers.  Those with ``BASELINE = True`` are the strategies that people use without a planner.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType

from planner.ir.errors import InfeasibleError, UnknownNameError
from planner.ir.plan import Plan
from planner.ir.problem import ALWAYS, AUTO, NEVER, Problem
from planner.solvers.progress import Progress, SearchProgress

__all__ = ["Progress", "SearchProgress", "Solver", "baselines", "names", "solver"]

Solver = Callable[[Problem, Progress | None], Plan]


def names() -> tuple[str, ...]:
    """Names of all solvers, sorted."""
    return tuple(_modules())


def baselines() -> tuple[str, ...]:
    """Names of the solvers that are published or everyday strategies, sorted."""
    return tuple(name for name, module in _modules().items() if getattr(module, "BASELINE", False))


def solver(name: str) -> Solver:
    """The solver called ``name``; where the optimiser's state may be divided (``auto``), only if nothing else fits.

    Raises:
        UnknownNameError: there is none.
    """
    found = _modules().get(name)
    if found is None:
        raise UnknownNameError(f"no solver {name!r}", [f"known: {', '.join(names())}"])
    return functools.partial(_settled, found.solve)


def _settled(solve: Solver, problem: Problem, progress: Progress | None = None) -> Plan:
    if problem.shard != AUTO:
        return solve(problem, progress)
    try:
        return solve(replace(problem, shard=NEVER), progress)
    except InfeasibleError:
        return solve(replace(problem, shard=ALWAYS), progress)


@functools.cache
def _modules() -> Mapping[str, ModuleType]:
    files = sorted(info.name for info in pkgutil.iter_modules(__path__))
    modules = {file.replace("_", "-"): importlib.import_module(f"{__name__}.{file}") for file in files}
    return {name: module for name, module in modules.items() if hasattr(module, "solve")}
