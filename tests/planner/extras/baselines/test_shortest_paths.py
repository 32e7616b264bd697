"""Dryden's shortest paths against the exact layouts of a stage."""

from __future__ import annotations

import pytest

from planner.extras.baselines.dryden import by_shortest_paths
from planner.solvers.layouts.stage import best_layouts, labelled_graph, options_of
from tests.planner.solvers.layouts.test_stage import asked, drawn_prices


@pytest.mark.parametrize("seed", range(12))
def test_the_exact_layouts_are_never_worse(seed: int) -> None:
    prices = drawn_prices(seed)
    question = asked(prices, micro_batches=2.0)
    graph = labelled_graph(prices, question, options_of(prices, question))
    assert best_layouts(prices, question).answer.cost <= graph.cost(by_shortest_paths(graph)) * (1 + 1e-12)
