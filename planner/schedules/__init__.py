"""Schedules: one function each, ``order(pipeline) -> Schedule``, in a module for each family.

    M micro-batches, p stages s = 0 ... p - 1; F forward, B backward, I and W its halves (for inputs, for weights)

    row of stage s    W_s forwards, then B and F in turn: 1F1B W_s = p - s, GPipe W_s = M       ``_rows.in_turn``
                      B as I and W, with W later                                               ``_rows.split``
                      an update after every k, on older weights                              ``_rows.updating``
    rows of a DAG     W_s <= W of the stages before: nothing waits in a circle                  ``_rows.clamped``

Such a function gives the order of compute on every position of the pipeline, and draws it.  What follows from that
order (messages, reductions, updates) is added by :func:`planner.passes.lower`.  ``@registered`` above it puts it on the
list (``_registry``): its name, its traits, where its stages lie, how many forwards each runs before its first backward
and how old its weights are.  Read ``gpipe``, then ``one_f_one_b``, ``zero_bubble``, ``pipedream``; those of ``greedy``
are computed from times (:class:`planner.passes.events.StageClock`).

Besides:

    _rows   What several schedules are made of: rows of one stage, windows, and where the backward for the weights goes
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping

from planner.ir.errors import UnknownNameError
from planner.ir.extras import extras, required
from planner.ir.planner_extra import PlannerExtra
from planner.ir.schedule import Pipeline, Schedule, Traits
from planner.schedules._registry import ENTRIES, Order, RegisteredSchedule

__all__ = [
    "Order",
    "Traits",
    "chunked_names",
    "default_names",
    "max_in_flight",
    "names",
    "positions",
    "schedule",
    "staleness",
    "traits",
]


@functools.cache
def names() -> tuple[str, ...]:
    """Names of all schedules, sorted."""
    return tuple(sorted(_entries()))


@functools.cache
def default_names() -> tuple[str, ...]:
    """The schedules that are searched where nobody names any, sorted."""
    return tuple(name for name in names() if traits(name).by_default)


@functools.cache
def chunked_names() -> tuple[str, ...]:
    """Those with any number of stages a position that may be looked at besides (``Problem.chunks``), sorted."""
    return tuple(name for name in names() if traits(name) == Traits(stages_per_position=0))


def schedule(name: str) -> Order:
    """The function that orders a pipeline by the schedule ``name``.

    Where micro-batches are cut into parts, it raises :class:`UsageError` if the schedule cannot order those.

    Raises:
        UnknownNameError: there is none.
    """
    entry = _entry(name)

    @functools.wraps(entry.order)
    def order(pipeline: Pipeline) -> Schedule:
        if pipeline.stages.parts == 1:
            return entry.order(pipeline)
        in_parts = (extra.order_of_parts(name, entry.order, pipeline) for extra in extras(PlannerExtra))
        return required(in_parts, "planner", "the order of parts of micro-batches")

    return order


def traits(name: str) -> Traits:
    """What is special about the schedule ``name``.

    Raises:
        UnknownNameError: there is none.
    """
    return _entry(name).traits


def positions(name: str, num_positions: int, stages_per_position: int = 1) -> tuple[int, ...]:
    """The position of each stage where the schedule ``name`` runs these stages on these positions.

    Raises:
        UnknownNameError: there is none of that name.
    """
    stated = _entry(name).positions
    if stated is not None:
        return stated(num_positions, stages_per_position)
    return tuple(range(num_positions)) * stages_per_position


def max_in_flight(name: str, pipeline: Pipeline) -> tuple[int, ...] | None:
    """By stage, the most micro-batches in flight under the schedule ``name``; None where only its order says so.

    A schedule that states them has the order of windowed 1F1B with these windows (``_rows.in_turn``).

    Raises:
        UnknownNameError: there is none of that name.
    """
    stated = _entry(name).max_in_flight
    count = pipeline.stages.num_microbatches
    return None if stated is None else tuple(min(window, count) for window in stated(pipeline))


def staleness(name: str, pipeline: Pipeline) -> tuple[int, ...]:
    """By stage, the most updates that the weights of a micro-batch lack under the schedule ``name``.

    Raises:
        UnknownNameError: there is none of that name.
    """
    stated = _entry(name).staleness
    return (0,) * pipeline.stages.num_stages if stated is None else stated(pipeline)


def _entry(name: str) -> RegisteredSchedule:
    if name not in _entries():
        raise UnknownNameError(f"no schedule {name!r}", [f"known: {', '.join(names())}"])
    return _entries()[name]


@functools.cache
def _entries() -> Mapping[str, RegisteredSchedule]:
    for info in pkgutil.iter_modules(__path__):
        if not info.name.startswith("_"):
            importlib.import_module(f"{__name__}.{info.name}")
    return ENTRIES
