"""Workspace beside memory: what a choice takes is no sum, but the most that any one of its options needs.

    minimise    cost(x)    subject to    memory_r(x) + max over nodes v of w_v(x_v, r)  <=  budget_r   for every rank r

A region keeps some options of each node and sets workspace aside: all its choices need at least so much.  With the
rest as the budget the region is a labelled graph (``certified.minimise``), whose bound holds for the region.  If the
best of it needs more on rank r than is set aside, namely a, the region is divided: options that need less than a there,
and choices that take one that needs a or more, so that a is set aside (and on other ranks the least that goes with it).
The region of least bound is next; when none is left whose bound is below the best choice, that is proved.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.solvers.inner.certified import INFEASIBLE, TIME_LIMIT, Answer, minimise, stated
from planner.solvers.inner.labelled import ROUNDING, Array, Assignment, LabelledGraph

_METHOD = "branching on workspace"
_BYTE = 0.5
"""Needs closer than this are equal."""

Kept = tuple[NDArray[np.intp], ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Region:
    """Choices among ``kept`` options that need ``aside`` bytes of workspace or more, by rank."""

    kept: Kept
    aside: Array


def minimise_with_workspace(
    graph: LabelledGraph, workspace: Sequence[Array], time_limit_s: float, gap: float = 0.0
) -> Answer:
    """The cheapest choice that fits with its workspace.

    Args:
        workspace: by node, ``[options, ranks]``; ranks are the graph's resources.
    """
    if not graph.is_limited:
        return minimise(graph, time_limit_s, gap)
    stops = time.monotonic() + time_limit_s
    ticket = itertools.count()
    waiting: list[tuple[float, int, _Region]] = []
    best: Assignment | None = None
    leanest: Assignment | None = None
    cost, given_up, method = float("inf"), float("inf"), ""

    def push(bound: float, region: _Region | None) -> None:
        if region is not None and not _is_close(cost, bound, gap):
            heapq.heappush(waiting, (bound, next(ticket), region))

    everything = tuple(np.arange(count) for count in graph.num_options)
    push(float("-inf"), _region(workspace, everything, np.zeros(len(graph.budget))))
    while waiting and not _is_close(cost, waiting[0][0], gap):
        if method and time.monotonic() >= stops:
            break
        bound, _, region = heapq.heappop(waiting)
        part = replace(graph.restricted(region.kept), budget=np.maximum(graph.budget - region.aside, 0.0))
        answer = minimise(part, max(0.0, stops - time.monotonic()), gap)
        method, bound = answer.method if not method else f"{answer.method}, {_METHOD}", max(bound, answer.bound)
        if answer.assignment is None:
            if answer.leanest is not None and leanest is None:
                leanest = _in_whole(region.kept, answer.leanest)
            if answer.status != INFEASIBLE:
                given_up = min(given_up, bound)
            continue
        found = _in_whole(region.kept, answer.assignment)
        needed = _needed(workspace, found)
        if graph.cost(found) < cost and np.all(graph.memory(found) + needed <= graph.budget * (1 + ROUNDING)):
            best, cost = found, graph.cost(found)
        rank = int(np.argmax(needed - region.aside))
        if needed[rank] <= region.aside[rank] + _BYTE:
            given_up = min(given_up, bound)  # of this region nothing else is known
            continue
        for part_of in _divided(workspace, region, rank, float(needed[rank])):
            push(bound, part_of)
    bound = min([given_up, cost, *(least for least, _, _ in waiting)])
    if best is None:
        return Answer(None, float("inf"), bound, INFEASIBLE if np.isinf(bound) else TIME_LIMIT, method, leanest)
    return stated(best, cost, bound, gap, method)


def _region(workspace: Sequence[Array], kept: Kept, aside: Array) -> _Region | None:
    """The region, with what any of its choices needs set aside; None if a node has no option left."""
    if not all(len(options) for options in kept):
        return None
    least = [needs[options].min(axis=0) for needs, options in zip(workspace, kept, strict=True)]
    return _Region(kept, np.maximum.reduce([aside, *least]))


def _divided(workspace: Sequence[Array], region: _Region, rank: int, needed: float) -> tuple[_Region | None, ...]:
    """Choices that need less than ``needed`` on ``rank``, and the others."""
    low = tuple(
        options[needs[options, rank] < needed - _BYTE] for needs, options in zip(workspace, region.kept, strict=True)
    )
    high = [
        needs[options][needs[options, rank] >= needed - _BYTE]
        for needs, options in zip(workspace, region.kept, strict=True)
    ]
    least = np.concatenate(high).min(axis=0)
    return _region(workspace, low, region.aside), _region(workspace, region.kept, np.maximum(region.aside, least))


def _needed(workspace: Sequence[Array], chosen: Assignment) -> Array:
    """By rank: the most that an option needs."""
    return np.asarray(np.max([needs[k] for needs, k in zip(workspace, chosen, strict=True)], axis=0))


def _in_whole(kept: Kept, chosen: Assignment) -> Assignment:
    return tuple(int(options[k]) for options, k in zip(kept, chosen, strict=True))


def _is_close(cost: float, bound: float, gap: float) -> bool:
    return bool(np.isfinite(cost)) and cost <= bound + abs(bound) * gap + ROUNDING * abs(cost)
