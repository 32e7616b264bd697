"""The least cost of every span [i, j) of a labelled graph at once, for a search over stages, by (min, +) products.

Nodes are in topological order.  Of the nodes before j those with an edge to j or later form the frontier; let
T[i][x] be the least cost of the nodes of [i, j) whose frontier takes the options x.  Adding node j is

    T'[i][x, k] = T[i][x] + c_j(k) + sum of c_uj(x_u, k) over edges (u, j) with u >= i;   T'[j][k] = c_j(k)

then what leaves the frontier is minimised away; the least entry of T'[i] is the cost of [i, j + 1).  All starts i move
together, as rows of one table, in which a row does not depend on frontier nodes before its start.  On a chain a step is
one product of a matrix with the edge's table; n nodes with k options and frontiers of w nodes take O(n^2 k^(w + 1)).

Where stages may end at cut vertices alone, :func:`chain_of` first solves the blocks between them, equal blocks once.

Layouts by shortest paths: the search of Dryden et al. (IPDPS 2019, section V-C), exact on chains alone.

A path through the network is a chain of layers, and the cheapest options along it are a shortest path in the graph of
(layer, option).  Branches are handled one after another: the most expensive path (each layer at its cheapest) first;
what it chose stays; then the most expensive path of the layers that are left, whose edges to layers already chosen
count; and so on until every layer has an option.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from planner.solvers.layouts.factor_graph import Array, Assignment, LabelledGraph
from planner.solvers.layouts.variable_elimination import LARGEST_TABLE, eliminate, least_over


def by_shortest_paths(graph: LabelledGraph) -> Assignment:
    """An assignment of ``graph``, budgets ignored."""
    chosen: dict[int, int] = {}
    while len(chosen) < graph.num_nodes:
        path = _longest_path(graph, chosen)
        chosen.update(zip(path, _shortest(graph, path, chosen), strict=True))
    return tuple(chosen[node] for node in range(graph.num_nodes))


def _longest_path(graph: LabelledGraph, chosen: dict[int, int]) -> list[int]:
    """The most expensive path among nodes without an option, each at its cheapest; nodes are in topological order."""
    length = [float(cost.min()) for cost in graph.node_cost]
    before: dict[int, int] = {}
    total: dict[int, float] = {}
    edges: dict[int, list[int]] = {}
    for u, v in graph.edge_cost:
        edges.setdefault(v, []).append(u)
    for node in range(graph.num_nodes):
        if node in chosen:
            continue
        open_before = [u for u in edges.get(node, ()) if u not in chosen]
        longest = max(open_before, key=lambda u: (total[u], -u), default=None)
        total[node] = length[node]
        if longest is not None:
            before[node] = longest
            total[node] += total[longest]
    path = [max(total, key=lambda node: (total[node], node))]
    while path[-1] in before:
        path.append(before[path[-1]])
    return path[::-1]


def _shortest(graph: LabelledGraph, path: list[int], chosen: dict[int, int]) -> list[int]:
    costs = [_with_neighbours(graph, node, chosen) for node in path]
    came: list[Array] = []
    least = costs[0]
    for u, v, cost in zip(path, path[1:], costs[1:], strict=False):
        table = least[:, None] + graph.edge_cost[u, v]
        came.append(table.argmin(axis=0))
        least = table.min(axis=0) + cost
    found = [int(np.argmin(least))]
    for step in reversed(came):
        found.append(int(step[found[-1]]))
    return found[::-1]


def _with_neighbours(graph: LabelledGraph, node: int, chosen: dict[int, int]) -> Array:
    """The node's costs, with its edges to nodes that have an option."""
    cost = graph.node_cost[node].copy()
    for (u, v), table in graph.edge_cost.items():
        if v == node and u in chosen:
            cost += table[chosen[u]]
        elif u == node and v in chosen:
            cost += table[:, chosen[v]]
    return cost


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Least costs of all spans of a graph without budgets.

    Attributes:
        cost: ``[i, j]``: of nodes ``i ... j - 1``; 0 where empty, infinity where nothing is allowed (or i > j).
    """

    graph: LabelledGraph
    cost: Array

    def assignment(self, first: int, last: int) -> Assignment:
        """Options of the nodes ``first ... last - 1`` that cost ``cost[first, last]``."""
        return eliminate(self.graph.part(range(first, last))).assignment


def all_spans(graph: LabelledGraph, starts: Collection[int] | None = None, longest: int = 0) -> Spans:
    """The cost of every span.

    Args:
        starts: where spans may start; everywhere if None.
        longest: most nodes of a span; 0: any.

    Raises:
        MemoryError: the frontier's table is too large (the graph is not chain-like).
    """
    count = graph.num_nodes
    cost = np.full((count + 1, count + 1), np.inf)
    np.fill_diagonal(cost, 0.0)
    last_reader = _last_readers(graph)
    earlier = _earlier(graph)
    allowed = np.zeros(count, dtype=bool)
    allowed[list(range(count) if starts is None else starts)] = True
    rows = np.zeros(0, dtype=np.intp)
    frontier: tuple[int, ...] = ()
    table = np.zeros((0,))
    for node in range(count):
        if longest:
            kept = rows > node - longest
            rows, table = rows[kept], table[kept]
        if allowed[node]:
            rows = np.append(rows, node)
            table = np.concatenate([table, np.zeros((1, *table.shape[1:]))])
        if not len(rows):
            continue
        _check_size(len(rows), [*(graph.num_options[u] for u in frontier), graph.num_options[node]])
        table = _added(graph, table, rows, frontier, node, earlier[node])
        frontier = (*frontier, node)
        gone = tuple(axis + 1 for axis, u in enumerate(frontier) if last_reader[u] <= node)
        if gone:
            table = table.min(axis=gone)
            frontier = tuple(u for u in frontier if last_reader[u] > node)
        cost[rows, node + 1] = table.reshape(len(rows), -1).min(axis=1)
    return Spans(graph, cost)


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """A graph seen as a chain of cut vertices, blocks between them solved.

    Attributes:
        ends: the cut vertices, ascending; block b holds the nodes after ``ends[b - 1]`` up to ``ends[b]``.
        entry: by block, ``[options of its end]``: its least cost if nothing comes before it.
        step: by block (None for the first), ``[options of the end before, options of its end]``.
        num_solved: blocks that were solved; the others equal one of them.
    """

    graph: LabelledGraph
    ends: tuple[int, ...]
    entry: tuple[Array, ...]
    step: tuple[Array | None, ...]
    num_solved: int

    def spans(self) -> Array:
        """``[a, b]``: least cost of the blocks ``a ... b - 1``."""
        count = len(self.ends)
        cost = np.full((count + 1, count + 1), np.inf)
        np.fill_diagonal(cost, 0.0)
        table = np.zeros((0, 0))
        for block, (entry, step) in enumerate(zip(self.entry, self.step, strict=True)):
            rows = entry[None, :]
            table = rows if step is None else np.concatenate([product(table, step), rows])
            cost[: block + 1, block + 1] = table.min(axis=1)
        return cost

    def nodes(self, first: int, last: int) -> range:
        """The nodes of the blocks ``first ... last - 1``."""
        return range(self.ends[first - 1] + 1 if first else 0, self.ends[last - 1] + 1)


def cut_vertices(graph: LabelledGraph) -> tuple[int, ...]:
    """Nodes that no edge passes over: everything after one meets what is before it there alone; the last node too."""
    reach = -1
    found = []
    last_reader = _last_readers(graph)
    for node in range(graph.num_nodes):
        if reach <= node:
            found.append(node)
        reach = max(reach, last_reader[node])
    if graph.num_nodes and (not found or found[-1] != graph.num_nodes - 1):
        found.append(graph.num_nodes - 1)
    return tuple(found)


def chain_of(graph: LabelledGraph) -> Chain:
    """Blocks between cut vertices, each distinct one solved once.

    Raises:
        MemoryError: a block is too wide to eliminate.
    """
    ends = cut_vertices(graph)
    inside = _edges_inside(graph, ends)
    solved: dict[object, tuple[Array, Array | None]] = {}
    found = []
    for block, end in enumerate(ends):
        start = ends[block - 1] if block else -1
        nodes = range(start + 1, end + 1)
        key = _signature(graph, nodes, start, inside[block])
        if key not in solved:
            solved[key] = _solved(graph, nodes, start)
        found.append(solved[key])
    return Chain(graph, ends, tuple(entry for entry, _ in found), tuple(step for _, step in found), len(solved))


def product(a: Array, b: Array) -> Array:
    """The (min, +) product ``[i, k]``: least over j of a[i, j] + b[j, k]."""
    found = np.full((a.shape[0], b.shape[1]), np.inf)
    for j in range(b.shape[0]):
        np.minimum(found, a[:, j, None] + b[None, j, :], out=found)
    return found


def _added(
    graph: LabelledGraph,
    table: Array,
    rows: NDArray[np.intp],
    frontier: Sequence[int],
    node: int,
    earlier: Sequence[int],
) -> Array:
    """The table with a last axis for ``node``."""
    found = table[..., None] + graph.node_cost[node]
    for u in earlier:
        axis = frontier.index(u) + 1 if u in frontier else 0
        begun = rows <= u
        if not axis or not begun.any():
            continue
        shape = [1] * found.ndim
        shape[axis], shape[-1] = graph.edge_cost[u, node].shape
        edge = graph.edge_cost[u, node].reshape(shape)
        if begun.all():
            found += edge
        else:
            found[begun] += edge
    return found


def _earlier(graph: LabelledGraph) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(graph.num_nodes)]
    for u, v in graph.edge_cost:
        found[v].append(u)
    return found


def _last_readers(graph: LabelledGraph) -> list[int]:
    """The last node with an edge from each node; itself if there is none."""
    found = list(range(graph.num_nodes))
    for u, v in graph.edge_cost:
        found[u] = max(found[u], v)
    return found


def _check_size(rows: int, options: Sequence[int]) -> None:
    if rows * prod(options) > LARGEST_TABLE:
        raise MemoryError(f"{rows} spans x options {tuple(options)}: more than {LARGEST_TABLE} entries")


def _edges_inside(graph: LabelledGraph, ends: Sequence[int]) -> list[list[tuple[int, int]]]:
    block_of = np.searchsorted(np.array(ends), np.arange(graph.num_nodes))
    found: list[list[tuple[int, int]]] = [[] for _ in ends]
    for u, v in sorted(graph.edge_cost):
        found[block_of[v]].append((u, v))
    return found


def _signature(graph: LabelledGraph, nodes: range, start: int, edges: Sequence[tuple[int, int]]) -> object:
    """Blocks of equal signature have equal tables (compared by their bytes)."""
    costs = tuple(graph.node_cost[node].tobytes() for node in nodes)
    tables = tuple((u - start, v - start, graph.edge_cost[u, v].tobytes()) for u, v in edges)
    return start < 0, costs, tables


def _solved(graph: LabelledGraph, nodes: range, start: int) -> tuple[Array, Array | None]:
    """(entry, step) of a block: least costs by the option of its end, alone and by that of the vertex before."""
    inside = graph.part(nodes)
    entry = least_over(inside, (inside.num_nodes - 1,))
    if start < 0:
        return entry, None
    whole = graph.part(range(start, nodes.stop))
    free = LabelledGraph((np.zeros(len(whole.node_cost[0])), *whole.node_cost[1:]), whole.edge_cost)
    return entry, least_over(free, (0, free.num_nodes - 1))
