"""Preparing what layers over sites read, in this step or in the waits of the one before."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.chains import cluster
from planner.costs.candidate import candidate_of
from planner.costs.cost_model import CostModel
from planner.costs.predict import predict
from planner.costs.pricing import Pricing
from planner.costs.simulator.events import run
from planner.costs.simulator.program import compile_program
from planner.costs.simulator.replay import replayed
from planner.costs.stages.action_costs import StageCosts
from planner.costs.stages.input_pipeline import TURN_S, TURN_SHARE
from planner.extras.sites.preparations import SitePreparations
from planner.ir.codec import dumps, loads
from planner.ir.graph import is_sites
from planner.ir.plan import Decision, Plan
from planner.ir.problem import Problem
from planner.ir.profile import PreparationCost, Profile
from planner.ir.schedule import Action, Op
from planner.ir.timeline import Timeline
from planner.layers import prepared_inputs
from planner.layers.boundary import Boundaries
from planner.solvers.best_first import solver as best_first
from tests.oracles.evaluation import evaluate
from tests.oracles.plans import check
from tests.planner.factories import chain_decision, plan_of, slot_prices
from tests.planner.sparse_networks import classifier, segmenter, sparse_profile

GRAPH = classifier(samples=4)

ALL = range(len(GRAPH.layers))


def spans(timeline: Timeline, op: Op, rank: int = 0) -> list[tuple[float, float]]:
    return [
        (span.start_s, span.stop_s)
        for span in timeline.spans
        if span.rank == rank and Action.parse(span.action).op is op
    ]


def reckoned(profile: Profile, decision: Decision) -> None:
    """The oracle finds the same."""
    prediction, _ = predict(profile, decision)
    found = evaluate(profile, decision)
    assert found.step_s == pytest.approx(prediction.step_s, rel=1e-12)
    assert found.peak_bytes == tuple(rank.peak_bytes for rank in prediction.ranks)


def test_a_stage_prepares_the_maps_that_its_layers_read_once_and_sites_are_found_before() -> None:
    found = SitePreparations(sparse_profile(GRAPH, preparation_s=1e-3))
    assert found.before_program_s("kind-1", 1) == pytest.approx(1e-3)  # the coarse sites
    assert found.before_program_s("kind-1", 6) == pytest.approx(6e-3)
    assert found.seconds("kind-1", [0], 1) == pytest.approx(1e-3)  # its own map
    assert found.seconds("kind-1", [3], 1) == pytest.approx(1e-3)  # the map between levels
    assert found.seconds("kind-1", ALL, 1) == pytest.approx(3e-3)
    assert found.seconds("kind-1", ALL, 6) == pytest.approx(18e-3)
    assert found.seconds("kind-1", [1, 2], 6) == 0  # normalisation and activation


def test_ranks_that_share_sites_order_them_by_all_maps_before_and_then_make_their_own_of_those_that_they_read() -> None:
    maps = [(f"neighbours_{ends}", f"reverse_{ends}") for ends in ("0_0", "0_1", "1_1")]
    costs = (
        PreparationCost("collate", ("lengths",), (), 1.0, 1, 0.5),
        PreparationCost("sites_1", (), ("collate",), 2.0, 1),
        *(PreparationCost(f"map_{k}", made, ("collate",), 10.0 * (k + 1), 1, 0.25) for k, made in enumerate(maps)),
        PreparationCost("segments", ("starts_1", "lengths_1"), ("sites_1",), 0.125, 1),
    )
    profile = replace(sparse_profile(GRAPH, (1.0, 1.0)), preparations={"kind-1": costs})
    found = SitePreparations(profile)
    assert (found.before_program_s("kind-1", 2), found.seconds("kind-1", ALL, 2)) == (2 * 3.0, 2 * 60.125)
    assert found.before_program_s("kind-1", 2, shared=True) == 2 * 63.5
    assert found.seconds("kind-1", ALL, 2, shared=True) == 1.75
    assert found.seconds("kind-1", [0], 2, shared=True) == 0.5
    shared = chain_decision(profile, (), (4,), ((0, 1),), ((2, 2),))
    _, timeline = predict(profile, shared)
    assert spans(timeline, Op.PREPARE) == spans(timeline, Op.PREPARE, 1) == [(0.0, pytest.approx(4 * 64.375))]
    reckoned(profile, shared)


def test_sites_of_all_micro_batches_are_found_by_all_ranks_before_any_begins() -> None:
    """The second rank is twice as slow, and the first waits for it; each makes its own maps, one micro-batch ahead."""
    profile = sparse_profile(GRAPH, (2.0, 1.0))
    costs = tuple(
        PreparationCost(cost.name, cost.inputs, cost.after, 8e-3 if cost.name == "sites_1" else 1e-3, 1)
        for cost in profile.preparations["kind-1"]
    )
    slow = tuple(replace(cost, seconds=2 * cost.seconds) for cost in costs)
    profile = replace(profile, preparations={"kind-2": costs, "kind-1": slow})
    decision = chain_decision(profile, (3,), (2, 2), ((0,), (1,)), ((1,), (1,)), "gpipe")
    _, timeline = predict(profile, decision)
    first, second = spans(timeline, Op.PREPARE)
    own, later = spans(timeline, Op.PREPARE, 1)
    assert first == (0.0, pytest.approx(4 * 16e-3 + 2 * 1e-3))
    assert second[1] - second[0] == pytest.approx(2e-3)
    assert own == (0.0, pytest.approx(4 * 16e-3 + 2 * 4e-3))
    assert later[1] - later[0] == pytest.approx(8e-3)
    reckoned(profile, decision)


def test_beside_an_accelerator_the_host_prepares_the_next_micro_batch_meanwhile() -> None:
    profile = sparse_profile(GRAPH, (1.0,), preparation_s=1e-3, device="gpu")
    decision = chain_decision(profile, micro_batches=(1, 1, 1), schedule="gpipe")
    prediction, timeline = predict(profile, decision)
    forwards = spans(timeline, Op.FORWARD)
    hosts = spans(timeline, Op.PREPARE)
    assert forwards[0][0] == pytest.approx(hosts[0][1])
    assert hosts[1] == (pytest.approx(6e-3), pytest.approx(9e-3))  # the coarse sites of all three are in the first
    assert forwards[1][0] == pytest.approx(max(hosts[1][1], forwards[0][1]))
    assert hosts[2][0] == pytest.approx(max(hosts[1][1], forwards[0][1]))  # asked for after the first forward
    waited = forwards[0][0] + sum(max(0.0, b[0] - a[1]) for a, b in pairwise(forwards))
    assert prediction.ranks[0].bubble_s == pytest.approx(waited)
    reckoned(profile, decision)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_checker_reckons_shared_stages_alike(device: str, recompute: bool) -> None:
    for graph in (GRAPH, segmenter()):
        profile = sparse_profile(graph, (1.0, 2.0, 1.0), device=device)
        decision = chain_decision(profile, (3,), (3, 3, 2), ((0, 1), (2,)), ((1, 2), (1,)))
        stages = tuple(replace(stage, recompute=recompute) for stage in decision.stages)
        reckoned(profile, replace(decision, stages=stages))


def test_maps_are_held_for_each_micro_batch_of_a_step() -> None:
    profile = sparse_profile(GRAPH, (1.0,))
    maps = SitePreparations(profile).num_bytes(ALL, 1)
    of_all = sum(spec.num_bytes for name, spec in GRAPH.inputs.items() if name.startswith(("neighbours", "reverse")))
    assert maps == of_all // 4 + 2 * 8 + GRAPH.inputs["features"].num_bytes // 4
    one, three = (
        predict(profile, chain_decision(profile, micro_batches=(1,) * count, schedule="gpipe"))[0].ranks[0].peak_bytes
        for count in (1, 3)
    )
    saved = sum(m.saved_bytes for m in profile.measurements["kind-1"] if m.samples == 1)
    made = prepared_inputs(GRAPH)
    raw = sum(spec.num_bytes for name, spec in GRAPH.inputs.items() if name not in made)
    counts = {dim: size for spec in GRAPH.inputs.values() for dim, size in zip(spec.dims, spec.shape, strict=True)}
    sites = sum(8 * size for dim, size in counts.items() if is_sites(dim)) + (12 + 8) * counts["sites"]
    assert three - one == 2 * (maps + saved + raw // 4 + sites // 4)


def beside(seconds: float) -> Profile:
    """What a thread of each rank makes, for so many seconds a sample."""
    cost = PreparationCost("sample", tuple(prepared_inputs(GRAPH)), (), seconds * 4, 4, is_beside=True)
    return replace(sparse_profile(GRAPH, (1.0,)), preparations={"kind-1": (cost,)})


def test_what_a_thread_always_makes_a_step_ahead_is_priced_as_a_plan_that_does_so() -> None:
    """Of one's own samples; on a core of its own all of it counts, on a spare one what is longer than the step."""

    def step_s(seconds: float, num_devices: int) -> float:
        profile = replace(beside(seconds), cluster=cluster((1.0,) * num_devices))
        decision = chain_decision(profile, micro_batches=(2, 2), schedule="gpipe")
        reckoned(profile, decision)
        said = replace(decision, prepares_next_step=True)
        assert predict(profile, said)[0] == predict(profile, decision)[0]
        return predict(profile, decision)[0].step_s

    nothing_s = step_s(0.0, 1)
    assert step_s(nothing_s, 1) == pytest.approx(5 * nothing_s)  # a sample takes as long as the step without
    assert step_s(0.2 * nothing_s, 2) == pytest.approx(nothing_s)
    assert step_s(nothing_s, 2) == pytest.approx(4 * nothing_s)


