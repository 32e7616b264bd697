"""The best assignment of a labelled graph, with a proof of how good it is.

By what there is:

    no budget                      elimination: exact                                          ``variable_elimination``
    a budget                       the Lagrangian dual; its assignments that fit are answers    ``branch_and_bound``
                                   if bound and answer differ, regions of options are bounded alike, freed of what
                                   cannot be better, and solved as integer programs once they are small
    too wide to eliminate          the LP relaxation for a bound, then the integer program                ``milp``

Workspace beside memory: what a choice takes is no sum, but the most that any one of its options needs.

    minimise    cost(x)    subject to    memory_r(x) + max over nodes v of w_v(x_v, r)  <=  budget_r   for every rank r

A region keeps some options of each node and sets workspace aside: all its choices need at least so much.  With the
rest as the budget the region is a labelled graph (:func:`minimise`), whose bound holds for the region.  If the
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

from planner.solvers.layouts.branch_and_bound import dual, search
from planner.solvers.layouts.factor_graph import ROUNDING, Array, Assignment, LabelledGraph
from planner.solvers.layouts.milp import relax, solve_integer
from planner.solvers.layouts.variable_elimination import Order, eliminate, order_of

PROVEN, WITHIN_GAP, TIME_LIMIT, INFEASIBLE = "proven", "within gap", "time limit", "infeasible"


@dataclass(frozen=True, slots=True)
class Answer:
    """The best assignment found and its certificate.

    Attributes:
        assignment: None if nothing fits or nothing was found in time.
        cost: infinity without an assignment.
        bound: no assignment that fits costs less; infinity if nothing fits.
        status: ``proven``, ``within gap``, ``time limit`` or ``infeasible``.
        method: what closed the gap, in words.
        leanest: if nothing fits, the assignment that exceeds the budgets least of those that were looked at.
    """

    assignment: Assignment | None
    cost: float
    bound: float
    status: str
    method: str
    leanest: Assignment | None = None

    @property
    def gap(self) -> float:
        """Cost / bound - 1."""
        if self.cost <= self.bound:
            return 0.0
        return self.cost / self.bound - 1 if self.bound > 0 else float("inf")


def minimise(graph: LabelledGraph, time_limit_s: float = 60.0, gap: float = 0.0, order: Order | None = None) -> Answer:
    """The cheapest assignment of ``graph`` that fits, within ``gap`` of the bound.

    Args:
        order: of elimination, if it is known (graphs with equal edges and numbers of options share it).
    """
    started = time.monotonic()
    order = order or order_of(graph)
    if not order.is_narrow:
        return _wide(graph, started + time_limit_s, gap)
    if not graph.is_limited:
        found = eliminate(graph, order)
        if np.isinf(found.cost):
            return Answer(None, found.cost, found.cost, INFEASIBLE, "elimination")
        return Answer(found.assignment, graph.cost(found.assignment), found.cost, PROVEN, "elimination")
    graph = graph.without_slack_resources()
    bounded = dual(graph, order)
    if np.isinf(bounded.bound):
        return Answer(None, float("inf"), float("inf"), INFEASIBLE, "Lagrangian dual", bounded.leanest)
    if bounded.best is not None and _close(bounded.cost, bounded.bound, gap):
        return _stated(bounded.best, bounded.cost, bounded.bound, True, "Lagrangian dual")
    closed = search(graph, order, bounded, started + time_limit_s, gap)
    method = "Lagrangian dual, branching and integer programs"
    if closed.best is None:
        status = INFEASIBLE if np.isinf(closed.bound) else TIME_LIMIT
        return Answer(None, float("inf"), closed.bound, status, method, bounded.leanest)
    return _stated(closed.best, closed.cost, closed.bound, _close(closed.cost, closed.bound, gap), method)


def _wide(graph: LabelledGraph, stops: float, gap: float) -> Answer:
    relaxed = relax(graph, max(0.1, stops - time.monotonic()))
    method = "LP relaxation and integer program"
    if np.isposinf(relaxed.bound):
        return Answer(None, float("inf"), float("inf"), INFEASIBLE, "LP relaxation")
    rounded = graph.cost(relaxed.rounded) if graph.fits(relaxed.rounded) else float("inf")
    if _close(rounded, relaxed.bound, gap):
        return _stated(relaxed.rounded, rounded, relaxed.bound, True, "LP relaxation")
    answer = solve_integer(graph, stops, gap)
    best, cost = (answer.best, answer.cost) if answer.cost <= rounded else (relaxed.rounded, rounded)
    bound = max(relaxed.bound, answer.bound)
    if best is None or np.isinf(cost):
        return Answer(None, float("inf"), bound, INFEASIBLE if answer.is_proved else TIME_LIMIT, method)
    return _stated(best, cost, min(bound, cost), answer.is_proved or _close(cost, bound, gap), method)


def stated(best: Assignment, cost: float, bound: float, gap: float, method: str) -> Answer:
    """The answer ``best`` of that cost, where nothing that fits costs less than ``bound``."""
    return _stated(best, cost, bound, _close(cost, bound, gap), method)


def _stated(best: Assignment, cost: float, bound: float, is_done: bool, method: str) -> Answer:
    exact = _close(cost, bound, 0.0)
    status = PROVEN if exact else WITHIN_GAP if is_done else TIME_LIMIT
    return Answer(best, cost, min(bound, cost), status, method)


def _close(cost: float, bound: float, gap: float) -> bool:
    return bool(np.isfinite(cost)) and cost <= bound + abs(bound) * gap + ROUNDING * max(abs(cost), 1e-300)


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
