from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.chains import cluster
from planner.costs.candidate import candidate_of
from planner.costs.cost_model import CostModel
from planner.costs.predict import predict
from planner.costs.pricing import Pricing
from planner.costs.stages.action_costs import StageCosts
from planner.costs.stages.input_pipeline import closure
from planner.extras.sites.preparations import SitePreparations
from planner.ir.graph import is_sites
from planner.ir.plan import Decision
from planner.ir.profile import PreparationCost, Profile
from planner.ir.schedule import Action, Op
from planner.ir.timeline import Timeline
from planner.layers import prepared_inputs
from tests.oracles.evaluation import evaluate
from tests.planner.factories import chain_decision
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
    assert (found.before_program_s("kind-1", 2, shared=True), found.seconds("kind-1", ALL, 2, shared=True)) == (
        2 * 63.5,
        1.75,
    )
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
    (first, second), (own, later) = spans(timeline, Op.PREPARE), spans(timeline, Op.PREPARE, 1)
    assert first == (0.0, pytest.approx(4 * 16e-3 + 2 * 1e-3))
    assert second[1] - second[0] == pytest.approx(2e-3)
    assert own == (0.0, pytest.approx(4 * 16e-3 + 2 * 4e-3))
    assert later[1] - later[0] == pytest.approx(8e-3)
    reckoned(profile, decision)


def test_the_measurement_nearest_in_size_is_scaled() -> None:
    def cost(samples: int, seconds: float) -> PreparationCost:
        return PreparationCost("map", ("neighbours_0_0",), (), seconds, samples)

    profile = replace(sparse_profile(GRAPH), preparations={"kind-1": (cost(1, 1.0), cost(4, 2.0))})
    found = SitePreparations(profile)
    assert [found.seconds("kind-1", [0], n) for n in (1, 2, 4, 8)] == [1.0, 2.0, 2.0, 4.0]


def test_a_closure_follows_what_things_are_made_from() -> None:
    a = PreparationCost("a", (), (), 1.0, 1)
    b = PreparationCost("b", (), ("a",), 1.0, 1)
    c = PreparationCost("c", ("x",), ("b", "a"), 1.0, 1)
    d = PreparationCost("d", ("y",), ("a",), 1.0, 1)
    assert sorted(closure((a, b, c, d), frozenset("x"))) == ["a", "b", "c"]
    assert closure((a, b, c, d), frozenset()) == {}


def test_a_core_is_occupied_while_it_prepares() -> None:
    profile = sparse_profile(GRAPH, (1.0,), preparation_s=1e-3)
    decision = chain_decision(profile, micro_batches=(1, 1), schedule="gpipe")
    prediction, timeline = predict(profile, decision)
    (first, second), (forward, _) = spans(timeline, Op.PREPARE), spans(timeline, Op.FORWARD)
    assert first == (0.0, pytest.approx(5e-3))  # with the coarse sites of both
    assert second == (pytest.approx(5e-3), pytest.approx(8e-3))
    assert forward[0] == pytest.approx(8e-3)
    assert prediction.ranks[0].compute_s == pytest.approx(prediction.step_s)
    reckoned(profile, decision)


def test_beside_an_accelerator_the_host_prepares_the_next_micro_batch_meanwhile() -> None:
    profile = sparse_profile(GRAPH, (1.0,), preparation_s=1e-3, device="gpu")
    decision = chain_decision(profile, micro_batches=(1, 1, 1), schedule="gpipe")
    prediction, timeline = predict(profile, decision)
    forwards, hosts = spans(timeline, Op.FORWARD), spans(timeline, Op.PREPARE)
    assert forwards[0][0] == pytest.approx(hosts[0][1])
    assert hosts[1] == (pytest.approx(6e-3), pytest.approx(9e-3))  # the coarse sites of all three are in the first
    assert forwards[1][0] == pytest.approx(max(hosts[1][1], forwards[0][1]))
    assert hosts[2][0] == pytest.approx(max(hosts[1][1], forwards[0][1]))  # asked for after the first forward
    waited = forwards[0][0] + sum(max(0.0, b[0] - a[1]) for a, b in pairwise(forwards))
    assert prediction.ranks[0].bubble_s == pytest.approx(waited)
    reckoned(profile, decision)


def test_preparing_just_in_time_takes_longer() -> None:
    profile = sparse_profile(GRAPH, (1.0,), preparation_s=1e-3, device="gpu")
    decision = chain_decision(profile, micro_batches=(1, 1, 1), schedule="gpipe")
    program = (tuple(f"0PREP{m} 0F{m}" for m in range(3)), tuple(f"0B{m}" for m in range(3)), ("0UPDATE",))
    late = replace(decision, program=(tuple(" ".join(map(" ".join, program)).split()),))
    assert predict(profile, late)[0].step_s > predict(profile, decision)[0].step_s
    reckoned(profile, late)


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
    assert found.is_beside(kind)
    assert found.look_ahead
    alone = SitePreparations(sparse_profile(GRAPH, preparation_s=1e-3))
    assert not alone.is_beside(kind)
    assert not alone.look_ahead
    assert found.num_bytes(ALL, 4, 2) == found.num_bytes(ALL, 4) == alone.num_bytes(ALL, 4)
    profile = replace(beside(1e-3), cluster=cluster((1.0, 1.0)))
    decision = chain_decision(profile, micro_batches=(4,), ranks=((0, 1),), shares=((1, 3),), schedule="gpipe")
    costs = StageCosts(CostModel(profile), Pricing.of(profile).stages(candidate_of(profile.graph, decision)), (4,))
    assert [costs.prepare_s(rank, Action(0, Op.PREPARE, 0)) for rank in (0, 1)] == pytest.approx([1e-3, 3e-3])
    reckoned(profile, decision)
