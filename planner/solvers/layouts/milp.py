"""The integer program of a labelled graph with budgets, by PuLP and HiGHS: the LP of ``linear`` with binary x.

    minimise    sum c_v[k] x_v[k] + sum c_uv[k, l] y_uv[k, l],   x binary, y >= 0
    such that   one option a node, edges agree with their nodes, memory within the budgets      _constrain, _limit

Only ``sol_status == 1`` counts as optimal (PuLP reports "Optimal" also when time ran out); binaries are rounded, and
the answer is priced again on the graph.

The LP relaxation of a labelled graph, over nodes and edges (the local polytope), by scipy's HiGHS.

    minimise    sum c_v[k] x_v[k] + sum c_uv[k, l] y_uv[k, l],   x, y >= 0
    such that   sum_k x_v[k] = 1                                                     one option a node        _nodes
                sum_l y_uv[k, l] = x_u[k],   sum_k y_uv[k, l] = x_v[l]               edges agree with nodes   _edges
                sum m_v[k] x_v[k] + sum m_uv[k, l] y_uv[k, l] <= budget              memory                   _budget

It needs no narrow graph, and is exact on trees without budgets.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array

from planner.solvers.layouts.factor_graph import Array, Assignment, Edge, LabelledGraph

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


Rows = tuple[NDArray[np.intp], NDArray[np.intp], Array]
"""Entries of a sparse matrix: row, column, value."""


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Where each variable of the program stands.

    Attributes:
        nodes: by node, the column of each option.
        edges: by edge, the column of each pair of options ``[options of u, options of v]``.
    """

    nodes: tuple[NDArray[np.intp], ...]
    edges: dict[Edge, NDArray[np.intp]]
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Relaxation:
    """The relaxation's value (infinity if it is infeasible) and the option that weighs most at each node."""

    bound: float
    rounded: Assignment


def relax(graph: LabelledGraph, time_limit_s: float = 60.0) -> Relaxation:
    """The bound of the LP relaxation; minus infinity if time ran out."""
    columns = columns_of(graph)
    cost = np.zeros(columns.count)
    for node, where in enumerate(columns.nodes):
        cost[where] = graph.node_cost[node]
    for edge, table in columns.edges.items():
        if edge in graph.edge_cost:
            cost[table] = graph.edge_cost[edge]
    allowed = np.isfinite(cost)
    equal, right = _equalities(columns)
    upper = _matrix(_budget(graph, columns), len(graph.budget), columns.count) if graph.is_limited else None
    found = linprog(
        np.where(allowed, cost, 0.0),
        upper,
        graph.budget if graph.is_limited else None,
        equal,
        right,
        np.column_stack([np.zeros(columns.count), np.where(allowed, 1.0, 0.0)]),
        method="highs",
        options={"time_limit": time_limit_s},
    )
    if found.status == 2:
        return Relaxation(float("inf"), (0,) * graph.num_nodes)
    if found.status != 0:
        return Relaxation(-float("inf"), (0,) * graph.num_nodes)
    rounded = tuple(int(np.argmax(found.x[where])) for where in columns.nodes)
    return Relaxation(float(found.fun), rounded)


def columns_of(graph: LabelledGraph) -> Columns:
    """A column for each option of each node and each pair of options of each edge."""
    nodes, edges, count = [], {}, 0
    for options in graph.num_options:
        nodes.append(np.arange(count, count + options))
        count += options
    for u, v in sorted({*graph.edge_cost, *graph.edge_memory}):
        shape = (graph.num_options[u], graph.num_options[v])
        edges[u, v] = np.arange(count, count + shape[0] * shape[1]).reshape(shape)
        count += shape[0] * shape[1]
    return Columns(tuple(nodes), edges, count)


def _equalities(columns: Columns) -> tuple[coo_array, Array]:
    parts: list[Rows] = []
    right: list[float] = []
    for rows, ones in (*_nodes(columns), *_edges(columns)):
        row, column, value = rows
        parts.append((row + len(right), column, value))
        right.extend(ones)
    return _matrix(parts, len(right), columns.count), np.array(right)


def _nodes(columns: Columns) -> Iterator[tuple[Rows, list[float]]]:
    """Each node takes one option."""
    for where in columns.nodes:
        yield (np.zeros(len(where), dtype=np.intp), where, np.ones(len(where))), [1.0]


def _edges(columns: Columns) -> Iterator[tuple[Rows, list[float]]]:
    """The pairs of an edge sum to the options of its ends."""
    for (u, v), table in columns.edges.items():
        for pairs, ends in ((table, columns.nodes[u]), (table.T, columns.nodes[v])):
            number = np.arange(len(ends))
            rows = np.concatenate([np.repeat(number, pairs.shape[1]), number])
            values = np.concatenate([np.ones(pairs.size), -np.ones(len(ends))])
            yield (rows, np.concatenate([pairs.ravel(), ends]), values), [0.0] * len(ends)


def _budget(graph: LabelledGraph, columns: Columns) -> list[Rows]:
    """What options and pairs take of each resource."""
    taken = [(columns.nodes[node], memory) for node, memory in enumerate(graph.node_memory)]
    taken += [(columns.edges[edge].ravel(), memory.reshape(-1, len(graph.budget))) for edge, memory in _pairs(graph)]
    return [
        (np.full(len(where), resource, dtype=np.intp), where, memory[:, resource])
        for where, memory in taken
        for resource in range(len(graph.budget))
    ]


def _pairs(graph: LabelledGraph) -> Iterator[tuple[Edge, Array]]:
    yield from graph.edge_memory.items()


def _matrix(parts: list[Rows], num_rows: int, num_columns: int) -> coo_array:
    row, column, value = (np.concatenate(each) for each in zip(*parts, strict=True))
    return coo_array((value, (row, column)), shape=(num_rows, num_columns))
