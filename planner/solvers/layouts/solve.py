"""The best assignment of a labelled graph, with a proof of how good it is.

    nothing is limited, or the best of all fits     elimination: exact                       ``variable_elimination``
    a budget binds                                  restricted integer programs, see below   ``milp``
    too wide to eliminate                           one integer program of the whole graph   ``milp``

A *restricted program* is that of the graph with few options of each node.  Prices p >= 0 of memory (Lagrange
multipliers) give every option a bound by elimination, the min-marginal of the graph that costs c + p . m, less
p . budget:  no assignment that fits and takes the option costs less.  The program has the options of least bound, as
many as make a few thousand pairs.  An assignment beyond it takes an option beyond it, so that

    optimum  >=  min(bound of the restricted program, least bound of an option beyond it)

and its best is the optimum if it costs no more than that.  Else the next program is larger, less the options whose
bound is above the best cost so far.

Why not one program of the whole graph: it has a column for every pair of options of neighbours, up to 863,014 for
ResNet-50 on 16 devices, and HiGHS overruns its time there.  ``docs/decisions/0018`` has the figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from planner.ir.plan import PROVEN, TIME_LIMIT, WITHIN_GAP
from planner.solvers.budget import NUMBER_S, Budget, part_of_current
from planner.solvers.layouts.factor_graph import ROUNDING, Array, Kept, LabelledGraph, Labelling
from planner.solvers.layouts.milp import solve_integer
from planner.solvers.layouts.variable_elimination import Elimination, EliminationOrder, eliminate, order_of

INFEASIBLE = "infeasible"

MOST_PAIRS = (3_000, 12_000, 25_000)
"""Pairs of options, over all edges, of one restricted program after another."""

_PAIR_S = 1e-4
_NODE_S = 2e-6
"""Work that a program takes for each of its pairs: at its root, and at each further node of HiGHS's tree."""

_ROUNDS = 60

_PASSES = 4
"""Times that elimination looks at each entry of its tables, about."""


@dataclass(frozen=True, slots=True)
class CertifiedAssignment:
    """The best assignment found and its certificate.

    Attributes:
        assignment: None if nothing fits or nothing was found in time.
        cost: infinity without an assignment.
        bound: no assignment that fits costs less; infinity if nothing fits.
        status: ``proven``, ``within gap``, ``time limit`` or ``infeasible``.
    """

    assignment: Labelling | None
    cost: float
    bound: float
    status: str


def minimise(graph: LabelledGraph, within: Budget | None = None, gap: float = 0.0) -> CertifiedAssignment:
    """The cheapest assignment of ``graph`` that fits, within ``gap`` of the bound.

    Args:
        within: 60 seconds by default.
    """
    search = _AssignmentSearch(graph, within or part_of_current(60.0), gap)
    order = order_of(graph)
    if not order.is_narrow:
        search.bound = sum(float(table.min()) for table in (*graph.node_cost, *graph.edge_cost.values()))
        search.solve_part([np.arange(count) for count in graph.num_options])
        return search.answer()
    search.budget.spend(_PASSES * NUMBER_S * order.all_tables)
    free = eliminate(graph, order)
    search.bound = free.cost
    if np.isfinite(free.cost):
        search.offer(free.assignment)
    if search.is_done:
        return search.answer()
    search.graph = graph.without_slack_resources()
    search.bound, marginals, met = lagrangian(search.graph, order, free, search.budget)
    for assignment in met:
        search.offer(assignment)
    search.solve_restricted(marginals)
    return search.answer()


