"""Branch and bound over options, where a labelled graph with budgets is too large for an integer program.

A region keeps some options of each node.  Its Lagrangian dual bounds it, min-marginals under the dual's prices take
away options that cannot beat the best answer, and what is small by then goes to HiGHS.  Else the node with most options
is divided: the better half of them (by min-marginal) and the rest.  The region of least bound is next, so that the
least bound of the open regions holds for all; HiGHS may overrun its time on large programs, and only sees small ones.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.solvers.inner.elimination import Order, eliminate
from planner.solvers.inner.integer import solve_integer
from planner.solvers.inner.labelled import ROUNDING, Assignment, LabelledGraph
from planner.solvers.inner.lagrange import Dual, dual
from planner.solvers.inner.polish import polished

SMALL_PROGRAM = 25_000
"""Pairs of options, over all edges, that an integer program may have."""

_HIGHER_PRICES = (1.0, 1.005, 1.01, 1.02, 1.04, 1.08, 1.15, 1.3, 1.6, 2.5)

Kept = list[NDArray[np.intp]]
"""The options of each node, by number in the whole graph."""


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Assignments that take kept options.

    Attributes:
        graph: of the kept options alone.
        marginals: of each kept option, a lower bound of what assignments with it cost.
    """

    kept: Kept
    graph: LabelledGraph
    marginals: tuple[NDArray[np.float64], ...]
    bound: float


@dataclass(slots=True, eq=False)
class Search:
    """The best answer so far and what is still open.

    Attributes:
        cost: of ``best``; infinity without.
    """

    graph: LabelledGraph
    order: Order
    stops: float
    gap: float
    best: Assignment | None = None
    cost: float = float("inf")

    def run(self, root: Dual) -> float:
        """Searches until the bound is met or time is up: the bound of all that is left open.

        Args:
            root: the dual of the whole graph.
        """
        ticket = itertools.count()
        waiting: list[tuple[float, int, Region]] = []
        given_up = float("inf")

        def push(region: Region | None) -> None:
            if region is not None:
                heapq.heappush(waiting, (region.bound, next(ticket), region))

        push(self._region([np.arange(count) for count in self.graph.num_options], self.graph, root))
        while waiting:
            bound, _, region = waiting[0]
            if self._is_close(min(bound, given_up)) or time.monotonic() >= self.stops:
                return min(bound, given_up, self.cost)
            heapq.heappop(waiting)
            if _num_pairs(region.graph) <= SMALL_PROGRAM or max(region.graph.num_options) == 1:
                given_up = min(given_up, self._finish(region))
                continue
            for kept in _halves(region):
                part = self.graph.restricted(kept)
                push(self._region(kept, part, dual(part, self.order)))
        return min(given_up, self.cost)

    def _region(self, kept: Kept, graph: LabelledGraph, bounded: Dual) -> Region | None:
        """The region less what cannot beat the best answer; None if nothing of it can."""
        if np.isinf(bounded.bound):
            return None
        self._learn(kept, graph, bounded)
        limit = self.cost - ROUNDING * abs(self.cost) if np.isfinite(self.cost) else np.inf
        if bounded.bound >= limit:
            return None
        worth = float(bounded.prices @ graph.budget)
        marginals = [each - worth for each in eliminate(graph.priced(1.0, bounded.prices), self.order).min_marginals()]
        stay = [np.flatnonzero(each < limit) for each in marginals]
        if not all(len(options) for options in stay):
            return None
        smaller = [options[chosen] for options, chosen in zip(kept, stay, strict=True)]
        rest = tuple(each[chosen] for each, chosen in zip(marginals, stay, strict=True))
        return Region(smaller, graph.restricted(stay), rest, bounded.bound)

    def _learn(self, kept: Kept, graph: LabelledGraph, bounded: Dual) -> None:
        """Answers near the dual: prices somewhat higher lead to assignments that fit."""
        near = (eliminate(graph.priced(1.0, bounded.prices * times), self.order).assignment for times in _HIGHER_PRICES)
        for found in {x for x in (bounded.best, *near) if x is not None and graph.fits(x)}:
            self._offer(kept, polished(graph, found))

    def _finish(self, region: Region) -> float:
        """Solves a small region: the bound of what remains unknown of it, infinity if nothing does."""
        answer = solve_integer(region.graph, self.stops, self.gap)
        if answer.best is not None:
            self._offer(region.kept, answer.best)
        return float("inf") if answer.is_proved and not self.gap else max(region.bound, answer.bound)

    def _offer(self, kept: Kept, found: Assignment) -> None:
        best = tuple(int(options[k]) for options, k in zip(kept, found, strict=True))
        cost = self.graph.cost(best)
        if cost < self.cost and self.graph.fits(best):
            self.best, self.cost = best, cost

    def _is_close(self, bound: float) -> bool:
        return bool(np.isfinite(self.cost)) and self.cost <= bound + abs(bound) * self.gap + ROUNDING * abs(self.cost)


def search(graph: LabelledGraph, order: Order, bounded: Dual, stops: float, gap: float) -> Dual:
    """The dual with the best answer and bound that branching finds; a bound of infinity if nothing fits.

    Args:
        stops: when to end, by ``time.monotonic``.
    """
    found = Search(graph, order, stops, gap, bounded.best, bounded.cost)
    bound = max(bounded.bound, found.run(bounded))
    return replace(bounded, best=found.best, cost=found.cost, bound=bound)


def _halves(region: Region) -> tuple[Kept, Kept]:
    node = max(range(len(region.kept)), key=lambda v: len(region.kept[v]))
    ordered = np.argsort(region.marginals[node], kind="stable")
    middle = len(ordered) // 2
    better, rest = list(region.kept), list(region.kept)
    better[node] = np.sort(region.kept[node][ordered[:middle]])
    rest[node] = np.sort(region.kept[node][ordered[middle:]])
    return better, rest


def _num_pairs(graph: LabelledGraph) -> int:
    options: Sequence[int] = graph.num_options
    return sum(options[u] * options[v] for u, v in {*graph.edge_cost, *graph.edge_memory})