def test_a_thread_makes_what_its_own_ranks_samples_need() -> None:
    found = SitePreparations(beside(1e-3))
    kind = "kind-1"
    alone = SitePreparations(sparse_profile(GRAPH, preparation_s=1e-3))
    assert [each.is_beside(kind) and each.look_ahead for each in (found, alone)] == [True, False]
    assert found.num_bytes(ALL, 4, 2) == found.num_bytes(ALL, 4) == alone.num_bytes(ALL, 4)
    profile = replace(beside(1e-3), cluster=cluster((1.0, 1.0)))
    decision = chain_decision(profile, micro_batches=(4,), ranks=((0, 1),), shares=((1, 3),), schedule="gpipe")
    costs = StageCosts(CostModel(profile), Pricing.of(profile).stages(candidate_of(profile.graph, decision)), (4,))
    assert [costs.prepare_s(rank, Action(0, Op.PREPARE, 0)) for rank in (0, 1)] == pytest.approx([1e-3, 3e-3])
    reckoned(profile, decision)


def step_s(profile: Profile, decision: Decision) -> float:
    return predict(profile, decision)[0].step_s


@pytest.mark.parametrize(("num_devices", "preparation_s"), [(1, 1e-3), (2, 1e-3), (2, 0.1)])
def test_on_its_own_core_a_rank_takes_turns_and_on_a_spare_one_it_waits_for_what_is_longer_than_the_step(
    num_devices: int, preparation_s: float
) -> None:
    profile = sparse_profile(GRAPH, (1.0,) * num_devices, preparation_s=preparation_s)
    decision = chain_decision(profile, micro_batches=(1, 1), schedule="gpipe")
    made = SitePreparations(profile)
    made_s = 2 * (made.before_program_s("kind-1", 1) + made.seconds("kind-1", ALL, 1))
    expected_s = step_s(profile, decision) + TURN_SHARE * made_s
    if num_devices > 1:
        costs = tuple(replace(cost, seconds=0.0, shared_s=0.0) for cost in profile.preparations["kind-1"])
        nothing_s = step_s(replace(profile, preparations={"kind-1": costs}), decision)
        expected_s = max(nothing_s, made_s) + min(made_s, 2 * 4 * TURN_S)  # four things a micro-batch
    assert step_s(profile, replace(decision, prepares_next_step=True)) == pytest.approx(expected_s)


