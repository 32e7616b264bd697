"""Improves an assignment that fits, one node at a time: the cheapest option that still fits, until none is cheaper."""

from __future__ import annotations

import numpy as np

from planner.solvers.inner.labelled import ROUNDING, Array, Assignment, LabelledGraph

_ROUNDS = 20


def polished(graph: LabelledGraph, assignment: Assignment) -> Assignment:
    """``assignment``, or a cheaper one that fits as well."""
    chosen = list(assignment)
    taken = graph.memory(chosen)
    around: list[list[tuple[int, int]]] = [[] for _ in range(graph.num_nodes)]
    for u, v in sorted({*graph.edge_cost, *graph.edge_memory}):
        around[u].append((u, v))
        around[v].append((u, v))
    for _ in range(_ROUNDS):
        changed = False
        for node in range(graph.num_nodes):
            cost, memory = _alternatives(graph, chosen, node, around[node])
            now = chosen[node]
            after = taken + memory - memory[now]
            fits = np.all(after <= graph.budget * (1 + ROUNDING), axis=-1)
            cost = np.where(fits, cost, np.inf)
            best = int(np.argmin(cost))
            if cost[best] < cost[now] - ROUNDING * abs(cost[now]):
                chosen[node], taken, changed = best, after[best], True
        if not changed:
            break
    return tuple(chosen)


def _alternatives(
    graph: LabelledGraph, chosen: list[int], node: int, around: list[tuple[int, int]]
) -> tuple[Array, Array]:
    """What each option of ``node`` costs and takes, its edges included, all else as chosen."""
    cost, memory = graph.node_cost[node].copy(), graph.node_memory[node].copy()
    for u, v in around:
        at = (slice(None), chosen[v]) if u == node else (chosen[u], slice(None))
        if (u, v) in graph.edge_cost:
            cost += graph.edge_cost[u, v][at]
        if (u, v) in graph.edge_memory:
            memory += graph.edge_memory[u, v][at]
    return cost, memory
