"""Schedules: one module a schedule, named by its ``NAME``.  The registry is the folder's listing.

A schedule is one pure function, ``order(stages) -> Schedule``: the order of compute on every position of the pipeline,
where position ``s`` runs stage ``s``.  What follows from that order (messages, reductions, updates) is added by
:func:`planner.passes.lower`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping

from planner.ir.errors import UnknownNameError
from planner.ir.schedule import Schedule, StageGraph

__all__ = ["Order", "names", "schedule"]

Order = Callable[[StageGraph], Schedule]
"""What a module in this folder provides as ``order``."""


@functools.cache
def names() -> tuple[str, ...]:
    """Names of all schedules, sorted."""
    return tuple(sorted(_modules()))


def schedule(name: str) -> Order:
    """The function that orders a pipeline by the schedule ``name``.

    Raises:
        UnknownNameError: there is none.
    """
    if name not in names():
        raise UnknownNameError(f"no schedule {name!r}", [f"known: {', '.join(names())}"])
    return _modules()[name]


@functools.cache
def _modules() -> Mapping[str, Order]:
    files = [info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_")]
    modules = [importlib.import_module(f"{__name__}.{file}") for file in files]
    return {module.NAME: module.order for module in modules}
