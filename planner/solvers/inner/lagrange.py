"""The Lagrangian dual of a labelled graph with budgets, by cutting planes (Kelley 1960).

    g(p) = min over x of  c(x) + p . (m(x) - b)  <=  the optimum            for all prices p >= 0, by elimination

is concave, and each x found is a plane above it: g(p) <= c(x) + p . (m(x) - b).  The highest point of all planes so far
(a small LP) is the next p; when g reaches it, g is largest.  With exact minimisation inside, the bound is that of the
LP over all assignments, at least that of the LP over nodes and edges (``linear``).  Assignments met on the way that fit
are answers.  First the prices alone are asked, without costs (p on the simplex): a g above 0 proves that nothing fits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from planner.solvers.inner.elimination import Elimination, Order, eliminate
from planner.solvers.inner.labelled import ROUNDING, Array, Assignment, LabelledGraph

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
