"""Where a step went, read off a picture.

rank 0   0F0 |--| 0SEND |-|            0RECV |------------|  0B0 |---|  0UPDATE |-|
rank 1            1RECV |---------|  1F0 |--| 1B0 |--| 1SEND |-|        1UPDATE |-----|
"""

from __future__ import annotations

import pytest

from benchmarks.chains import chain_profile
from halopipe.launch.combine import ranks_measured, stage_medians, stage_once_s
from planner.ir.plan import Decision
from planner.ir.schedule import Op
from planner.ir.timeline import Span, Timeline
from tests.planner.factories import chain_decision


def step(*spans: tuple[int, str, float, float], step_s: float) -> Timeline:
    return Timeline("measured", step_s, tuple(Span(*span) for span in spans))


def pipeline() -> Decision:
    return chain_decision(chain_profile(2), (1,), (2,))


PIPELINE = step(
    (0, "0F0", 0.0, 2.0),
    (0, "0SEND_F0>1", 2.0, 2.5),
    (0, "0RECV_B0<1", 2.5, 9.0),
    (0, "0B0", 9.0, 12.0),
    (0, "0UPDATE", 12.0, 13.0),
    (1, "1RECV_F0<0", 0.0, 3.0),
    (1, "1F0", 3.0, 5.0),
    (1, "1B0", 5.0, 8.0),
    (1, "1SEND_B0>0", 8.0, 8.5),
    (1, "1UPDATE", 8.5, 11.0),
    step_s=14.0,
)


def test_a_receive_waits_for_another_rank_until_it_sends_then_for_the_message() -> None:
    first, second = ranks_measured([PIPELINE], pipeline())
    assert (first.compute_s, first.communication_s, first.bubble_s, first.idle_s) == pytest.approx((6.0, 1.5, 5.5, 1.0))
    assert (second.compute_s, second.communication_s, second.bubble_s) == pytest.approx((7.5, 1.5, 2.0))
    assert second.idle_s == pytest.approx(3.0)


def test_the_parts_of_a_rank_add_up_to_the_step() -> None:
    for rank in ranks_measured([PIPELINE, PIPELINE], pipeline()):
        assert rank.compute_s + rank.communication_s + rank.bubble_s + rank.idle_s == pytest.approx(14.0)


def test_an_update_is_that_of_the_slowest_rank() -> None:
    assert stage_once_s([PIPELINE], pipeline(), Op.UPDATE) == pytest.approx((1.0, 2.5))
    assert stage_once_s([PIPELINE], pipeline(), Op.REDUCE_GRAD) == (0.0, 0.0)


def test_a_sum_counts_from_when_its_last_rank_is_there() -> None:
    replicas = chain_decision(chain_profile(2), (), (2,), ranks=[(0, 1)], shares=[(1, 1)])
    found = step((0, "0REDUCE_GRAD", 1.0, 4.0), (1, "0REDUCE_GRAD", 2.5, 4.5), step_s=5.0)
    assert stage_once_s([found], replicas, Op.REDUCE_GRAD) == pytest.approx((2.0,))
    first, second = ranks_measured([found], replicas)
    assert (first.communication_s, second.communication_s) == pytest.approx((1.5, 2.0))
    assert (first.bubble_s, first.idle_s) == pytest.approx((2.5, 1.0))


def test_nothing_is_known_without_steps() -> None:
    assert ranks_measured([], pipeline()) == ()


def test_stage_medians_are_per_micro_batch_and_halves_add_up() -> None:
    spans = [("0F0", 0, 1), ("0F1", 1, 4), ("0F2", 4, 6), ("1I0", 0, 2), ("1W0", 2, 3), ("0SEND_F0>1", 0, 9)]
    timelines = [step(*((0, *span) for span in spans), step_s=1.0)]
    assert stage_medians(timelines, 2, (Op.FORWARD,)) == (2, 0)
    assert stage_medians(timelines, 2, (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)) == (0, 3)
