from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from planner.costs.predict import predict, unflushed_step_s
from planner.costs.pricing import Pricing
from planner.ir.cluster import DATASHEET, GRADIENT_SUMS, INTERPOLATED, MEASURED, MEMORY, WITHIN_HOST, Collective
from planner.ir.errors import IllegalProgramError
from planner.ir.graph import TensorSpec
from planner.ir.profile import Optimizer, Profile
from planner.ir.schedule import Action, Op
from tests.oracles.evaluation import evaluate
from tests.planner.factories import batch_bytes, chain_decision


def test_two_stages_by_hand() -> None:
    profile = chain_profile(2, activation_bytes=4, parameter_bytes=4, latency_s=1e-3, bandwidth_bytes_per_s=1e15)
    prediction, timeline = predict(profile, chain_decision(profile, (1,), (1, 1), schedule="gpipe"))
    assert prediction.step_s == timeline.step_s
    assert prediction.step_s == pytest.approx(3 * 3e-3 + 2e-3)
    first, second = prediction.ranks
    assert (first.compute_s, second.compute_s) == pytest.approx((6e-3, 6e-3))
    assert (first.communication_s, second.communication_s) == pytest.approx((1e-3, 1e-3))
    assert (first.bubble_s, second.bubble_s) == pytest.approx((4e-3, 1e-3))
    assert (first.idle_s, second.idle_s) == pytest.approx((0.0, 3e-3))
    assert prediction.bubble_fraction == pytest.approx(4 / 11)
    assert prediction.samples_per_s == pytest.approx(2 / 11e-3)


def test_the_parts_of_every_rank_sum_to_the_step() -> None:
    profile = chain_profile(6, 3, latency_s=2e-4, action_overhead_s=1e-5, skips=[(0, 4)], update_s=1e-5)
    prediction, _ = predict(profile, chain_decision(profile, (2, 3), (3, 3, 2), [(0,), (1,), (2,)]))
    for rank in prediction.ranks:
        assert rank.compute_s + rank.communication_s + rank.bubble_s + rank.idle_s == pytest.approx(prediction.step_s)


def test_ranks_of_a_host_that_update_and_copy_gradients_at_once_share_its_memory() -> None:
    """Updates of two of them take half as long again; so does putting a bucket of two gradients together."""
    profile = chain_profile(2, update_s=1e-3, parameter_bytes=4096, all_reduce_latency_s=1e-4)
    copying = Collective(GRADIENT_SUMS, 1, WITHIN_HOST, ((1024, 4e-4), (1 << 20, 4e-4)))
    passes = tuple(Collective(MEMORY, n, WITHIN_HOST, ((1 << 26, s),)) for n, s in ((1, 2.0), (2, 3.0)))

    def spans(op: Op, *more: Collective, ranks: tuple[int, ...] = (0, 1)) -> float:
        cluster = replace(profile.cluster, collectives=(*profile.cluster.collectives, *more))
        known = replace(profile, cluster=cluster)
        decision = chain_decision(known, (), (2,), (ranks,), ((1,) * len(ranks),))
        prediction, timeline = predict(known, decision)
        found = evaluate(known, decision)
        assert found.step_s == pytest.approx(prediction.step_s, rel=1e-12)
        return sum(s.stop_s - s.start_s for s in timeline.spans if s.rank == 0 and Action.parse(s.action).op is op)

    assert spans(Op.UPDATE) == pytest.approx(2e-3)
    assert spans(Op.UPDATE, *passes) == pytest.approx(3e-3)
    assert spans(Op.UPDATE, *passes, ranks=(0,)) == pytest.approx(2e-3)
    summed_s = spans(Op.REDUCE_GRAD)
    assert spans(Op.REDUCE_GRAD, *passes) == pytest.approx(summed_s)
    assert spans(Op.REDUCE_GRAD, copying) == pytest.approx(summed_s + 4e-4)
    assert spans(Op.REDUCE_GRAD, copying, *passes) == pytest.approx(summed_s + 6e-4)


