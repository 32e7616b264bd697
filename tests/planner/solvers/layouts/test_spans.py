"""All spans at once, against one elimination each."""

from __future__ import annotations

import random

import numpy as np
import pytest

from planner.solvers.layouts.factor_graph import LabelledGraph
from planner.solvers.layouts.spans import all_spans, chain_of, cut_vertices, product
from planner.solvers.layouts.variable_elimination import eliminate
from tests.planner.solvers.inner.random_graphs import random_graph


@pytest.mark.parametrize("seed", range(60))
def test_every_span_costs_what_it_costs_alone(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(1, 8), density=rng.choice((0.2, 0.5)))
    spans = all_spans(graph)
    for last in range(graph.num_nodes + 1):
        for first in range(last):
            alone = eliminate(graph.part(range(first, last)))
            assert spans.cost[first, last] == alone.cost
            if np.isfinite(alone.cost):
                part = graph.part(range(first, last))
                assert part.cost(spans.assignment(first, last)) == alone.cost


@pytest.mark.parametrize("seed", range(60))
def test_spans_between_cut_vertices_come_from_blocks_solved_once(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(1, 9), density=0.25)
    chain = chain_of(graph)
    cost = chain.spans()
    for last in range(1, len(chain.ends) + 1):
        for first in range(last):
            assert cost[first, last] == eliminate(graph.part(chain.nodes(first, last))).cost


def test_starts_and_lengths_can_be_limited() -> None:
    graph = random_graph(random.Random(1), 8, density=0.4, forbidden=0.0)
    every, some = all_spans(graph).cost, all_spans(graph, starts=(0, 3), longest=4).cost
    for first in range(8):
        for last in range(first + 1, 9):
            wanted = first in (0, 3) and last - first <= 4
            assert some[first, last] == (every[first, last] if wanted else np.inf)


def test_nodes_that_edges_pass_over_are_no_cut_vertices() -> None:
    # 0 - 1 - 2 - 3 - 4 - 5 with a skip from 1 to 4
    edges = {(k, k + 1): np.zeros((2, 2)) for k in range(5)} | {(1, 4): np.zeros((2, 2))}
    assert cut_vertices(LabelledGraph((np.zeros(2),) * 6, edges)) == (0, 1, 4, 5)


def test_equal_blocks_are_solved_once() -> None:
    draw = np.random.default_rng(0)
    inner, outer, skip = (draw.random((3, 3)) for _ in range(3))
    nodes, edges = [np.arange(3.0)], {}
    for block in range(6):
        start = 2 * block
        nodes += [np.ones(3), np.arange(3.0)]
        edges |= {(start, start + 1): inner, (start + 1, start + 2): outer, (start, start + 2): skip}
    chain = chain_of(LabelledGraph(tuple(nodes), edges))
    assert (len(chain.ends), chain.num_solved) == (7, 2)


def test_the_product_is_the_least_sum() -> None:
    a, b = np.array([[0.0, 5.0], [1.0, np.inf]]), np.array([[4.0, 1.0], [0.0, 7.0]])
    assert product(a, b).tolist() == [[4.0, 1.0], [5.0, 2.0]]
