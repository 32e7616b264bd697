"""Dryden et al.'s per-layer distributions by shortest paths, beside exact ones."""

from __future__ import annotations

import random

import numpy as np
import pytest

from planner.extras.baselines import dryden
from planner.ir.codec import dumps, load, loads
from planner.ir.errors import InfeasibleError
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.solvers import solver
from planner.solvers.everyday import solve_data_parallel
from planner.solvers.layouts.factor_graph import LabelledGraph
from planner.solvers.layouts.variable_elimination import eliminate
from tests.planner.check.test_structure import GOLDEN, problem
from tests.planner.networks import mesh_like, priced, residual
from tests.planner.solvers.inner.random_graphs import random_graph

SPACE = ("sample", "spatial")


@pytest.mark.parametrize("seed", range(40))
def test_on_a_chain_the_shortest_path_is_optimal_and_with_branches_never_better(seed: int) -> None:
    branched = random_graph(random.Random(seed), 8, forbidden=0.0)
    assert branched.cost(dryden.by_shortest_paths(branched)) >= eliminate(branched).cost
    whole = random_graph(random.Random(seed), 7, density=1.0, forbidden=0.0)
    chain = LabelledGraph(whole.node_cost, {(k, k + 1): whole.edge_cost[k, k + 1] for k in range(6)})
    assert chain.cost(dryden.by_shortest_paths(chain)) == eliminate(chain).cost


def test_a_branch_counts_its_edges_to_what_was_chosen_before() -> None:
    # 0 - 1 - 3 is expensive and chooses first; 2 then follows 0 and 3
    far = np.array([[0.0, 5.0], [5.0, 0.0]])
    edges = {(0, 1): far, (1, 3): far, (0, 2): far, (2, 3): far}
    graph = LabelledGraph(tuple(np.array(cost) for cost in ([9.0, 8.0], [9.0, 8.0], [1.0, 2.0], [9.0, 8.0])), edges)
    assert dryden.by_shortest_paths(graph) == (1, 1, 1, 1)
    assert dryden.by_shortest_paths(graph.part((0, 1, 2))) == (1, 1, 1)


def test_with_samples_alone_it_is_data_parallelism() -> None:
    problem = Problem(priced(*residual(samples=8), speeds=(1.0,) * 4), 8, confidence=0.0)
    ours = dryden.solve(problem)
    replicas = solve_data_parallel(problem)
    assert ours.decision == replicas.decision
    assert ours.prediction == replicas.prediction


def test_large_images_of_few_samples_are_cut_along_space() -> None:
    profile = priced(*mesh_like(samples=2, height=256), speeds=(1.0,) * 4)
    plan = dryden.solve(Problem(profile, 2, allow=SPACE, confidence=0.0))
    dims = {dim for placed in plan.decision.layers.values() for dim in placed.cuts}
    assert {"sample", "height"} <= dims or {"sample", "width"} <= dims
    assert len(plan.decision.stages) == 1
    assert plan.decision.stages[0].ranks == (0, 1, 2, 3)
    assert dumps(loads(dumps(plan), Plan)) == dumps(plan)
    narrower = Problem(profile, 2, num_ranks=2, confidence=0.0)
    assert plan.prediction.step_s < solve_data_parallel(narrower).prediction.step_s


def test_what_does_not_fit_is_named_with_both_numbers() -> None:
    profile = priced(*mesh_like(samples=2, height=64), speeds=(1.0,) * 4, memory_bytes=100_000)
    with pytest.raises(InfeasibleError, match=r"needs .* KiB[\s\S]*usable 89.8 KiB"):
        dryden.solve(Problem(profile, 2, allow=SPACE, confidence=0.0))


def test_a_whole_plan_is_what_it_was() -> None:
    golden = load(GOLDEN, Plan)
    plan = solver("dryden")(problem())
    assert plan.decision == golden.decision
    assert plan.inputs == golden.inputs
    assert plan.prediction.step_s == pytest.approx(golden.prediction.step_s, rel=1e-9)
    assert [rank.peak_bytes for rank in plan.prediction.ranks] == [r.peak_bytes for r in golden.prediction.ranks]
