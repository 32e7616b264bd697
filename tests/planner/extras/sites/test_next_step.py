"""Preparing the next step in this one's waits, against closed forms, another code's count of waits, and the search."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.chains import cluster
from planner.costs.candidate import candidate_of
from planner.costs.cost_model import CostModel
from planner.costs.predict import predict
from planner.costs.pricing import Pricing
from planner.costs.simulator.events import run
from planner.costs.simulator.prices import prices_of, transfer_bytes
from planner.costs.simulator.program import compile_program
from planner.costs.stages.action_costs import StageCosts
from planner.costs.stages.input_pipeline import TURN_S, TURN_SHARE, spare_cores
from planner.costs.uncertainty import replayed
from planner.extras.sites.preparations import SitePreparations
from planner.ir.codec import dumps, loads
from planner.ir.graph import Graph
from planner.ir.plan import Decision, Plan
from planner.ir.problem import Problem
from planner.ir.profile import Profile
from planner.ir.schedule import Op
from planner.layers.boundary import Boundaries
from planner.solvers.best_first import solver as best_first
from tests.oracles.evaluation import evaluate
from tests.oracles.plans import check
from tests.planner.factories import chain_decision, plan_of
from tests.planner.sparse_networks import classifier, segmenter, sparse_profile

GRAPH = classifier(samples=4)
ALL = range(len(GRAPH.layers))


def step_s(profile: Profile, decision: Decision) -> float:
    return predict(profile, decision)[0].step_s


def both(profile: Profile, decision: Decision) -> tuple[float, float]:
    """A step that prepares itself, and one that was prepared in the step before."""
    assert not decision.prepares_next_step
    return step_s(profile, decision), step_s(profile, replace(decision, prepares_next_step=True))


def without_preparing(profile: Profile) -> Profile:
    made = {
        kind: tuple(replace(cost, seconds=0.0, shared_s=0.0) for cost in costs)
        for kind, costs in profile.preparations.items()
    }
    return replace(profile, preparations=made)


def test_a_rank_that_never_waits_gains_nothing_on_its_own_core_but_takes_turns() -> None:
    profile = sparse_profile(GRAPH, (1.0,), preparation_s=1e-3)
    before_s, after_s = both(profile, chain_decision(profile, micro_batches=(1, 1), schedule="gpipe"))
    made = SitePreparations(profile)
    made_s = 2 * (made.before_program_s("kind-1", 1) + made.seconds("kind-1", ALL, 1))
    assert after_s == pytest.approx(before_s + TURN_SHARE * made_s, rel=1e-12)


@pytest.mark.parametrize("preparation_s", [1e-3, 0.1])
def test_on_a_spare_core_it_is_waited_for_as_far_as_it_is_longer_than_the_step(preparation_s: float) -> None:
    profile = sparse_profile(GRAPH, (1.0, 1.0), preparation_s=preparation_s)
    decision = chain_decision(profile, micro_batches=(1, 1), schedule="gpipe")
    _, after_s = both(profile, decision)
    made = SitePreparations(profile)
    made_s = 2 * (made.before_program_s("kind-1", 1) + made.seconds("kind-1", ALL, 1))
    assert after_s == pytest.approx(
        max(step_s(without_preparing(profile), decision), made_s) + min(made_s, 2 * 4 * TURN_S)
    )  # four things a micro-batch


def test_in_a_pipeline_it_fills_what_the_rank_waits_and_the_end_of_the_others() -> None:
    """Two stages, one micro-batch: each rank waits while the other computes, so that a short one is hidden wholly."""
    profile = sparse_profile(segmenter(), (1.0, 1.0), preparation_s=1e-5)
    decision = chain_decision(profile, (3,), (4,), ((0,), (1,)), schedule="gpipe")
    before_s, after_s = both(profile, decision)
    made = SitePreparations(profile)
    stages = [[i for i in ALL if graph_stage(decision, i, segmenter()) == stage] for stage in (0, 1)]
    turns_s = [TURN_SHARE * made.seconds("kind-1", layers, 4) for layers in stages]
    assert before_s > after_s
    assert 0 <= after_s - step_s(without_preparing(profile), decision) <= max(turns_s) + 1e-12


def graph_stage(decision: Decision, index: int, graph: Graph) -> int:
    return decision.layers[graph.layers[index].name].stage if index < len(graph.layers) else -1


def decision_of(draw: random.Random) -> tuple[Profile, Decision]:
    """Two or three ranks, of which two may share a stage; four devices at the most, on one host or two."""
    graph = draw.choice([GRAPH, segmenter()])
    number, spare = draw.choice([2, 3]), draw.choice([0, 1])
    hosts = draw.choice([["n0"] * 4, ["n0", "n1", "n0", "n1"]])[: number + spare]
    speeds = [draw.choice([1.0, 2.0]) for _ in hosts]
    profile = sparse_profile(graph, speeds, preparation_s=draw.choice([1e-4, 1e-3, 1e-2]), halo_rows=20)
    profile = replace(profile, cluster=cluster(speeds, hosts, bandwidth_bytes_per_s=1e8))
    ranks, shares = (((0,), (1,)), ((1,), (1,))) if number == 2 else (((0, 1), (2,)), ((1, 1), (1,)))
    sizes = draw.choice([(4,), (2, 2), (1, 2, 1)])
    decision = chain_decision(profile, (3,), sizes, ranks, shares, draw.choice(["1f1b", "gpipe"]))
    return profile, replace(decision, prepares_next_step=True)


@pytest.mark.parametrize("seed", range(12))
def test_the_checker_counts_waits_alike_and_a_replay_without_noise_is_the_step(seed: int) -> None:
    profile, decision = decision_of(random.Random(seed))
    prediction, _ = predict(profile, decision)
    program = Boundaries.of_decision(profile.graph, decision).program(decision)
    found = evaluate(profile, decision)
    assert found.step_s == pytest.approx(prediction.step_s, rel=1e-12)
    assert found.peak_bytes == tuple(rank.peak_bytes for rank in prediction.ranks)
    for rank, times in zip(prediction.ranks, found.times, strict=True):
        assert times.compute_s == pytest.approx(rank.compute_s, rel=1e-9)
        assert times.idle_s == pytest.approx(rank.idle_s, rel=1e-9, abs=1e-12)
        total_s = rank.compute_s + rank.communication_s + rank.bubble_s + rank.idle_s
        assert total_s == pytest.approx(prediction.step_s, rel=1e-9)
    cost_model, sizes = CostModel(profile), decision.micro_batches
    compiled = compile_program(program, sizes)
    costs = StageCosts(
        cost_model,
        Pricing(cost_model).stages(candidate_of(cost_model.profile.graph, decision)),
        sizes,
        prepares_next_step=True,
    )
    prices = prices_of(compiled, costs, transfer_bytes(program, compiled))
    trace = run(compiled, prices)
    assert trace.step_s == pytest.approx(prediction.step_s, rel=1e-12)
    assert replayed(compiled, prices, trace, {}, 3) == pytest.approx(np.full(3, trace.step_s), rel=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_it_costs_no_more_than_turns_where_no_two_ranks_share_a_spare_core(seed: int) -> None:
    profile, decision = decision_of(random.Random(seed))
    cores = [core for core in spare_cores(profile.cluster, decision.num_ranks) if core is not None]
    if len(set(cores)) < len(cores):
        devices = profile.cluster.devices[: decision.num_ranks]
        profile = replace(profile, cluster=replace(profile.cluster, devices=devices))
    before_s, after_s = both(profile, replace(decision, prepares_next_step=False))
    program = Boundaries.of_decision(profile.graph, decision).program(decision)
    cost_model, sizes = CostModel(profile), decision.micro_batches
    costs = StageCosts(cost_model, Pricing(cost_model).stages(candidate_of(cost_model.profile.graph, decision)), sizes)
    made_s = [sum(costs.action_s(rank, a) for a in row if a.op is Op.PREPARE) for rank, row in enumerate(program.rows)]
    assert after_s <= before_s * (1 + 1e-9) + max(TURN_SHARE * max(made_s), min(max(made_s), 12 * TURN_S))


def test_two_steps_are_held() -> None:
    """Maps, sites and the batch itself, of this step and of the next."""
    profile = sparse_profile(GRAPH, (1.0, 1.0), preparation_s=1e-3)
    decision = chain_decision(profile, micro_batches=(1, 1), schedule="gpipe")
    one, two = (
        predict(profile, replace(decision, prepares_next_step=ahead))[0].ranks[0].peak_bytes for ahead in (False, True)
    )
    preparations = SitePreparations(profile)
    of_step = 2 * (preparations.num_bytes(ALL, 1) + preparations.before_program_bytes(1, shared=False))
    batch = sum(spec.num_bytes for name, spec in GRAPH.inputs.items() if name not in preparations.inputs) // 2
    assert two - one == of_step + batch


@pytest.mark.parametrize(("speeds", "memory", "expected"), [((1.0,), 2**30, False), ((1.0, 1.0), 2**30, True)])
def test_the_search_takes_it_where_it_pays(speeds: tuple[float, ...], memory: int, expected: bool) -> None:
    profile = sparse_profile(GRAPH, speeds, preparation_s=2e-3, memory_bytes=memory)
    problem = Problem(profile, 4, ("1f1b",), micro_batch_sizes=(4,), max_stages=1, num_ranks=1, memory_margin=0.0)
    plan = best_first.solve(problem)
    assert plan.decision.prepares_next_step is expected
    assert check(plan, profile) == ()
    other = replace(plan.decision, prepares_next_step=not expected)
    assert plan.prediction.step_s <= step_s(profile, other)


def test_it_is_left_out_where_two_steps_do_not_fit() -> None:
    profile = sparse_profile(GRAPH, (1.0, 1.0), preparation_s=2e-3)
    problem = Problem(profile, 4, ("1f1b",), micro_batch_sizes=(4,), max_stages=1, num_ranks=1, memory_margin=0.0)
    plan = best_first.solve(problem)
    room = plan.prediction.ranks[0].peak_bytes - 1
    tight = best_first.solve(replace(problem, memory_bytes=room))
    assert not tight.decision.prepares_next_step
    assert tight.prediction.step_s > plan.prediction.step_s


def test_a_plan_file_says_it_and_an_older_one_does_not() -> None:
    profile = sparse_profile(GRAPH, (1.0, 1.0), preparation_s=1e-3)
    decision = chain_decision(profile, micro_batches=(1, 1), schedule="gpipe")
    plan = plan_of(profile, replace(decision, prepares_next_step=True))
    text = dumps(plan)
    assert loads(text, Plan).decision.prepares_next_step
    older = json.loads(text)
    del older["decision"]["prepares_next_step"]
    assert not loads(json.dumps(older), Plan).decision.prepares_next_step
    assert any("step" in fault for fault in check(replace(plan, decision=decision), profile))
