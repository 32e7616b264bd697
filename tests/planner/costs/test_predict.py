"""Predictions of decisions: by hand, as certain as what they rest on, the same of a candidate and of its file."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from planner.costs.candidate import candidate_of
from planner.costs.cost_model import CostModel
from planner.costs.predict import forecast, predict, unflushed_step_s
from planner.costs.pricing import Pricing
from planner.costs.rows import in_flight, layout_text, stage_layouts
from planner.ir.cluster import DATASHEET, GRADIENT_SUMS, INTERPOLATED, MEASURED, MEMORY, WITHIN_HOST, Collective
from planner.ir.errors import IllegalProgramError
from planner.ir.graph import TensorSpec
from planner.ir.plan import Placement
from planner.ir.problem import Problem
from planner.ir.profile import Optimizer, Profile
from planner.ir.schedule import Action, Op
from planner.solvers import solver
from planner.solvers.candidates.candidate import decision_of, divided
from planner.solvers.candidates.evaluate import Evaluator
from tests.oracles.evaluation import evaluate
from tests.planner.factories import batch_bytes, chain_decision
from tests.planner.solvers.laid_out_plans import EVERYTHING, random_candidate, random_network


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


@pytest.mark.parametrize("seed", range(12))
def test_a_candidate_costs_what_its_file_does(seed: int) -> None:
    draw = random.Random(seed)
    problem = Problem(
        random_network(draw), 4, allow=EVERYTHING, halo_depth=draw.choice([0, 2]), shard="always", confidence=0.0
    )
    evaluator = Evaluator(problem, CostModel(problem.profile))
    candidate = random_candidate(draw, evaluator)
    written = forecast(Pricing.of(problem.profile), decision_of(problem, candidate), problem.memory_margin, num_draws=0)
    unwritten = evaluator.forecast(candidate, num_draws=0)
    assert unwritten.prediction.step_s == pytest.approx(written.prediction.step_s, rel=1e-12)
    assert unwritten.memories == written.memories
    assert unwritten.timeline.spans == written.timeline.spans


def test_a_file_says_what_its_candidate_did() -> None:
    problem = Problem(chain_profile(4, 3), 6, shard="always", zero=2, confidence=0.0)
    plan = solver("best-first")(problem, None)
    candidate = candidate_of(problem.profile.graph, plan.decision)
    assert decision_of(problem, candidate) == plan.decision
    assert divided(problem, candidate).zero == candidate.zero
    assert candidate.rows == Pricing.of(problem.profile).with_rows(replace(candidate, rows=())).rows


def test_a_search_reads_no_rows_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(text: str) -> Action:
        raise AssertionError(f"{text} was read inside a search")

    monkeypatch.setattr(Action, "parse", refuse)
    plan = solver("best-first")(Problem(chain_profile(5, 3), 6, confidence=0.8), None)
    assert plan.alternatives


PROFILE = chain_profile(4)


@pytest.mark.parametrize(
    ("cuts", "words"),
    [
        ({}, "whole"),
        ({"sample": (0, 3, 4)}, "samples 6:2"),
        ({"height": (0, 5, 8)}, "height 5:3"),
        ({"sample": (0, 1, 2), "height": (0, 4, 8)}, "samples 4:4 x height 4:4"),
    ],
)
def test_a_layout_is_put_in_words(cuts: dict[str, tuple[int, ...]], words: str) -> None:
    assert layout_text(Placement(0, cuts), 8) == words


def test_layers_of_a_stage_are_counted_by_layout() -> None:
    shared = chain_decision(PROFILE, micro_batches=(4,), ranks=((0, 1),), shares=((3, 1),))
    layers = {**shared.layers, "l1": Placement(0, {})}
    assert stage_layouts(replace(shared, layers=layers), 0) == {"samples 3:1": 4, "whole": 1}
    assert stage_layouts(chain_decision(PROFILE, cuts=(2,)), 0) == {}


@pytest.mark.parametrize(("schedule", "counts"), [("gpipe", (4, 4)), ("1f1b", (2, 1)), ("zb-h1", (2, 2))])
def test_micro_batches_in_flight_are_those_of_the_program(schedule: str, counts: tuple[int, int]) -> None:
    decision = chain_decision(PROFILE, cuts=(2,), micro_batches=(2, 2, 2, 2), schedule=schedule)
    assert tuple(in_flight(decision, stage) for stage in range(2)) == counts


def test_a_program_that_cannot_be_read_has_none() -> None:
    decision = chain_decision(PROFILE, cuts=(2,))
    assert in_flight(replace(decision, program=(("nonsense",),)), 0) == 0
    assert in_flight(replace(decision, program=()), 1) == 0
