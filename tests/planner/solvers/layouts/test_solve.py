"""The certified minimum against all assignments, with and without budgets; bounds in their order."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from planner.solvers.budget import Budget
from planner.solvers.layouts import solve, variable_elimination
from planner.solvers.layouts.factor_graph import LabelledGraph
from planner.solvers.layouts.milp import solve_integer
from planner.solvers.layouts.solve import INFEASIBLE, PROVEN, TIME_LIMIT, lagrangian, minimise
from planner.solvers.layouts.variable_elimination import eliminate, order_of
from tests.planner.solvers.inner.random_graphs import assignments, least_cost, random_graph
from tests.sampling import some

NO_LIMIT_S = 600.0


def limited(seed: int) -> LabelledGraph:
    rng = random.Random(seed)
    return random_graph(rng, rng.randint(1, 6), rng.randint(1, 3), rng.choice((0.3, 0.7)), room=rng.uniform(0.1, 0.7))


def with_workspace(seed: int) -> LabelledGraph:
    graph = limited(seed)
    draw = np.random.default_rng(seed)
    hungry = draw.integers(4, 30)
    needs = tuple(draw.integers(0, hungry, taken.shape).astype(float) for taken in graph.node_memory)
    return replace(graph, workspace=needs, budget=graph.budget + hungry / 3)


@pytest.mark.parametrize("graph_of", [limited, with_workspace])
@pytest.mark.parametrize("seed", range(200))
def test_with_budgets_the_answer_is_the_cheapest_that_fits(seed: int, graph_of: type[LabelledGraph]) -> None:
    graph = graph_of(seed)
    best = least_cost(graph)
    found = minimise(graph)
    assert found.cost == pytest.approx(best)
    assert found.bound <= best * (1 + 1e-9)
    assert found.status == (INFEASIBLE if np.isinf(best) else PROVEN)
    if found.assignment is not None:
        assert graph.fits(found.assignment)
        assert graph.cost(found.assignment) == found.cost


def test_the_random_graphs_bind_in_memory_and_in_workspace() -> None:
    """Else elimination alone would answer all of them."""
    seeds = some(range(200), 50)
    free = sum(minimise(replace(limited(seed), node_memory=())).cost < least_cost(limited(seed)) for seed in seeds)
    without = {seed: replace(with_workspace(seed), workspace=()) for seed in seeds}
    held = sum(minimise(graph).cost < least_cost(with_workspace(seed)) for seed, graph in without.items())
    assert free > len(seeds) / 2
    assert held > 0.15 * len(seeds)


@pytest.mark.parametrize("graph_of", [limited, with_workspace])
@pytest.mark.parametrize("seed", range(80))
def test_lagrangian_bounds_hold_for_all_that_fit_and_for_each_option(seed: int, graph_of: type[LabelledGraph]) -> None:
    graph = graph_of(seed)
    order = order_of(graph)
    free = eliminate(graph, order)
    if np.isinf(free.cost):
        return  # all is forbidden, and nobody asks for prices
    bound, marginals, _ = lagrangian(graph, order, free, Budget(60.0))
    assert bound >= free.cost * (1 - 1e-9)
    for x in assignments(graph):
        if graph.fits(x):
            assert bound <= graph.cost(x) + 1e-6
            assert all(each[k] <= graph.cost(x) + 1e-6 for each, k in zip(marginals, x, strict=True))


@pytest.mark.parametrize("seed", range(40))
def test_the_program_alone_is_exact(seed: int) -> None:
    graph = with_workspace(seed)
    best = least_cost(graph)
    found = solve_integer(graph, NO_LIMIT_S)
    assert found.bound == pytest.approx(best)
    assert (found.best is None) == np.isinf(best)
    assert found.best is None or graph.cost(found.best) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(40))
def test_a_graph_too_wide_to_eliminate_is_solved_all_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = limited(seed)
    monkeypatch.setattr(variable_elimination, "LARGEST_TABLE", 1)
    for each in (graph, replace(graph, node_memory=(), edge_memory={})):
        found = minimise(each)
        best = least_cost(each)
        assert found.cost == pytest.approx(best)
        assert found.bound <= best * (1 + 1e-9)
        assert found.status == (INFEASIBLE if np.isinf(best) else PROVEN)


@pytest.mark.parametrize("graph_of", [limited, with_workspace])
@pytest.mark.parametrize("seed", range(120))
def test_cores_of_few_options_grow_until_the_best_is_proven(
    seed: int, graph_of: type[LabelledGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solve, "MOST_PAIRS", (1, 4, 16, 1000))
    graph = graph_of(seed)
    found = minimise(graph)
    assert found.cost == pytest.approx(least_cost(graph))
    assert found.status in (PROVEN, INFEASIBLE)


@pytest.mark.parametrize("graph_of", [limited, with_workspace])
def test_what_one_small_core_leaves_open_is_not_claimed(
    graph_of: type[LabelledGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solve, "MOST_PAIRS", (4,))
    unsure = 0
    for seed in range(80):
        graph = graph_of(seed)
        best = least_cost(graph)
        found = minimise(graph)
        assert found.bound <= best * (1 + 1e-9)
        assert found.cost >= best * (1 - 1e-9)
        assert found.status in ((INFEASIBLE, TIME_LIMIT) if np.isinf(best) else (PROVEN, TIME_LIMIT))
        assert found.status != PROVEN or found.cost == pytest.approx(best)
        unsure += found.status == TIME_LIMIT
    assert unsure > 5


@pytest.mark.parametrize("seed", range(30))
def test_a_resource_that_another_limits_as_much_changes_nothing(seed: int) -> None:
    graph = with_workspace(seed)
    doubled = LabelledGraph(
        graph.node_cost,
        graph.edge_cost,
        tuple(np.hstack([taken, taken / 2]) for taken in graph.node_memory),
        {edge: np.concatenate([taken, taken / 2], axis=-1) for edge, taken in graph.edge_memory.items()},
        np.concatenate([graph.budget, graph.budget]),
        tuple(np.hstack([taken, taken / 2]) for taken in graph.workspace),
    )
    slim = doubled.without_slack_resources()
    assert len(slim.budget) <= len(graph.budget)
    assert minimise(doubled).cost == pytest.approx(least_cost(graph))


def test_a_resource_with_more_workspace_is_no_slack() -> None:
    needs = (np.array([[0.0, 5.0], [0.0, 0.0]]),)
    graph = LabelledGraph(
        (np.array([0.0, 1.0]),), {}, (np.array([[2.0, 1.0], [2.0, 1.0]]),), {}, np.array([4.0, 4.0]), needs
    )
    assert len(graph.without_slack_resources().budget) == 2
    assert minimise(graph).assignment == (1,)


@pytest.mark.parametrize("graph_of", [limited, with_workspace])
@pytest.mark.parametrize("seed", range(60))
def test_a_gap_is_kept_and_its_bound_is_true(
    seed: int, graph_of: type[LabelledGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = graph_of(seed)
    best = least_cost(graph)
    for most_pairs in ((3, 1000), solve.MOST_PAIRS):
        monkeypatch.setattr(solve, "MOST_PAIRS", most_pairs)
        found = minimise(graph, gap=0.2)
        assert np.isinf(best) == np.isinf(found.cost)
        assert found.bound <= best * (1 + 1e-9)
        assert np.isinf(best) or found.cost <= found.bound * 1.2 * (1 + 1e-9)


def test_more_memory_never_costs_more() -> None:
    for seed in range(20):
        graph = limited(seed)
        costs = [minimise(replace(graph, budget=graph.budget * room)).cost for room in (1.0, 1.1, 1.3, 2.0)]
        assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize("graph_of", [limited, with_workspace])
def test_tiny_costs_are_solved_as_well_as_large_ones(graph_of: type[LabelledGraph]) -> None:
    for seed in range(20):
        graph = graph_of(seed)
        scaled = LabelledGraph(
            tuple(cost * 1e-9 for cost in graph.node_cost),
            {edge: cost * 1e-9 for edge, cost in graph.edge_cost.items()},
            tuple(taken * 1e9 for taken in graph.node_memory),
            {edge: taken * 1e9 for edge, taken in graph.edge_memory.items()},
            graph.budget * 1e9,
            tuple(taken * 1e9 for taken in graph.workspace),
        )
        assert minimise(scaled).cost == pytest.approx(least_cost(graph) * 1e-9, rel=1e-9)


@pytest.mark.parametrize("seed", [3, 4])
def test_out_of_time_no_more_is_claimed_than_is_known(seed: int) -> None:
    graph = random_graph(random.Random(seed), 60, 2, density=0.05, forbidden=0.0, room=0.35)
    truth = minimise(graph)
    late = solve_integer(graph, 0.0)
    none = minimise(graph, Budget(0.0))
    assert truth.status == PROVEN
    assert late.bound <= truth.cost * (1 + 1e-9)
    assert late.best is None or graph.cost(late.best) >= truth.cost * (1 - 1e-9)
    assert none.status == TIME_LIMIT
    assert none.bound < truth.cost <= none.cost


@pytest.mark.parametrize("seed", range(20))
def test_the_program_writes_nothing_beside_a_plan_that_goes_to_stdout(
    seed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    for graph in (limited(seed), with_workspace(seed)):
        solve_integer(graph, NO_LIMIT_S, 0.2)
    assert capfd.readouterr() == ("", "")
