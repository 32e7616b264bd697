"""Random labelled graphs with round costs, and the oracle: all assignments."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np

from planner.solvers.layouts.factor_graph import LabelledGraph, Labelling


def random_graph(
    rng: random.Random, nodes: int, resources: int = 0, density: float = 0.4, forbidden: float = 0.05, room: float = 0.5
) -> LabelledGraph:
    """Whole numbers as costs; budgets between the least and the most that assignments take.

    Args:
        forbidden: share of pairs of options that are not allowed.
        room: where the budgets lie between least (0) and most (1).
    """
    draw = np.random.default_rng(rng.randrange(2**32))
    options = [rng.randint(1, 4) for _ in range(nodes)]
    edges = [(u, v) for v in range(nodes) for u in range(v) if rng.random() < density]
    node_cost = tuple(draw.integers(0, 20, count).astype(float) for count in options)
    edge_cost = {}
    for u, v in edges:
        table = draw.integers(0, 20, (options[u], options[v])).astype(float)
        table[draw.random(table.shape) < forbidden] = np.inf
        edge_cost[u, v] = table
    if not resources:
        return LabelledGraph(node_cost, edge_cost)
    node_memory = tuple(draw.integers(0, 10, (count, resources)).astype(float) for count in options)
    edge_memory = {
        (u, v): draw.integers(0, 4, (options[u], options[v], resources)).astype(float)
        for u, v in edges
        if rng.random() < 0.4
    }
    tables = [*node_memory, *(memory.reshape(-1, resources) for memory in edge_memory.values())]
    least, most = (np.sum([ends(table) for table in tables], axis=0) for ends in (_least, _most))
    return LabelledGraph(node_cost, edge_cost, node_memory, edge_memory, least + room * (most - least))


def assignments(graph: LabelledGraph) -> Iterator[Labelling]:
    return itertools.product(*map(range, graph.num_options))


def least_cost(graph: LabelledGraph) -> float:
    """By trying all assignments that fit; infinity if there is none."""
    return min((graph.cost(x) for x in assignments(graph) if graph.fits(x)), default=float("inf"))


def _least(table: np.ndarray) -> np.ndarray:
    return table.min(axis=0)


def _most(table: np.ndarray) -> np.ndarray:
    return table.max(axis=0)
