"""Sparse networks: the search against all plans, and plans through the checker."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from planner import solvers
from planner.ir.errors import InfeasibleError
from planner.ir.graph import Graph
from planner.ir.problem import CHANNEL_DIMS, SAMPLE_DIMS, SPATIAL_DIMS, Problem, Rule
from planner.solvers.best_first import solver as best_first
from planner.solvers.ilp import solver as span_ilp
from tests.oracles.plans import check
from tests.planner.factories import chain_decision, plan_of
from tests.planner.solvers.instances import best_by_exhaustion
from tests.planner.sparse_networks import SparseNetwork, classifier, segmenter, sparse_profile


def small_network(draw: random.Random) -> Graph:
    """Five layers: a class for each sample, or for each site."""
    net = SparseNetwork(4, draw.choice([200, 2000]), 4)
    x = net.norm(net.conv("features", draw.choice([4, 8])))
    x = net.conv(x, 8, stride=draw.choice([1, 2]))
    return net.graph(net.linear(net.segment(x) if draw.random() < 0.5 else x, 5))


def sparse_problem(seed: int) -> Problem:
    """Two or three devices, alike or not, that prepare for themselves or have hosts beside them."""
    draw = random.Random(seed)
    graph = small_network(draw)
    profile = sparse_profile(
        graph,
        [draw.choice([1.0, 2.0]) for _ in range(draw.choice([2, 3]))],
        preparation_s=draw.choice([0.0, 2e-4, 2e-3]),
        halo_rows=draw.choice([1, 50, 500]),
        device=draw.choice(["cpu", "gpu"]),
        bandwidth_bytes_per_s=draw.choice([1e7, 1e9]),
        memory_bytes=draw.choice([2**21, 2**30]),
    )
    return Problem(
        profile,
        draw.choice([2, 3, 4]),
        schedules=draw.choice([("1f1b",), ("gpipe",)]),
        memory_margin=0.0,
        confidence=0.0,
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("solver", [best_first, span_ilp], ids=lambda solver: solver.__name__)
def test_no_plan_beats_the_one_found(solver: object, seed: int) -> None:
    problem = sparse_problem(seed)
    best, _ = best_by_exhaustion(problem)
    if best is None:
        with pytest.raises(InfeasibleError):
            solver.solve(problem)  # type: ignore[attr-defined]
        return
    plan = solver.solve(problem)  # type: ignore[attr-defined]
    assert check(plan, problem.profile) == ()
    assert plan.prediction.step_s == pytest.approx(best.step_s, rel=1e-9)


@pytest.mark.parametrize("name", solvers.names())
def test_every_solver_plans_a_sparse_network(name: str) -> None:
    for graph in (classifier(), segmenter()):
        problem = Problem(sparse_profile(graph, (1.0, 1.0), halo_rows=5), 4, micro_batch_sizes=(2,), confidence=0.0)
        plan = solvers.solver(name)(problem, None)
        assert check(plan, problem.profile) == ()


def test_ranks_share_one_large_cloud() -> None:
    """One sample, two ranks: a stage along sites alone is shared, one that sees samples is not."""
    profile = sparse_profile(segmenter(sites=20_000), (1.0, 1.0), sizes=(1, 2), preparation_s=0.0)
    plan = best_first.solve(Problem(profile, 1, confidence=0.0))
    assert plan.decision.stages[0].ranks == (0, 1)
    points = plan.decision.layout_of(0).cuts["sample"]
    assert points[1] * 2 == points[2] != 1
    assert check(plan, profile) == ()
    alone = best_first.solve(Problem(profile, 1, forbid=(Rule("*", "replicas", "2"),), confidence=0.0))
    assert plan.prediction.step_s < 0.6 * alone.prediction.step_s
    parted = sparse_profile(classifier(sites=20_000), (1.0, 1.0), sizes=(1, 2), preparation_s=0.0)
    found = best_first.solve(Problem(parted, 1, confidence=0.0))
    for number, stage in enumerate(found.decision.stages):
        kinds = {layer.kind for layer in parted.graph.layers if layer.name in found.decision.layers_of(number)}
        assert len(stage.ranks) == 1 or not kinds & {"segment", "linear", "loss"}


def test_a_stage_that_sees_samples_cannot_be_cut_inside_them() -> None:
    def faults(graph: Graph, shares: tuple[int, int]) -> str:
        profile = sparse_profile(graph, (1.0, 1.0), sizes=(1, 2))
        decision = chain_decision(profile, micro_batches=(1, 1), ranks=((0, 1),), shares=(shares,))
        return " ".join(check(plan_of(profile, decision), profile))

    assert "leaves rank" in faults(classifier(), (500, 500))
    assert "leaves" not in faults(segmenter(), (500, 500))
    assert "none of the sites" in faults(segmenter(), (500, 0))


@pytest.mark.parametrize("name", sorted({"best-first", "dryden"} & {*solvers.names()}))
def test_layers_over_sites_are_cut_along_nothing_but_samples(name: str) -> None:
    profile = sparse_profile(segmenter(), (1.0, 1.0))
    plan = solvers.solver(name)(
        Problem(profile, 4, allow=(SAMPLE_DIMS, SPATIAL_DIMS, CHANNEL_DIMS), confidence=0.0), None
    )
    assert all(set(placed.cuts) <= {"sample"} for placed in plan.decision.layers.values())
    for cuts in ({"channel": (0, 1, 2)}, {"sample": (0, 1, 2), "sites": (0, 1, 2)}):
        first = next(iter(plan.decision.layers))
        layers = {**plan.decision.layers, first: replace(plan.decision.layers[first], cuts=cuts)}
        faults = check(replace(plan, decision=replace(plan.decision, layers=layers)), profile)
        assert any(f"layer {first} is over sites" in fault for fault in faults)
