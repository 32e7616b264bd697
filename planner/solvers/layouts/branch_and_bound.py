"""Branch and bound over options, where a labelled graph with budgets is too large for an integer program.

A region keeps some options of each node.  Its Lagrangian dual bounds it, min-marginals under the dual's prices take
away options that cannot beat the best answer, and what is small by then goes to HiGHS.  Else the node with most options
is divided: the better half of them (by min-marginal) and the rest.  The region of least bound is next, so that the
least bound of the open regions holds for all; HiGHS may overrun its time on large programs, and only sees small ones.

The Lagrangian dual of a labelled graph with budgets, by cutting planes (Kelley 1960).

    g(p) = min over x of  c(x) + p . (m(x) - b)  <=  the optimum            for all prices p >= 0, by elimination

is concave, and each x found is a plane above it: g(p) <= c(x) + p . (m(x) - b).  The highest point of all planes so far
(a small LP) is the next p; when g reaches it, g is largest.  With exact minimisation inside, the bound is that of the
LP over all assignments, at least that of the LP over nodes and edges (``linear``).  Assignments met on the way that fit
are answers.  First the prices alone are asked, without costs (p on the simplex): a g above 0 proves that nothing fits.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from planner.solvers.layouts.factor_graph import ROUNDING, Array, Assignment, LabelledGraph, polished
from planner.solvers.layouts.milp import solve_integer
from planner.solvers.layouts.variable_elimination import Elimination, Order, eliminate

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


_ROUNDS = 60


@dataclass(frozen=True, slots=True, eq=False)
class Dual:
    """What the dual says.

    Attributes:
        bound: no assignment that fits costs less; infinity if none fits.
        prices: per unit of each resource, where the bound was found.
        best: the cheapest assignment met that fits, None if none was met.
        cost: of ``best``.
        leanest: the assignment that exceeds its budgets least, of those met.
    """

    bound: float
    prices: Array
    best: Assignment | None
    cost: float
    leanest: Assignment


@dataclass(slots=True, eq=False)
class _Search:
    """Assignments met so far, each with its cost and its excess over the budgets (in units of ``scale``)."""

    graph: LabelledGraph
    order: Order
    scale: Array
    costs: list[float]
    excesses: list[Array]
    met: list[Assignment]

    def ask(self, cost_weight: float, prices: Array) -> float:
        """G at ``prices`` (per unit of scaled memory), or its like without costs."""
        found = self._minimum(cost_weight, prices)
        if found.assignment not in self.met:
            self.met.append(found.assignment)
            self.costs.append(self.graph.cost(found.assignment))
            self.excesses.append((self.graph.memory(found.assignment) - self.graph.budget) / self.scale)
        return found.cost - float(prices @ (self.graph.budget / self.scale))

    def _minimum(self, cost_weight: float, prices: Array) -> Elimination:
        return eliminate(self.graph.priced(cost_weight, prices / self.scale), self.order)

    def fitting(self) -> tuple[Assignment | None, float]:
        """The cheapest assignment that fits."""
        fits = [(cost, x) for cost, x in zip(self.costs, self.met, strict=True) if self.graph.fits(x)]
        cost, best = min(fits, default=(float("inf"), None), key=lambda pair: pair[0])
        return best, cost

    def leanest(self) -> Assignment:
        """The assignment that exceeds its budgets least."""
        return self.met[min(range(len(self.met)), key=lambda index: float(self.excesses[index].max()))]


def dual(graph: LabelledGraph, order: Order) -> Dual:
    """The best Lagrangian bound of ``graph``, which has budgets and may be eliminated in ``order``."""
    search = _Search(graph, order, np.where(graph.budget > 0, graph.budget, 1.0), [], [], [])
    free = search.ask(1.0, np.zeros(len(graph.budget)))
    if np.isinf(free):
        return Dual(free, np.zeros(len(graph.budget)), None, free, search.met[0])
    if not graph.fits(search.met[0]) and not _can_fit(search):
        return Dual(float("inf"), np.zeros(len(graph.budget)), None, float("inf"), search.leanest())
    bound, prices = _highest(search, free)
    best, cost = search.fitting()
    return Dual(min(bound, cost), prices / search.scale, best, cost, search.leanest())


def _can_fit(search: _Search) -> bool:
    """False if it is proved that nothing fits; tries to meet an assignment that does."""
    resources = len(search.scale)
    prices = np.full(resources, 1.0 / resources)
    for _ in range(_ROUNDS):
        value = search.ask(0.0, prices)
        if value > ROUNDING:
            return False
        if any(search.graph.fits(x) for x in search.met):
            return True
        # max eta: eta <= p . excess for each assignment met, p on the simplex
        rows = np.hstack([-np.array(search.excesses), np.ones((len(search.met), 1))])
        simplex = np.append(np.ones(resources), 0.0)[None, :]
        bounds = [(0, None)] * resources + [(None, None)]
        cost = np.append(np.zeros(resources), -1.0)
        found = linprog(cost, rows, np.zeros(len(rows)), simplex, [1.0], bounds, method="highs")
        if found.status != 0 or -found.fun <= value + ROUNDING:
            break
        prices = np.maximum(found.x[:-1], 0.0)
    return True


def _highest(search: _Search, free: float) -> tuple[float, Array]:
    resources = len(search.scale)
    best_prices, best = np.zeros(resources), free
    spread = max(search.costs) - min(search.costs) + abs(free) + 1e-12
    # Prices far beyond the spread of costs say no more than memory alone does.
    largest = 1e4 * spread
    for _ in range(_ROUNDS):
        rows = np.hstack([-np.array(search.excesses), np.ones((len(search.met), 1))])
        bounds = [(0.0, largest)] * resources + [(None, None)]
        cost = np.append(np.zeros(resources), -1.0)
        found = linprog(cost, rows, np.array(search.costs), None, None, bounds, method="highs")
        if found.status != 0:
            break
        prices = np.clip(found.x[:-1], 0.0, largest)
        num_met = len(search.met)
        value = search.ask(1.0, prices)
        if value > best:
            best, best_prices = value, prices
        if -found.fun <= best + ROUNDING * spread or len(search.met) == num_met:
            break
    return best, best_prices
