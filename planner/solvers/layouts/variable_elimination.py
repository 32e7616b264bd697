"""Exact minimisation of a labelled graph without budgets: eliminate one node after another (Bertele and Brioschi 1972).

A node v with neighbours N is replaced by the table over N

    t(x_N) = min over x_v of  c_v(x_v) + sum over u in N of c_uv(x_u, x_v) + the tables that contain v

which connects N.  Time and memory are exponential in the largest |N| alone (treewidth: 2 for convolutional networks, at
most 4 for recurrent and attention graphs), so the next node is always the one with the smallest table.  Read backwards,
the tables give the options of the least cost; and with what the rest of the graph adds, every option's *min-marginal*:
the least cost of any assignment that takes it.

A search over stages asks for every span [i, j) of the graph at once (``all_spans``).  Nodes are in topological order.
Of the nodes before j those with an edge to j or later form the frontier; let T[i][x] be the least cost of the nodes of
[i, j) whose frontier takes the options x.  Adding node j is

    T'[i][x, k] = T[i][x] + c_j(k) + sum of c_uj(x_u, k) over edges (u, j) with u >= i;   T'[j][k] = c_j(k)

then what leaves the frontier is minimised away; the least entry of T'[i] is the cost of [i, j + 1).  All starts i move
together, as rows of one table, in which a row does not depend on frontier nodes before its start.  On a chain a step is
one product of a matrix with the edge's table; n nodes with k options and frontiers of w nodes take O(n^2 k^(w + 1)).

Where the table would be larger than ``LARGEST_SPANS``, the frontier node that is read last is minimised away too soon,
and each of its later edges costs its least over that node's options: mini-buckets (Dechter and Rish 2003), a bound that
is exact where the parts agree on an option.  Residual and U-shaped networks need that for their long skips.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod

import numpy as np

from planner.solvers.budget import NUMBER_S, Budget
from planner.solvers.layouts.factor_graph import Array, LabelledGraph, Labelling, NodePair

LARGEST_TABLE = 30_000_000
"""Entries; a graph that needs more is not eliminated."""

LARGEST_SPANS = 250_000
"""Entries of the table of all spans."""

Scope = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EliminationOrder:
    """In which order nodes are eliminated.

    Attributes:
        scopes: for each node in turn, its neighbours at that time and, last, the node itself.
        largest_table, all_tables: entries of the largest table, and of all together.
    """

    scopes: tuple[Scope, ...]
    largest_table: int
    all_tables: int = 0

    @property
    def width(self) -> int:
        """Most neighbours at the time of elimination: the treewidth, or a little more."""
        return max((len(scope) - 1 for scope in self.scopes), default=0)

    @property
    def is_narrow(self) -> bool:
        """Whether the tables fit in memory."""
        return self.largest_table <= LARGEST_TABLE


@dataclass(frozen=True, slots=True, eq=False)
class Elimination:
    """What elimination found: the least cost and an assignment that has it.

    Attributes:
        tables: by node in the order, the summed table over its scope; its minimum over the last axis was passed on.
    """

    order: EliminationOrder
    cost: float
    assignment: Labelling
    tables: tuple[Array, ...]

    def min_marginals(self) -> tuple[Array, ...]:
        """By node, the least cost of any assignment that takes each option."""
        if np.isinf(self.cost):
            return tuple(np.full(options, inf) for options in self._num_options())
        beliefs = _calibrated(self.order, self.tables)
        marginals: dict[int, Array] = {}
        for scope, belief in zip(self.order.scopes, beliefs, strict=True):
            marginals[scope[-1]] = belief.min(axis=tuple(range(len(scope) - 1)))
        # Components meet nowhere: the least of each other component is added.
        least = {node: float(marginal.min()) for node, marginal in marginals.items()}
        return tuple(marginals[node] + (self.cost - least[node]) for node in range(len(marginals)))

    def _num_options(self) -> list[int]:
        last = {scope[-1]: table.shape[-1] for scope, table in zip(self.order.scopes, self.tables, strict=True)}
        return [last[node] for node in range(len(last))]


def elimination_order(num_options: tuple[int, ...], edges: Iterable[NodePair]) -> EliminationOrder:
    """The order that eliminates the node with the smallest table first (ties: the first node)."""
    neighbours: list[set[int]] = [set() for _ in num_options]
    for u, v in edges:
        neighbours[u].add(v)
        neighbours[v].add(u)

    def size(node: int) -> int:
        return num_options[node] * prod(num_options[other] for other in neighbours[node])

    waiting = [(size(node), node) for node in range(len(num_options))]
    heapq.heapify(waiting)
    sizes = {node: entries for entries, node in waiting}
    scopes: list[Scope] = []
    largest = total = 0
    while waiting:
        entries, node = heapq.heappop(waiting)
        if sizes.get(node) != entries:
            continue
        del sizes[node]
        around = sorted(neighbours[node])
        scopes.append((*around, node))
        largest = max(largest, entries)
        total = total + entries
        for other in around:
            neighbours[other].discard(node)
            neighbours[other].update(third for third in around if third != other)
        for other in around:
            sizes[other] = size(other)
            heapq.heappush(waiting, (sizes[other], other))
    return EliminationOrder(tuple(scopes), largest, total)


def order_of(graph: LabelledGraph) -> EliminationOrder:
    """The elimination order of ``graph``."""
    return elimination_order(graph.num_options, graph.edges)


def eliminate(graph: LabelledGraph, order: EliminationOrder | None = None) -> Elimination:
    """The least cost of ``graph``, budgets ignored; infinity (and option 0 everywhere) if all is forbidden.

    Raises:
        MemoryError: a table has more than ``LARGEST_TABLE`` entries; ask ``order_of(graph).is_narrow`` first.
    """
    order = order or order_of(graph)
    if not order.is_narrow:
        raise MemoryError(f"a table of {order.largest_table} entries, at most {LARGEST_TABLE}")
    position = {scope[-1]: index for index, scope in enumerate(order.scopes)}
    waiting: list[list[tuple[Scope, Array]]] = [[((scope[-1],), graph.node_cost[scope[-1]])] for scope in order.scopes]
    for (u, v), cost in graph.edge_cost.items():
        waiting[min(position[u], position[v])].append(((u, v), cost))
    tables: list[Array] = []
    total = 0.0
    num_options = graph.num_options
    for index, scope in enumerate(order.scopes):
        table = _summed(scope, waiting[index], num_options)
        tables.append(table)
        message: Array = table.min(axis=-1)
        if len(scope) == 1:
            total += float(message)
        else:
            first = min(position[node] for node in scope[:-1])
            waiting[first].append((scope[:-1], message))
    return Elimination(order, total, _read_back(order, tables), tuple(tables))


def all_spans(graph: LabelledGraph, within: Budget | None = None) -> Array:
    """``[i, j]``: nodes ``i ... j - 1`` cost no less; 0 where empty, infinity where nothing is allowed (or i > j).

    It is their least cost, but for mini-buckets.

    Raises:
        OutOfTimeError: the budget is over.
    """
    count = graph.num_nodes
    cost = np.full((count + 1, count + 1), inf)
    np.fill_diagonal(cost, 0.0)
    last_reader = list(range(count))
    earlier: list[list[int]] = [[] for _ in range(count)]
    for u, v in graph.edge_cost:
        last_reader[u] = max(last_reader[u], v)
        earlier[v].append(u)
    frontier: tuple[int, ...] = ()
    table = np.zeros((0,))
    num_options = graph.num_options
    for node in range(count):
        table = np.concatenate([table, np.zeros((1, *table.shape[1:]))])
        while frontier and table.size * num_options[node] > LARGEST_SPANS:
            furthest = max(frontier, key=lambda u: last_reader[u])
            table = table.min(axis=frontier.index(furthest) + 1)
            frontier = tuple(u for u in frontier if u != furthest)
        if within is not None:
            within.require(NUMBER_S * table.size * num_options[node])
        table = _added(graph, table, frontier, node, earlier[node])
        frontier = (*frontier, node)
        gone = tuple(axis + 1 for axis, u in enumerate(frontier) if last_reader[u] <= node)
        if gone:
            table = table.min(axis=gone)
            frontier = tuple(u for u in frontier if last_reader[u] > node)
        cost[: node + 1, node + 1] = table.reshape(len(table), -1).min(axis=1)
    return cost


def _added(graph: LabelledGraph, table: Array, frontier: Scope, node: int, earlier: Sequence[int]) -> Array:
    """The table, row i of which starts at node i, with a last axis for ``node``."""
    summed = table[..., None] + graph.node_cost[node]
    for u in earlier:
        if u not in frontier:
            summed[: u + 1] += graph.edge_cost[u, node].min(axis=0)
            continue
        shape = [1] * summed.ndim
        shape[frontier.index(u) + 1], shape[-1] = graph.edge_cost[u, node].shape
        summed[: u + 1] += graph.edge_cost[u, node].reshape(shape)
    return summed


def _summed(scope: Scope, factors: list[tuple[Scope, Array]], num_options: tuple[int, ...]) -> Array:
    table = np.zeros(tuple(num_options[node] for node in scope))
    place = {node: axis for axis, node in enumerate(scope)}
    for nodes, cost in factors:
        table += _aligned(nodes, cost, place)
    return table


def _aligned(nodes: Scope, cost: Array, place: Mapping[int, int]) -> Array:
    """``cost`` over ``nodes`` with its axes where ``place`` says, extent 1 elsewhere."""
    by_place = sorted(range(len(nodes)), key=lambda axis: place[nodes[axis]])
    shape = [1] * len(place)
    for axis in by_place:
        shape[place[nodes[axis]]] = cost.shape[axis]
    return cost.transpose(by_place).reshape(shape)


def _read_back(order: EliminationOrder, tables: list[Array]) -> Labelling:
    chosen: dict[int, int] = {}
    for scope, table in zip(reversed(order.scopes), reversed(tables), strict=True):
        row = table[tuple(chosen[node] for node in scope[:-1])]
        chosen[scope[-1]] = int(np.argmin(row))
    return tuple(chosen[node] for node in range(len(chosen)))


def _calibrated(order: EliminationOrder, tables: tuple[Array, ...]) -> list[Array]:
    """Each table with what the rest of its component adds: entries are least costs of assignments that agree."""
    position = {scope[-1]: index for index, scope in enumerate(order.scopes)}
    beliefs = list(tables)
    for index in reversed(range(len(tables))):
        scope = order.scopes[index]
        if len(scope) == 1:
            continue
        parent = min(position[node] for node in scope[:-1])
        above = order.scopes[parent]
        dropped = tuple(axis for axis, node in enumerate(above) if node not in scope)
        kept = tuple(node for node in above if node in scope)
        least = beliefs[parent].min(axis=dropped) if dropped else beliefs[parent]
        passed = tables[index].min(axis=-1)
        place = {node: axis for axis, node in enumerate(scope[:-1])}
        outside = _aligned(kept, least, place)
        with np.errstate(invalid="ignore"):
            rest = np.where(np.isinf(passed), inf, outside - passed)
        beliefs[index] = tables[index] + rest[..., None]
    return beliefs
