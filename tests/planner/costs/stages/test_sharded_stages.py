"""What stages take and hold whose ranks divide optimiser state, gradients and parameters (ZeRO-1 to 3)."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from planner.costs.cost_model import CostModel
from planner.costs.predict import forecast
from planner.costs.pricing import Pricing
from planner.ir.cluster import SHARED_MEMORY
from planner.ir.codec import dumps, loads
from planner.ir.errors import CorruptFileError, UsageError
from planner.ir.plan import Decision, Plan, Prediction
from planner.ir.problem import ALWAYS, Request
from planner.ir.profile import Optimizer
from planner.ir.program import BUCKET_BYTES
from planner.solvers.candidates.feasibility import schedule_names
from tests.oracles.evaluation import evaluate
from tests.oracles.plans import check
from tests.planner.factories import chain_decision, plan_of
from tests.planner.solvers.instances import random_problem

LAYERS = 12
RANKS = 2
MICRO_BATCHES = (8, 8, 8)
BYTES = BUCKET_BYTES // 2
"""Of the parameters of a layer: two layers make a bucket."""


TOTAL = LAYERS * BYTES
UPDATE_S = 1e-3
SAVED = 4096
PROFILE = chain_profile(
    LAYERS,
    RANKS,
    parameter_bytes=BYTES,
    activation_bytes=SAVED,
    update_s=UPDATE_S,
    all_reduce_latency_s=2e-4,
    optimizer=Optimizer("Adam", {}, 2.0),
)


def decision_of(zero: int, recompute: bool = False) -> Decision:
    found = chain_decision(PROFILE, (), MICRO_BATCHES, [tuple(range(RANKS))])
    stages = (replace(found.stages[0], sharded=zero > 0, zero=max(1, zero), recompute=recompute),)
    return replace(found, stages=stages)


def predicted(zero: int, recompute: bool = False) -> Prediction:
    """By the cost model; the checker's own sums are held against it."""
    decision = decision_of(zero, recompute)
    found = forecast(Pricing.of(PROFILE), decision, 0.0, num_draws=0).prediction
    again = evaluate(PROFILE, decision)
    assert again.step_s == pytest.approx(found.step_s, rel=1e-12)
    assert again.peak_bytes == tuple(rank.peak_bytes for rank in found.ranks)
    assert [each.communication_s for each in again.times] == pytest.approx([r.communication_s for r in found.ranks])
    return found


def sum_s(num_bytes: int) -> float:
    return CostModel(PROFILE).network.all_reduce_s(tuple(range(RANKS)), num_bytes)


def test_exchanges_are_paid_for_in_each_pass_that_waits_for_them_as_communication() -> None:
    half_s = len(MICRO_BATCHES) * LAYERS / 2 * sum_s(BUCKET_BYTES) / 2
    found = [predicted(zero) for zero in range(4)]
    update_s = LAYERS * UPDATE_S / RANKS
    passes_s = found[1].step_s - sum_s(TOTAL) - update_s  # reduce-scatter, update, all-gather
    assert found[2].step_s == pytest.approx(passes_s + half_s + update_s + sum_s(TOTAL) / 2)
    assert found[3].step_s == pytest.approx(passes_s + 3 * half_s + update_s)
    assert [one.ranks[0].communication_s for one in found[2:]] == pytest.approx([half_s, 3 * half_s])
    for zero, one in enumerate(found):
        again = predicted(zero, recompute=True)
        forward_s = len(MICRO_BATCHES) * 1e-3 * LAYERS * MICRO_BATCHES[0] / RANKS
        assert again.step_s - one.step_s == pytest.approx(forward_s + half_s * (zero == 3))  # forward, once more
    peaks = [one.ranks[0].peak_bytes for one in found]
    assert peaks == sorted(peaks, reverse=True)


PIECES = BUCKET_BYTES // 4
"""Layers of three of these have a bucket each, which is not copied."""