def test_memory_counts_optimiser_state_and_the_margin() -> None:
    profile = chain_profile(
        1,
        1,
        parameter_bytes=1000,
        saved_bytes=50,
        workspace_bytes=30,
        memory_bytes=10_000,
        optimizer=Optimizer("Adam", {}, 2.0),
    )
    decision = chain_decision(profile, (), (4,))
    prediction, _ = predict(profile, decision, memory_margin=0.25)
    # Adam's update takes the root of a moment and divides it: two copies of a parameter.
    assert prediction.ranks[0].peak_bytes == (4 + 2) * 1000 + batch_bytes(profile, decision)
    assert prediction.ranks[0].memory_limit_bytes == 7500


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_without_a_flush_a_step_lasts_as_long_as_its_busiest_stage_works(name: str) -> None:
    profile = chain_profile(6, 3, update_s=1e-4)
    decision = chain_decision(profile, (1, 3), (2,) * 6, [(0,), (1,), (2,)], schedule=name)
    prediction, _ = predict(profile, decision)
    busiest_s = max(rank.compute_s for rank in prediction.ranks)
    assert unflushed_step_s(Pricing.of(profile), decision) == pytest.approx(busiest_s)
    assert prediction.step_s > 1.1 * busiest_s


def test_a_rank_that_is_not_used_waits() -> None:
    profile = chain_profile(2, 3)
    prediction, _ = predict(profile, chain_decision(profile, (1,), (2, 2), [(0,), (2,)]))
    assert prediction.ranks[1].idle_s == prediction.step_s
    assert prediction.ranks[1].peak_bytes == 0


def test_a_prediction_is_as_certain_as_its_weakest_figure() -> None:
    profile = chain_profile(2)
    assert predict(profile, chain_decision(profile, (1,), (2, 2)))[0].evidence == MEASURED
    assert predict(profile, chain_decision(profile, (1,), (3,)))[0].evidence == INTERPOLATED
    links = {name: replace(link, evidence=DATASHEET) for name, link in profile.cluster.links.items()}
    unmeasured = replace(profile, cluster=replace(profile.cluster, links=links))
    assert predict(unmeasured, chain_decision(profile, (1,), (2, 2)))[0].evidence == DATASHEET
    assert predict(unmeasured, chain_decision(profile, (), (2, 2)))[0].evidence == MEASURED


def test_an_illegal_program_is_refused() -> None:
    profile = chain_profile(2)
    decision = chain_decision(profile, (1,), (2, 2))
    rows = (decision.program[0], decision.program[1][:-1])
    with pytest.raises(IllegalProgramError):
        predict(profile, replace(decision, program=rows))


def with_batch_norm(profile: Profile, channels: int) -> Profile:
    """The same with a normalisation over the batch as layer 0."""
    spec = TensorSpec(("sample", "channel"), (8, channels), "float32")
    norm = replace(profile.graph.layers[0], kind="batch_norm", outputs=(spec,), parameters=())
    graph = replace(profile.graph, layers=(norm, *profile.graph.layers[1:]), inputs={**profile.graph.inputs, "x": spec})
    return replace(profile, graph=graph)


def test_statistics_of_a_group_are_exchanged_at_the_pace_of_the_slowest() -> None:
    plain = chain_profile(2, 2, parameter_bytes=0, activation_bytes=4 * 512, all_reduce_latency_s=1e-3)
    profile = with_batch_norm(plain, 512)
    decision = chain_decision(profile, (), (4,), [(0, 1)], [(3, 1)])
    prediction, timeline = predict(profile, decision)
    forward_s = 1e-3 + 2 * (1 + 2 * 512) * 8 * 1e-9
    backward_s = 1e-3 + 2 * 512 * 4 * 1e-9
    assert [span.stop_s for span in timeline.spans if span.action == "0F0"] == pytest.approx(
        [6e-3 + forward_s] * 2, rel=1e-5
    )
    assert prediction.step_s == pytest.approx(18e-3 + forward_s + backward_s, rel=1e-5)
    assert prediction.ranks[0].communication_s == pytest.approx(forward_s + backward_s, rel=1e-3)
    alone, _ = predict(profile, chain_decision(profile, (), (4,)))
    assert alone.step_s == pytest.approx(24e-3)
