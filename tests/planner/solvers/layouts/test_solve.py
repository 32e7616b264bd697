"""The certified minimum against all assignments, with and without budgets; bounds in their order."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from planner.solvers.layouts import branch_and_bound, variable_elimination
from planner.solvers.layouts.branch_and_bound import dual
from planner.solvers.layouts.factor_graph import LabelledGraph, polished
from planner.solvers.layouts.milp import relax, solve_integer
from planner.solvers.layouts.solve import INFEASIBLE, PROVEN, TIME_LIMIT, minimise
from planner.solvers.layouts.variable_elimination import order_of
from tests.planner.solvers.inner.random_graphs import assignments, least_cost, random_graph


def limited(seed: int) -> LabelledGraph:
    rng = random.Random(seed)
    return random_graph(rng, rng.randint(1, 6), rng.randint(1, 3), rng.choice((0.3, 0.7)), room=rng.uniform(0.1, 0.7))


@pytest.mark.parametrize("seed", range(200))
def test_with_budgets_the_answer_is_the_cheapest_that_fits(seed: int) -> None:
    graph = limited(seed)
    best = least_cost(graph)
    found = minimise(graph)
    assert found.cost == pytest.approx(best)
    assert found.bound <= best * (1 + 1e-9)
    assert found.status == (INFEASIBLE if np.isinf(best) else PROVEN)
    if found.assignment is not None:
        assert graph.fits(found.assignment)
        assert graph.cost(found.assignment) == found.cost


def test_the_random_graphs_reach_every_way_to_answer() -> None:
    found = [minimise(limited(seed)) for seed in range(200)]
    answers = {(each.method, each.status) for each in found}
    methods = ("Lagrangian dual", "Lagrangian dual, branching and integer programs")
    assert answers >= {(method, status) for method in methods for status in (PROVEN,)} | {(methods[0], INFEASIBLE)}


@pytest.mark.parametrize("seed", range(80))
def test_the_linear_bound_is_below_the_lagrangian_and_that_below_the_optimum(seed: int) -> None:
    graph = limited(seed)
    best, linear, lagrangian = least_cost(graph), relax(graph).bound, dual(graph, order_of(graph)).bound
    assert lagrangian <= best + 1e-6
    assert linear <= lagrangian + 1e-6 or np.isinf(best)


@pytest.mark.parametrize("seed", range(40))
def test_without_budgets_the_relaxation_of_a_tree_is_exact(seed: int) -> None:
    rng = random.Random(seed)
    whole = random_graph(rng, 6, density=1.0, forbidden=0.0)
    tree = {(rng.randrange(v), v) for v in range(1, 6)}
    graph = LabelledGraph(whole.node_cost, {edge: whole.edge_cost[edge] for edge in tree})
    assert relax(graph).bound == pytest.approx(least_cost(graph))


@pytest.mark.parametrize("seed", range(40))
def test_a_graph_too_wide_to_eliminate_is_solved_all_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = limited(seed)
    monkeypatch.setattr(variable_elimination, "LARGEST_TABLE", 1)
    found = minimise(graph)
    best = least_cost(graph)
    assert found.cost == pytest.approx(best)
    assert found.bound <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_polish_keeps_what_fits_and_makes_it_no_dearer(seed: int) -> None:
    graph = limited(seed)
    for x in assignments(graph):
        if graph.fits(x) and np.isfinite(graph.cost(x)):
            better = polished(graph, x)
            assert graph.fits(better)
            assert graph.cost(better) <= graph.cost(x)


@pytest.mark.parametrize("seed", range(30))
def test_a_resource_that_another_limits_as_much_changes_nothing(seed: int) -> None:
    graph = limited(seed)
    doubled = LabelledGraph(
        graph.node_cost,
        graph.edge_cost,
        tuple(np.hstack([taken, taken / 2]) for taken in graph.node_memory),
        {edge: np.concatenate([taken, taken / 2], axis=-1) for edge, taken in graph.edge_memory.items()},
        np.concatenate([graph.budget, graph.budget]),
    )
    slim = doubled.without_slack_resources()
    assert len(slim.budget) <= len(graph.budget)
    assert minimise(doubled).cost == pytest.approx(least_cost(graph))


@pytest.mark.parametrize("seed", range(60))
def test_a_gap_is_kept_and_its_bound_is_true(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = limited(seed)
    best = least_cost(graph)
    for small in (3, branch_and_bound.SMALL_PROGRAM):
        monkeypatch.setattr(branch_and_bound, "SMALL_PROGRAM", small)
        found = minimise(graph, gap=0.2)
        assert found.bound <= best * (1 + 1e-9)
        assert found.cost <= found.bound * 1.2 * (1 + 1e-9)


def test_more_memory_never_costs_more() -> None:
    for seed in range(20):
        graph = limited(seed)
        costs = []
        for room in (1.0, 1.1, 1.3, 2.0):
            budget = graph.budget * room
            roomier = LabelledGraph(graph.node_cost, graph.edge_cost, graph.node_memory, graph.edge_memory, budget)
            costs.append(minimise(roomier).cost)
        assert costs == sorted(costs, reverse=True)


def test_tiny_costs_are_solved_as_well_as_large_ones() -> None:
    for seed in range(20):
        graph = limited(seed)
        scaled = LabelledGraph(
            tuple(cost * 1e-9 for cost in graph.node_cost),
            {edge: cost * 1e-9 for edge, cost in graph.edge_cost.items()},
            tuple(taken * 1e9 for taken in graph.node_memory),
            {edge: taken * 1e9 for edge, taken in graph.edge_memory.items()},
            graph.budget * 1e9,
        )
        assert minimise(scaled).cost == pytest.approx(least_cost(graph) * 1e-9, rel=1e-9)


@pytest.mark.parametrize("seed", range(120))
def test_it_branches_where_integer_programs_would_be_large(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = limited(seed)
    monkeypatch.setattr(branch_and_bound, "SMALL_PROGRAM", 3)
    found = minimise(graph)
    assert found.cost == pytest.approx(least_cost(graph))
    assert found.status in (PROVEN, INFEASIBLE)


@pytest.mark.parametrize("seed", [3, 4])
def test_an_integer_program_out_of_time_claims_no_more_than_it_knows(seed: int) -> None:
    graph = random_graph(random.Random(seed), 60, 2, density=0.05, forbidden=0.0, room=0.35)
    truth = solve_integer(graph, time.monotonic() + 60.0)
    assert truth.is_proved
    found = solve_integer(graph, time.monotonic() - 1.0)
    assert found.bound <= truth.cost * (1 + 1e-9)
    assert found.cost >= truth.cost * (1 - 1e-9)
    assert not found.is_proved or found.cost == pytest.approx(truth.cost)


@pytest.mark.parametrize("seed", [3, 4])
def test_out_of_time_the_best_so_far_and_its_bound_are_told(seed: int) -> None:
    graph = random_graph(random.Random(seed), 60, 2, density=0.05, forbidden=0.0, room=0.35)
    truth, found = minimise(graph), minimise(graph, time_limit_s=0.0)
    assert truth.status == PROVEN
    assert found.status == TIME_LIMIT
    assert found.bound < truth.cost <= found.cost
    assert found.gap > 0
