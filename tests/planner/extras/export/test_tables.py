from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest

from benchmarks.chains import chain_profile
from planner.costs.rows import program_of, stage_rows, stage_seconds, stage_transfers
from planner.ir.plan import Measured
from planner.ir.timeline import Span, Timeline
from tests.planner.factories import chain_decision, plan_of

PROFILE = chain_profile(4, parameter_bytes=(4096, 0, 8192, 0), activation_bytes=1024)
TWO_STAGES = plan_of(PROFILE, chain_decision(PROFILE, cuts=(2,), micro_batches=(4, 2)), step_s=2e-3)
SHARED = plan_of(PROFILE, chain_decision(PROFILE, micro_batches=(4, 4), ranks=((0, 1),), shares=((3, 1),)), step_s=4e-3)


@pytest.fixture
def tables() -> ModuleType:
    """Imported here, since it loads pandas: collecting the tests of all files need not."""
    from planner.extras.export import tables

    return tables


def test_plans_are_ranked_by_the_time_of_a_sample_and_what_was_measured_stands_beside(tables: ModuleType) -> None:
    measured = Measured(2.1e-3, 0.01, 20, (1e-3,), (1e-3,), (1,), 0.05)
    frame = tables.plans({"pipeline": replace(TWO_STAGES, measured=measured), "shared": SHARED})
    assert list(frame.index) == ["pipeline", "shared"]
    assert frame["slower"].tolist() == [0, pytest.approx((4e-3 / 8) / (2e-3 / 6) - 1)]
    assert frame["micro_batches"].tolist() == ["1x4+1x2", "2x4"]
    assert frame.loc["shared", "num_ranks"] == 2
    assert frame.loc["pipeline", "error"] == 0.05
    assert frame["measured_step_s"].isna()["shared"]


def test_a_stage_names_its_layers_its_shares_and_what_it_sends_and_without_a_profile_what_was_decided(
    tables: ModuleType,
) -> None:
    frame = tables.stages(TWO_STAGES, PROFILE)
    assert list(frame["first_layer"]) == ["l0", "l2"]
    assert list(frame["last_layer"]) == ["l1", "loss"]
    assert list(frame["parameter_bytes"]) == [4096, 8192]
    (transfer,) = frame.loc[0, "sends"]
    assert (transfer.dst, transfer.forward_bytes, transfer.backward_bytes) == (1, 4 * 1024, 4 * 1024)
    (row,) = stage_rows(SHARED)
    assert (row.ranks, row.samples) == ((0, 1), (3, 1))
    assert (row.parameter_bytes, row.forward_s, row.sends) == (None, None, None)


def test_a_hand_over_inside_a_rank_sends_nothing() -> None:
    decision = replace(TWO_STAGES.decision, stages=(TWO_STAGES.decision.stages[0],) * 2)
    (transfer,) = stage_transfers(program_of(replace(TWO_STAGES, decision=decision), PROFILE))
    assert transfer.forward_bytes == 0


def test_stage_seconds_are_medians_and_a_split_backward_is_added_up() -> None:
    actions = [(0, "0F0", 0, 1), (0, "0F1", 1, 4), (0, "0F2", 4, 6), (0, "0I0", 6, 7), (0, "0W0", 7, 9)]
    spans = tuple(Span(rank, action, *map(float, ends)) for rank, action, *ends in (*actions, (1, "1B0", 0, 5)))
    assert stage_seconds(Timeline("predicted", 9.0, spans)) == {0: (2.0, 3.0), 1: (None, 5.0)}


def test_spans_of_both_sources_are_one_frame_and_layers_and_ranks_have_a_row_each(tables: ModuleType) -> None:
    timeline = Timeline("predicted", 1.0, (Span(0, "0F3", 0.0, 0.5), Span(0, "0UPDATE", 0.5, 1.0)))
    frame = tables.spans(timeline, replace(timeline, source="measured"))
    assert frame["op"].tolist() == ["F", "UPDATE"] * 2
    assert frame["microbatch"].isna().tolist() == [False, True] * 2
    layers = tables.layers(PROFILE, TWO_STAGES)
    assert len(layers) == 5 * 4
    assert dict(zip(layers["layer"], layers["stage"], strict=True)) == {"l0": 0, "l1": 0, "l2": 1, "l3": 1, "loss": 1}
    assert tables.layers(PROFILE)["stage"].isna().all()
    assert list(tables.ranks(TWO_STAGES).columns)[:2] == ["compute_s", "communication_s"]
