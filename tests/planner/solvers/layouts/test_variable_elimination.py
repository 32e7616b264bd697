"""Elimination against all assignments, and all spans at once against one elimination each."""

from __future__ import annotations

import random

import numpy as np
import pytest

from planner.solvers.layouts import variable_elimination
from planner.solvers.layouts.factor_graph import LabelledGraph
from planner.solvers.layouts.variable_elimination import all_spans, eliminate, elimination_order, order_of
from tests.planner.solvers.inner.random_graphs import assignments, least_cost, random_graph


@pytest.mark.parametrize("seed", range(120))
def test_the_least_cost_and_an_assignment_that_has_it(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(1, 7), density=rng.choice((0.2, 0.5, 0.9)))
    found = eliminate(graph)
    assert found.cost == least_cost(graph)
    if np.isfinite(found.cost):
        assert graph.cost(found.assignment) == found.cost


@pytest.mark.parametrize("seed", range(60))
def test_min_marginals_are_the_least_costs_with_each_option(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(1, 6), density=rng.choice((0.1, 0.4, 0.9)))
    marginals = eliminate(graph).min_marginals()
    for node, options in enumerate(graph.num_options):
        for option in range(options):
            costs = [graph.cost(x) for x in assignments(graph) if x[node] == option]
            assert marginals[node][option] == min(costs)


def test_a_chain_is_one_wide_and_a_ladder_two() -> None:
    chain = elimination_order((3,) * 9, [(k, k + 1) for k in range(8)])
    ladder = elimination_order((3,) * 9, [(k, k + step) for k in range(8) for step in (1, 2) if k + step < 9])
    assert (chain.width, chain.largest_table) == (1, 9)
    assert (ladder.width, ladder.largest_table) == (2, 27)


def test_a_graph_that_is_too_wide_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variable_elimination, "LARGEST_TABLE", 80)
    count = 4
    edges = {(u, v): np.zeros((3, 3)) for v in range(count) for u in range(v)}
    graph = LabelledGraph((np.zeros(3),) * count, edges)
    assert not order_of(graph).is_narrow
    with pytest.raises(MemoryError, match="81 entries"):
        eliminate(graph)


@pytest.mark.parametrize("seed", range(60))
def test_every_span_costs_what_it_costs_alone(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(1, 8), density=rng.choice((0.2, 0.5)))
    cost = all_spans(graph)
    for last in range(graph.num_nodes + 1):
        for first in range(last + 1):
            assert cost[first, last] == eliminate(graph.part(range(first, last))).cost


@pytest.mark.parametrize("seed", range(60))
def test_spans_whose_table_would_be_too_large_are_bounded(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(3, 8), density=rng.choice((0.5, 0.9)))
    exact = all_spans(graph)
    monkeypatch.setattr(variable_elimination, "LARGEST_SPANS", rng.choice((1, 10, 40)))
    bound = all_spans(graph)
    nodes = np.cumsum([0.0, *(float(cost.min()) for cost in graph.node_cost)])
    for first, last in zip(*np.triu_indices(graph.num_nodes + 1), strict=True):
        assert bound[first, last] <= exact[first, last]
        assert bound[first, last] >= nodes[last] - nodes[first] - 1e-9


def test_parts_that_agree_are_bounded_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = 1.0 - np.eye(3)
    graph = LabelledGraph((np.array([1.0, 2.0, 3.0]),) * 5, {(u, v): apart for v in range(5) for u in range(v)})
    exact = all_spans(graph)
    monkeypatch.setattr(variable_elimination, "LARGEST_SPANS", 100)
    assert (all_spans(graph) == exact).all()