@pytest.mark.parametrize(
    ("ranks", "transport", "layer", "beside"),
    [
        (2, "gloo", 2 * PIECES, BUCKET_BYTES),  # two layers are put together
        (2, "gloo", 3 * PIECES, 3 * PIECES // 2),  # the other's piece comes
        (2, SHARED_MEMORY, 3 * PIECES, 3 * PIECES // 2),  # this rank's slice is cut out
        (4, "gloo", 3 * PIECES, 4 * 3 * PIECES // 4),  # three come, and two of them are added apart
        (4, SHARED_MEMORY, 3 * PIECES, 3 * PIECES // 4),
    ],
)
def test_a_sum_to_who_updates_takes_a_bucket_or_its_pieces_beside_all_gradients(
    ranks: int, transport: str, layer: int, beside: int
) -> None:
    """Less than the update of whole parameters would: it comes when most gradients have gone, and is of slices."""
    found = chain_profile(4, ranks, parameter_bytes=layer, optimizer=Optimizer("Adam", {}, 2.0))
    links = {name: replace(link, transport=transport) for name, link in found.cluster.links.items()}
    profile = replace(found, cluster=replace(found.cluster, links=links))
    decision = chain_decision(profile, (), (8,), [tuple(range(ranks))])
    decision = replace(decision, stages=(replace(decision.stages[0], sharded=True, zero=1),))
    peaks = [rank.peak_bytes for rank in forecast(Pricing.of(profile), decision, 0.0, num_draws=0).prediction.ranks]
    again = evaluate(profile, decision)
    assert again.peak_bytes == tuple(peaks)
    total = 4 * layer
    batch = 8 * (SAVED + 8)
    assert peaks[-1] == total + total + 2 * total // ranks + beside + batch


def planned(zero: int, asked: int, schedule: str = "1f1b") -> Plan:
    decision = replace(decision_of(zero), schedule=schedule)
    plan = plan_of(PROFILE, decision)
    return replace(plan, inputs=replace(plan.inputs, request=Request(shard=ALWAYS, zero=asked)))


def test_the_checker_finds_levels_that_nobody_asked_for_or_that_are_none() -> None:
    for zero in (1, 2, 3):
        assert not [fault for fault in check(planned(zero, zero), PROFILE) if "zero" in fault or "shard" in fault]
    assert any("divides at level 3, asked for zero 2" in fault for fault in check(planned(3, 2), PROFILE))
    for words, changed in {
        "is no level of ZeRO": {"zero": 4},
        "of a stage that is not sharded": {"zero": 2, "sharded": False},
    }.items():
        plan = planned(2, 2)
        stage = replace(plan.decision.stages[0], **changed)
        spoilt = replace(plan, decision=replace(plan.decision, stages=(stage,)))
        assert any(words in fault for fault in check(spoilt, PROFILE)), words
    assert any("backwards in halves" in fault for fault in check(planned(2, 2, "zb-h1"), PROFILE))


def test_a_plan_file_says_its_level_and_older_ones_are_of_level_one() -> None:
    text = dumps(planned(3, 3))
    assert loads(text, Plan).decision.stages[0].level == 3
    older = re.sub(r',?\s*"zero": 1', "", dumps(planned(1, 1)))
    assert "zero" not in older
    assert loads(older, Plan).decision.stages[0].level == 1
    with pytest.raises(CorruptFileError, match="no level of ZeRO"):
        loads(text.replace('"zero": 3', '"zero": 5'), Plan)


def test_schedules_that_cannot_divide_gradients_are_not_searched() -> None:
    problem = replace(random_problem(3), shard=ALWAYS, zero=2, schedules=("1f1b", "zb-h1", "pipedream"))
    assert schedule_names(problem) == ("1f1b",)
    assert schedule_names(replace(problem, zero=1)) == problem.schedules
    with pytest.raises(UsageError, match="ZeRO-2 with zb-h1"):
        schedule_names(replace(problem, schedules=("zb-h1",)))
