"""Per-layer distributions by shortest paths."""

from __future__ import annotations

import random

import numpy as np
import pytest

from planner.costs.cost_model import CostModel
from planner.costs.stages.layouts import LayoutPrices
from planner.extras.baselines import dryden
from planner.ir.codec import dumps, load, loads
from planner.ir.errors import InfeasibleError
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.solvers import baselines, solver
from planner.solvers.everyday import solve_data_parallel
from planner.solvers.layouts.factor_graph import LabelledGraph
from planner.solvers.layouts.stage import Question, best_layouts
from planner.solvers.layouts.variable_elimination import eliminate
from tests.planner.check.test_structure import GOLDEN, problem
from tests.planner.networks import mesh_like, priced, residual
from tests.planner.solvers.inner.random_graphs import random_graph

SPACE = ("sample", "spatial")


@pytest.mark.parametrize("seed", range(40))
def test_on_a_chain_the_shortest_path_is_optimal(seed: int) -> None:
    whole = random_graph(random.Random(seed), 7, density=1.0, forbidden=0.0)
    chain = LabelledGraph(whole.node_cost, {(k, k + 1): whole.edge_cost[k, k + 1] for k in range(6)})
    assert chain.cost(dryden.by_shortest_paths(chain)) == eliminate(chain).cost


@pytest.mark.parametrize("seed", range(40))
def test_with_branches_it_is_never_better_than_the_optimum(seed: int) -> None:
    graph = random_graph(random.Random(seed), 8, forbidden=0.0)
    assert graph.cost(dryden.by_shortest_paths(graph)) >= eliminate(graph).cost


def test_branches_are_where_it_loses() -> None:
    graphs = [random_graph(random.Random(seed), 8, forbidden=0.0) for seed in range(40)]
    assert any(graph.cost(dryden.by_shortest_paths(graph)) > eliminate(graph).cost for graph in graphs)


def test_a_branch_counts_its_edges_to_what_was_chosen_before() -> None:
    # 0 - 1 - 3 is expensive and chooses first; 2 then follows 0 and 3
    far = np.array([[0.0, 5.0], [5.0, 0.0]])
    edges = {(0, 1): far, (1, 3): far, (0, 2): far, (2, 3): far}
    graph = LabelledGraph(tuple(np.array(cost) for cost in ([9.0, 8.0], [9.0, 8.0], [1.0, 2.0], [9.0, 8.0])), edges)
    assert dryden.by_shortest_paths(graph) == (1, 1, 1, 1)
    leaf = graph.part((0, 1, 2))
    assert dryden.by_shortest_paths(leaf) == (1, 1, 1)


def test_it_is_a_baseline() -> None:
    assert "dryden" in baselines()


def test_with_samples_alone_it_is_data_parallelism() -> None:
    problem = Problem(priced(*residual(samples=8), speeds=(1.0,) * 4), 8)
    ours, replicas = dryden.solve(problem), solve_data_parallel(problem)
    assert ours.decision == replicas.decision
    assert ours.prediction == replicas.prediction


def test_large_images_of_few_samples_are_cut_along_space() -> None:
    profile = priced(*mesh_like(samples=2, height=256), speeds=(1.0,) * 4)
    plan = dryden.solve(Problem(profile, 2, allow=SPACE))
    dims = {dim for placed in plan.decision.layers.values() for dim in placed.cuts}
    assert {"sample", "height"} <= dims or {"sample", "width"} <= dims
    assert len(plan.decision.stages) == 1
    assert plan.decision.stages[0].ranks == (0, 1, 2, 3)
    assert dumps(loads(dumps(plan), Plan)) == dumps(plan)
    narrower = Problem(profile, 2, num_ranks=2)
    assert plan.prediction.step_s < solve_data_parallel(narrower).prediction.step_s


def test_the_exact_search_over_the_same_space_is_never_worse() -> None:
    for made in (residual(samples=4, height=64, blocks=2), mesh_like(samples=4, height=64)):
        profile = priced(*made, speeds=(1.0,) * 4, latency_s=1e-6)
        problem = Problem(profile, 4, allow=SPACE, micro_batch_sizes=(4,))
        prices = LayoutPrices(CostModel(profile), (0, 1, 2, 3), 4, SPACE)
        exact = best_layouts(prices, Question(tuple(range(len(prices.layers)))))
        assert exact.answer.cost <= dryden.solve(problem).prediction.step_s * (1 + 1e-9)


def test_what_does_not_fit_is_named_with_both_numbers() -> None:
    profile = priced(*mesh_like(samples=2, height=64), speeds=(1.0,) * 4, memory_bytes=100_000)
    with pytest.raises(InfeasibleError, match=r"needs .* KiB[\s\S]*usable 89.8 KiB"):
        dryden.solve(Problem(profile, 2, allow=SPACE))


def test_time_and_memory_of_each_rank_are_told() -> None:
    profile = priced(*mesh_like(samples=2, height=64), speeds=(1.0, 2.0, 1.0, 2.0))
    plan = dryden.solve(Problem(profile, 6, allow=SPACE, micro_batch_sizes=(2,)))
    assert plan.decision.micro_batches == (2, 2, 2)
    for rank in plan.prediction.ranks:
        assert rank.compute_s > 0
        assert rank.peak_bytes <= rank.memory_limit_bytes
        parts_s = rank.compute_s + rank.communication_s + rank.bubble_s + rank.idle_s
        assert parts_s == pytest.approx(plan.prediction.step_s)


def test_a_whole_plan_is_what_it_was() -> None:
    golden, plan = load(GOLDEN, Plan), solver("dryden")(problem())
    assert plan.decision == golden.decision
    assert plan.inputs == golden.inputs
    assert plan.prediction.step_s == pytest.approx(golden.prediction.step_s, rel=1e-9)
    assert [rank.peak_bytes for rank in plan.prediction.ranks] == [r.peak_bytes for r in golden.prediction.ranks]
