"""The best assignment of a labelled graph, with a proof of how good it is.

By what there is:

    no budget                      elimination: exact                                                   ``elimination``
    a budget                       the Lagrangian dual; its assignments that fit are answers            ``lagrange``
                                   if bound and answer differ, regions of options are bounded alike, freed of what
                                   cannot be better, and solved as integer programs once they are small ``branching``
    too wide to eliminate          the LP relaxation for a bound, then the integer program              ``linear``
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from planner.solvers.inner.branching import search
from planner.solvers.inner.elimination import Order, eliminate, order_of
from planner.solvers.inner.integer import solve_integer
from planner.solvers.inner.labelled import ROUNDING, Assignment, LabelledGraph
from planner.solvers.inner.lagrange import dual
from planner.solvers.inner.linear import relax

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
