"""A labelled graph with budgets as one mixed-integer program, by HiGHS.

    minimise    sum c_v[k] x_v[k] + sum c_uv[k, l] y_uv[k, l]                                              ``_costs``
    over        x_v[k] in {0, 1}: node v takes option k;   y_uv[k, l] in [0, 1]: u takes k and v takes l ``MilpColumns``
                W_r in [least workspace, budget_r]: the most that any node needs of resource r
    such that   sum_k x_v[k] = 1                                                 one option a node        ``_nodes``
                sum_l y_uv[k, l] = x_u[k],   sum_k y_uv[k, l] = x_v[l]           pairs agree with nodes   ``_edges``
                sum m_v[k, r] x_v[k] + sum m_uv[k, l, r] y_uv[k, l] + W_r <= budget_r        memory       ``_memory``
                sum_k w_v[k, r] x_v[k] <= W_r                                   workspace of each node    ``_workspace``

With x whole, y is whole as well.  What costs infinity is fixed at 0.  HiGHS stops at an absolute gap of 1e-6 and lets
rows be violated by 1e-6, so costs and budgets are scaled to a thousand; the answer is priced again on the graph, and
one that does not fit there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from planner.solvers.layouts.factor_graph import Array, LabelledGraph, Labelling, NodePair

IndexArray = NDArray[np.intp]
_SCALE = 1e3


@dataclass(frozen=True, slots=True, eq=False)
class IntegerAnswer:
    """What HiGHS found.

    Attributes:
        best: an assignment that fits; None if none was found.
        bound: no assignment that fits costs less; infinity if it is proved that nothing fits.
        num_nodes: of its tree.
    """

    best: Labelling | None
    bound: float
    num_nodes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class MilpColumns:
    """Where the variables are.

    Attributes:
        nodes: by node, the column of each option.
        edges: by edge, the column of each pair of options ``[options of u, options of v]``.
        workspace: by resource; empty if no node takes any.
    """

    nodes: tuple[IndexArray, ...]
    edges: dict[NodePair, IndexArray]
    workspace: IndexArray
    count: int

    @classmethod
    def of(cls, graph: LabelledGraph) -> MilpColumns:
        """One after another."""
        options = graph.num_options
        shapes = [(count,) for count in options] + [(options[u], options[v]) for u, v in graph.edges]
        shapes.append((len(graph.budget) if graph.workspace else 0,))
        sizes = [prod(shape) for shape in shapes]
        ends = np.cumsum(sizes, dtype=np.intp)
        each = zip(ends, sizes, shapes, strict=True)
        *blocks, workspace = (np.arange(end - size, end).reshape(shape) for end, size, shape in each)
        nodes = blocks[: len(options)]
        edges = blocks[len(options) :]
        return cls(tuple(nodes), dict(zip(graph.edges, edges, strict=True)), workspace, int(ends[-1]))


@dataclass(frozen=True, slots=True, eq=False)
class MilpRows:
    """``lower <= sum of value x column <= upper``: coefficients with their row (from 0) and column, limits by row."""

    row: IndexArray
    column: IndexArray
    value: Array
    lower: Array
    upper: Array


def solve_integer(
    graph: LabelledGraph, time_limit_s: float, gap: float = 0.0, most_nodes: int = 1_000_000
) -> IntegerAnswer:
    """The cheapest assignment that fits, within ``gap`` of the bound, or the best found in time and ``most_nodes``."""
    from scipy.sparse import coo_array  # late: a quarter of a second with HiGHS, and most plans need none

    from planner.solvers.integer_program import INFEASIBLE, minimum

    columns = MilpColumns.of(graph)
    rows = _joined([*_nodes(columns), *_edges(columns), *_memory(graph, columns), *_workspace(graph, columns)])
    matrix = coo_array((rows.value, (rows.row, rows.column)), shape=(len(rows.lower), columns.count)).tocsr()
    matrix.eliminate_zeros()
    cost, least, most = _costs(graph, columns)
    unit = max(float(np.abs(cost).max()), abs(float(sum(cost[where].min() for where in columns.nodes))), 1e-30) / _SCALE
    whole = np.zeros(columns.count, dtype=bool)
    whole[np.concatenate(columns.nodes)] = True
    status, bound, variables, nodes = minimum(
        (cost / unit, least, most, whole),
        (matrix, rows.lower, rows.upper),
        time_limit=max(time_limit_s, 0.05),
        mip_rel_gap=gap / (1 + gap),  # HiGHS measures the gap by the cost, we by the bound
        mip_max_nodes=max(1, most_nodes),
    )
    if status == INFEASIBLE:
        return IntegerAnswer(None, bound, nodes)
    if not len(variables):
        return IntegerAnswer(None, bound * unit, nodes)
    best = tuple(int(np.argmax(variables[where])) for where in columns.nodes)
    return IntegerAnswer(best if graph.fits(best) and np.isfinite(graph.cost(best)) else None, bound * unit, nodes)


def _joined(blocks: list[MilpRows]) -> MilpRows:
    """All rows, one after another."""
    first = np.cumsum([0, *(len(block.lower) for block in blocks)])
    names = ("column", "value", "lower", "upper")
    columns = (np.concatenate([getattr(block, name) for block in blocks]) for name in names)
    return MilpRows(np.concatenate([block.row + start for block, start in zip(blocks, first, strict=False)]), *columns)


def _costs(graph: LabelledGraph, columns: MilpColumns) -> tuple[Array, Array, Array]:
    """(cost, least value, most value) of each column."""
    cost, least, most = (np.zeros(columns.count) for _ in range(3))
    for where, costs in zip(columns.nodes, graph.node_cost, strict=True):
        cost[where] = costs
    for edge, costs in graph.edge_cost.items():
        cost[columns.edges[edge]] = costs
    most[np.isfinite(cost)] = 1.0
    cost[np.isinf(cost)] = 0.0
    if graph.workspace:
        unit = _units(graph)
        least[columns.workspace] = graph.least_workspace / unit
        most[columns.workspace] = np.maximum(graph.budget, graph.least_workspace) / unit
    return cost, least, most


def _nodes(columns: MilpColumns) -> Iterator[MilpRows]:
    """Each node takes one option."""
    for where in columns.nodes:
        one = np.ones(1)
        yield MilpRows(np.zeros(len(where), dtype=np.intp), where, np.ones(len(where)), one, one)


def _edges(columns: MilpColumns) -> Iterator[MilpRows]:
    """The pairs of an edge sum to the options of its ends."""
    for (u, v), table in columns.edges.items():
        for pairs, ends in ((table, columns.nodes[u]), (table.T, columns.nodes[v])):
            number = np.arange(len(ends))
            zero = np.zeros(len(ends))
            row = np.concatenate([np.repeat(number, pairs.shape[1]), number])
            value = np.concatenate([np.ones(pairs.size), -np.ones(len(ends))])
            yield MilpRows(row, np.concatenate([pairs.ravel(), ends]), value, zero, zero)


def _memory(graph: LabelledGraph, columns: MilpColumns) -> Iterator[MilpRows]:
    """What options and pairs take of each resource, with the workspace, stays within the budget."""
    held = [(where, usage) for where, usage in zip(columns.nodes, graph.node_memory, strict=False)]
    held += [
        (columns.edges[edge].ravel(), usage.reshape(-1, len(graph.budget))) for edge, usage in graph.edge_memory.items()
    ]
    if graph.workspace:
        held.append((columns.workspace, np.diag(_units(graph))))
    for resource, unit in enumerate(_units(graph) if graph.is_limited else ()):
        column = np.concatenate([where for where, _ in held])
        value = np.concatenate([usage[:, resource] for _, usage in held]) / unit
        budget = graph.budget[[resource]] / unit
        yield MilpRows(np.zeros(len(column), dtype=np.intp), column, value, np.full(1, -inf), budget)


def _workspace(graph: LabelledGraph, columns: MilpColumns) -> Iterator[MilpRows]:
    """The workspace is at least what each node needs; nodes that never need more than all do are left out."""
    units = _units(graph)
    least = graph.least_workspace
    for where, needs in zip(columns.nodes, graph.workspace, strict=False):
        for resource in np.flatnonzero(needs.max(axis=0) > least):
            column = np.append(where, columns.workspace[resource])
            value = np.append(np.maximum(needs[:, resource], least[resource]) / units[resource], -1.0)
            yield MilpRows(np.zeros(len(column), dtype=np.intp), column, value, np.full(1, -inf), np.zeros(1))


def _units(graph: LabelledGraph) -> Array:
    """By resource: the bytes that are 1 in the program."""
    return np.where(graph.budget > 0, graph.budget, 1.0) / _SCALE
