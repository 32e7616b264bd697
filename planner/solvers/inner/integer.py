"""The integer program of a labelled graph with budgets, by PuLP and HiGHS: the LP of ``linear`` with binary x.

    minimise    sum c_v[k] x_v[k] + sum c_uv[k, l] y_uv[k, l],   x binary, y >= 0
    such that   one option a node, edges agree with their nodes, memory within the budgets      _constrain, _limit

Only ``sol_status == 1`` counts as optimal (PuLP reports "Optimal" also when time ran out); binaries are rounded, and
the answer is priced again on the graph.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.solvers.inner.labelled import Assignment, LabelledGraph

_PROVED, _FOUND = 1, 2  # PuLP's sol_status: optimal; feasible


@dataclass(frozen=True, slots=True, eq=False)
class IntegerAnswer:
    """What HiGHS found.

    Attributes:
        best: an assignment that fits, None if none was found.
        cost: of ``best``, priced on the graph; infinity without.
        bound: no assignment that fits costs less; infinity if that nothing fits was proved.
        is_proved: whether ``best`` is optimal within the gap asked for, or nothing fits.
    """

    best: Assignment | None
    cost: float
    bound: float
    is_proved: bool


def solve_integer(graph: LabelledGraph, stops: float, gap: float = 0.0) -> IntegerAnswer:
    """The cheapest assignment that fits, or the best found in time.

    Args:
        stops: when to end, by ``time.monotonic``.
    """
    import pulp  # a quarter of a second, and most plans need no integer program

    program = pulp.LpProblem("layouts", pulp.LpMinimize)
    options = [
        {
            k: program.add_variable(f"x_{node}_{k}", 0, 1, pulp.LpInteger)
            for k in np.flatnonzero(np.isfinite(cost)).tolist()
        }
        for node, cost in enumerate(graph.node_cost)
    ]
    if not all(options):
        return IntegerAnswer(None, float("inf"), float("inf"), True)
    pairs = {
        (u, v): {
            (k, l): program.add_variable(f"y_{u}_{v}_{k}_{l}", 0)
            for k in options[u]
            for l in options[v]
            if (u, v) not in graph.edge_cost or np.isfinite(graph.edge_cost[u, v][k, l])
        }
        for u, v in sorted({*graph.edge_cost, *graph.edge_memory})
    }
    terms = [(x, float(graph.node_cost[node][k])) for node, each in enumerate(options) for k, x in each.items()]
    terms += [
        (y, float(graph.edge_cost[edge][pair]))
        for edge, each in pairs.items()
        if edge in graph.edge_cost
        for pair, y in each.items()
    ]
    unit = _unit(graph)
    program.setObjective(pulp.LpAffineExpression([(variable, cost / unit) for variable, cost in terms]))
    _constrain(pulp, program, options, pairs)
    if graph.is_limited:
        _limit(pulp, program, graph, options, pairs)
    solver = pulp.HiGHS(msg=False, timeLimit=max(0.1, stops - time.monotonic()), gapRel=gap)
    program.solve(solver)
    return _answer(graph, program, options, unit, gap)


def _unit(graph: LabelledGraph) -> float:
    """A cost that makes optima of the order of a thousand: HiGHS stops at absolute gaps of 1e-6."""
    least = sum(float(cost[np.isfinite(cost)].min()) for cost in graph.node_cost)
    most = max(float(np.abs(cost[np.isfinite(cost)]).max()) for cost in graph.node_cost)
    return max(abs(least), most, 1e-30) / 1e3


def _constrain(pulp: Any, program: Any, options: Sequence[dict[int, Any]], pairs: dict[Any, dict[Any, Any]]) -> None:
    """One option a node; the pairs of an edge sum to the options of its ends."""
    for each in options:
        program.addConstraint(pulp.lpSum(each.values()) == 1)
    for edge, together in pairs.items():
        for end, node in enumerate(edge):
            by_option: dict[int, list[Any]] = {option: [] for option in options[node]}
            for pair, y in together.items():
                by_option[pair[end]].append(y)
            for option, x in options[node].items():
                program.addConstraint(pulp.lpSum(by_option[option]) == x)


def _limit(
    pulp: Any, program: Any, graph: LabelledGraph, options: Sequence[dict[int, Any]], pairs: dict[Any, dict[Any, Any]]
) -> None:
    """Memory within the budget of each resource, in units of the budget (bytes are too large for tolerances)."""
    for resource, budget in enumerate(graph.budget):
        unit = float(budget) or 1.0
        terms = [
            (x, float(graph.node_memory[node][k, resource]) / unit)
            for node, each in enumerate(options)
            for k, x in each.items()
        ]
        terms += [
            (y, float(graph.edge_memory[edge][(*pair, resource)]) / unit)
            for edge, each in pairs.items()
            if edge in graph.edge_memory
            for pair, y in each.items()
        ]
        program.addConstraint(pulp.LpAffineExpression(terms) <= float(budget) / unit)


def _answer(
    graph: LabelledGraph, program: Any, options: Sequence[dict[int, Any]], unit: float, gap: float
) -> IntegerAnswer:
    infeasible = program.sol_status == -1
    if infeasible:
        return IntegerAnswer(None, float("inf"), float("inf"), True)
    bound = float(program.solverModel.getInfo().mip_dual_bound) * unit
    if program.sol_status not in (_PROVED, _FOUND):
        return IntegerAnswer(None, float("inf"), bound, False)
    best = tuple(max(each, key=lambda k: float(each[k].value() or 0.0)) for each in options)
    best = tuple(int(k) for k in best)
    if not graph.fits(best):
        return IntegerAnswer(None, float("inf"), bound, False)
    cost = graph.cost(best)
    proved = program.sol_status == _PROVED
    return IntegerAnswer(best, cost, cost if proved and not gap else min(bound, cost), proved)
