"""Schedules: one module a schedule, named by its ``NAME``.  The registry is the folder's listing.

A schedule is one pure function, ``order(pipeline) -> Schedule``: the order of compute on every position of the
pipeline.  What follows from that order (messages, reductions, updates) is added by :func:`planner.passes.lower`.
A module may also state ``TRAITS``; where its stages lie, ``positions(num_positions, stages_per_position)`` (stage s at
position s mod p if not); and how old its weights are, ``staleness(pipeline)`` (never old if not).
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from types import ModuleType

from planner.ir.errors import UnknownNameError
from planner.ir.schedule import Pipeline, Schedule, Traits

__all__ = ["Order", "Traits", "default_names", "names", "positions", "schedule", "staleness", "traits"]

Order = Callable[[Pipeline], Schedule]
"""What a module in this folder provides as ``order``."""


@functools.cache
def names() -> tuple[str, ...]:
    """Names of all schedules, sorted."""
    return tuple(sorted(_modules()))


@functools.cache
def default_names() -> tuple[str, ...]:
    """The schedules that are searched where nobody names any, sorted."""
    return tuple(name for name in names() if traits(name).by_default)


def schedule(name: str) -> Order:
    """The function that orders a pipeline by the schedule ``name``.

    Raises:
        UnknownNameError: there is none.
    """
    order: Order = _module(name).order
    return order


def traits(name: str) -> Traits:
    """What is special about the schedule ``name``.

    Raises:
        UnknownNameError: there is none.
    """
    found: Traits = getattr(_module(name), "TRAITS", Traits())
    return found


def positions(name: str, num_positions: int, stages_per_position: int = 1) -> tuple[int, ...]:
    """The position of each stage where the schedule ``name`` runs so many stages on so many positions.

    Raises:
        UnknownNameError: there is none of that name.
    """
    found: Callable[[int, int], tuple[int, ...]] | None = getattr(_module(name), "positions", None)
    if found is not None:
        return found(num_positions, stages_per_position)
    return tuple(range(num_positions)) * stages_per_position


def staleness(name: str, pipeline: Pipeline) -> tuple[int, ...]:
    """By stage, the most updates that the weights of a micro-batch lack under the schedule ``name``.

    Raises:
        UnknownNameError: there is none of that name.
    """
    found: Callable[[Pipeline], tuple[int, ...]] | None = getattr(_module(name), "staleness", None)
    return (0,) * pipeline.stages.num_stages if found is None else found(pipeline)


def _module(name: str) -> ModuleType:
    if name not in _modules():
        raise UnknownNameError(f"no schedule {name!r}", [f"known: {', '.join(names())}"])
    return _modules()[name]


@functools.cache
def _modules() -> Mapping[str, ModuleType]:
    files = [info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_")]
    modules = [importlib.import_module(f"{__name__}.{file}") for file in files]
    return {module.NAME: module for module in modules}