@dataclass(slots=True, eq=False)
class _AssignmentSearch:
    """The best answer so far and what is known of all others.

    Attributes:
        cost: of ``best``; infinity without.
        bound: no assignment that fits costs less.
    """

    graph: LabelledGraph
    budget: Budget
    gap: float
    best: Labelling | None = None
    cost: float = inf
    bound: float = float("-inf")

    @property
    def is_done(self) -> bool:
        """Whether the cost is within the gap of the bound, or nothing fits."""
        if np.isinf(self.cost):
            return bool(np.isposinf(self.bound))
        return self.cost <= self.bound + abs(self.bound) * self.gap + ROUNDING * abs(self.cost)

    def offer(self, assignment: Labelling) -> None:
        """Takes ``assignment`` if it fits and costs less."""
        cost = self.graph.cost(assignment)
        if cost < self.cost and self.graph.fits(assignment):
            self.best = assignment
            self.cost = cost

    def solve_restricted(self, marginals: tuple[Array, ...]) -> None:
        """Solves restricted programs of more and more options, until the best is proven or time is up."""
        for most_pairs in MOST_PAIRS:
            level = min(_level(self.graph, marginals, most_pairs), self.cost)
            kept = [np.flatnonzero(each <= max(level, float(each.min()))) for each in marginals]
            beyond = min(float(np.min(each, initial=inf, where=each > level)) for each in marginals)
            if self.is_done or not self.solve_part(kept, beyond):
                return

    def solve_part(self, kept: Kept, beyond: float = inf) -> bool:
        """Solves the program of the options ``kept``, unless there is no time; all others cost at least ``beyond``."""
        pairs = _num_pairs(self.graph, [len(options) for options in kept])
        if not self.budget.allows(_PAIR_S * pairs):
            return False
        most_nodes = int(self.budget.left_s / (_NODE_S * max(1, pairs)))
        part = solve_integer(self.graph.restricted(kept), self.budget.clock_s, self.gap, most_nodes)
        self.budget.spend((_PAIR_S + _NODE_S * part.num_nodes) * pairs)
        if part.best is not None:
            self.offer(tuple(int(options[k]) for options, k in zip(kept, part.best, strict=True)))
        self.bound = max(self.bound, min(part.bound, beyond, self.cost))
        return True

    def answer(self) -> CertifiedAssignment:
        """What is known."""
        if self.best is None:
            return CertifiedAssignment(None, self.cost, self.bound, INFEASIBLE if self.is_done else TIME_LIMIT)
        exact = self.cost <= self.bound + ROUNDING * abs(self.cost)
        status = PROVEN if exact else WITHIN_GAP if self.is_done else TIME_LIMIT
        return CertifiedAssignment(self.best, self.cost, min(self.bound, self.cost), status)


def _level(graph: LabelledGraph, marginals: tuple[Array, ...], most_pairs: int) -> float:
    """The highest bound of an option in a restricted program of at most that many pairs."""
    levels = np.unique(np.concatenate(marginals))
    low = 0
    high = int(np.isfinite(levels).sum()) - 1
    while low < high:
        middle = (low + high + 1) // 2
        fits = _num_pairs(graph, [int(np.sum(each <= levels[middle])) for each in marginals]) <= most_pairs
        low, high = (middle, high) if fits else (low, middle - 1)
    return float(levels[low])


def _num_pairs(graph: LabelledGraph, options: Sequence[int]) -> int:
    """Pairs of options of neighbours, by how many options nodes have."""
    return sum(options[u] * options[v] for u, v in graph.edges)


def lagrangian(
    graph: LabelledGraph, order: EliminationOrder, free: Elimination, within: Budget
) -> tuple[float, tuple[Array, ...], tuple[Labelling, ...]]:
    """A bound of what fits, infinity if nothing does; by node a bound of what takes each option; assignments met.

    With b what the budget leaves beside the least workspace, by cutting planes (Kelley 1960),

        g(p) = min over x of  c(x) + p . (m(x) - b)  <=  the optimum            for all prices p >= 0, by elimination

    is concave, and each x met is a plane above it: g(p) <= c(x) + p . (m(x) - b).  The highest point of all planes so
    far (a small LP) is the next p; when g reaches it, g is largest.

    Args:
        free: what elimination says without prices.
        within: when it is over the best prices so far must do.
    """
    from scipy.optimize import linprog

    graph = replace(graph, workspace=(), budget=graph.budget - graph.least_workspace)
    unit = np.where(graph.budget > 0, graph.budget, 1.0)
    tables = (*graph.node_cost, *graph.edge_cost.values())
    dearest = sum(float(np.max(table, initial=0.0, where=np.isfinite(table))) for table in tables)
    limits = [(0.0, 1e4 * max(dearest, abs(free.cost)))] * len(unit) + [(None, None)]
    best = free.cost
    at_best = free
    prices = np.zeros(len(unit))
    met: dict[Labelling, tuple[float, Array]] = {}
    asked = free
    for _ in range(_ROUNDS):
        if asked.assignment in met or within.is_over:
            break
        within.spend(_PASSES * NUMBER_S * order.all_tables)
        met[asked.assignment] = graph.cost(asked.assignment), (graph.memory(asked.assignment) - graph.budget) / unit
        planes = np.array([[*(-excess), 1.0] for _, excess in met.values()])
        highest = linprog([0.0] * len(unit) + [-1.0], planes, [cost for cost, _ in met.values()], bounds=limits)
        if highest.status != 0:
            break
        now = np.clip(highest.x[:-1], 0.0, None) / unit
        asked = eliminate(graph.priced(now), order)
        value = asked.cost - float(now @ graph.budget)
        if value > best:
            best = value
            at_best = asked
            prices = now
        if best > dearest * (1 + 1e-6):
            return inf, tuple(np.full(count, inf) for count in graph.num_options), ()
        if -highest.fun <= best + ROUNDING * dearest:
            break
    return (
        best,
        tuple(each - float(prices @ graph.budget) for each in at_best.min_marginals()),
        (*met, asked.assignment),
    )
