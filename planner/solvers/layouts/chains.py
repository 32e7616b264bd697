"""Layouts by shortest paths: the search of Dryden et al. (IPDPS 2019, section V-C), exact on chains alone.

A path through the network is a chain of layers, and the cheapest options along it are a shortest path in the graph of
(layer, option).  Branches are handled one after another: the most expensive path (each layer at its cheapest) first;
what it chose stays; then the most expensive path of the layers that are left, whose edges to layers already chosen
count; and so on until every layer has an option.
"""

from __future__ import annotations

import numpy as np

from planner.solvers.layouts.factor_graph import Array, Assignment, LabelledGraph


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
