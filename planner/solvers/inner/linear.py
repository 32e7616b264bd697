"""The LP relaxation of a labelled graph, over nodes and edges (the local polytope), by scipy's HiGHS.

    minimise    sum c_v[k] x_v[k] + sum c_uv[k, l] y_uv[k, l],   x, y >= 0
    such that   sum_k x_v[k] = 1                                                     one option a node        _nodes
                sum_l y_uv[k, l] = x_u[k],   sum_k y_uv[k, l] = x_v[l]               edges agree with nodes   _edges
                sum m_v[k] x_v[k] + sum m_uv[k, l] y_uv[k, l] <= budget              memory                   _budget

It needs no narrow graph, and is exact on trees without budgets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array

from planner.solvers.inner.labelled import Array, Assignment, Edge, LabelledGraph

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
