"""Workspace is no sum: the exact choice against all choices, on small random graphs whose memory and workspace bind."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from planner.solvers.layouts.factor_graph import LabelledGraph
from planner.solvers.layouts.solve import INFEASIBLE, PROVEN, TIME_LIMIT, minimise, minimise_with_workspace
from tests.planner.solvers.inner.random_graphs import assignments, random_graph

Workspace = tuple[np.ndarray, ...]


def instance(seed: int, room: float = 0.55) -> tuple[LabelledGraph, Workspace]:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(2, 5), resources=rng.randint(1, 3), room=room)
    draw = np.random.default_rng(seed)
    hungry = rng.choice([4, 12, 30])
    needs = tuple(draw.integers(0, hungry, (count, len(graph.budget))).astype(float) for count in graph.num_options)
    return replace(graph, budget=graph.budget + hungry / 3), needs


def most(workspace: Workspace, chosen: tuple[int, ...]) -> np.ndarray:
    return np.max([needs[k] for needs, k in zip(workspace, chosen, strict=True)], axis=0)


def least_cost(graph: LabelledGraph, workspace: Workspace) -> float:
    fitting = (x for x in assignments(graph) if np.all(graph.memory(x) + most(workspace, x) <= graph.budget))
    return min(map(graph.cost, fitting), default=float("inf"))


def by_setting_aside(graph: LabelledGraph, workspace: Workspace) -> float:
    """What a choice needs set aside, and asked again until nothing more is needed: no proof, often not the best."""
    aside = np.zeros(len(graph.budget))
    while True:
        found = minimise(replace(graph, budget=np.maximum(graph.budget - aside, 0.0))).assignment
        if found is None or np.all(most(workspace, found) <= aside):
            return float("inf") if found is None else graph.cost(found)
        aside = np.maximum(aside, most(workspace, found))


def test_the_choice_within_memory_and_workspace_is_the_best_of_all() -> None:
    bound, harder = 0, 0
    for seed in range(250):
        graph, workspace = instance(seed)
        best, found = least_cost(graph, workspace), minimise_with_workspace(graph, workspace, 60.0)
        assert found.cost == pytest.approx(best), seed
        assert found.status == (PROVEN if np.isfinite(best) else INFEASIBLE), seed
        bound += best > minimise(graph).cost
        harder += by_setting_aside(graph, workspace) > best
    assert bound > 40
    assert harder > 10


def test_a_bound_holds_however_little_time_there_is() -> None:
    late = 0
    for seed in range(60):
        graph, workspace = instance(seed)
        best, found = least_cost(graph, workspace), minimise_with_workspace(graph, workspace, 0.0)
        assert found.bound <= best * (1 + 1e-9) + 1e-12, seed
        assert found.cost >= best * (1 - 1e-9), seed
        late += found.status == TIME_LIMIT
        assert found.status != PROVEN or found.cost == pytest.approx(best), seed
    assert late > 5


def test_within_a_gap_the_choice_is_as_near_as_asked() -> None:
    for seed in range(60):
        graph, workspace = instance(seed)
        best, found = least_cost(graph, workspace), minimise_with_workspace(graph, workspace, 60.0, gap=0.2)
        assert np.isinf(best) == np.isinf(found.cost), seed
        assert np.isinf(best) or found.cost <= 1.2 * best * (1 + 1e-9), seed
        assert found.bound <= best * (1 + 1e-9), seed