def decision_of(draw: random.Random) -> tuple[Profile, Decision]:
    """Two or three ranks, of which two may share a stage; four devices at the most, on one host or two."""
    graph = draw.choice([GRAPH, segmenter()])
    number = draw.choice([2, 3])
    spare = draw.choice([0, 1])
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
    reckoned(profile, decision)
    for rank, times in zip(prediction.ranks, evaluate(profile, decision).times, strict=True):
        assert times.compute_s == pytest.approx(rank.compute_s, rel=1e-9)
        assert times.idle_s == pytest.approx(rank.idle_s, rel=1e-9, abs=1e-12)
        total_s = rank.compute_s + rank.communication_s + rank.bubble_s + rank.idle_s
        assert total_s == pytest.approx(prediction.step_s, rel=1e-9)
    cost_model = CostModel(profile)
    sizes = decision.micro_batches
    compiled = compile_program(program, sizes)
    stages = Pricing(cost_model).stages(candidate_of(profile.graph, decision))
    costs = StageCosts(cost_model, stages, sizes, prepares_next_step=True)
    prices = slot_prices(program, compiled, costs)
    trace = run(compiled, prices)
    assert trace.step_s == pytest.approx(prediction.step_s, rel=1e-12)
    assert replayed(compiled, prices, trace, {}, 3) == pytest.approx(np.full(3, trace.step_s), rel=1e-9)


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


@pytest.mark.parametrize("num_devices", [1, 2])
def test_the_search_takes_it_where_it_pays_and_two_steps_fit(num_devices: int) -> None:
    profile = sparse_profile(GRAPH, (1.0,) * num_devices, preparation_s=2e-3)
    problem = Problem(
        profile,
        4,
        schedules=("1f1b",),
        micro_batch_sizes=(4,),
        max_stages=1,
        num_ranks=1,
        memory_margin=0.0,
        confidence=0.0,
    )
    plan = best_first.solve(problem)
    pays = num_devices > 1
    assert plan.decision.prepares_next_step is pays
    assert check(plan, profile) == ()
    assert plan.prediction.step_s <= step_s(profile, replace(plan.decision, prepares_next_step=not pays))
    if pays:
        tight = best_first.solve(replace(problem, memory_bytes=plan.prediction.ranks[0].peak_bytes - 1))
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
