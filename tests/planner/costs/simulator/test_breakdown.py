from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chains import chain_profile
from planner.costs.predict import predict
from planner.costs.simulator.breakdown import Parts, breakdown, mean_parts
from planner.ir.timeline import Span, Timeline
from planner.schedules import names
from tests.planner.factories import chain_decision
from tests.planner.shared_hosts import random_plan


def timeline(step_s: float, *spans: tuple[int, str, float, float]) -> Timeline:
    return Timeline("measured", step_s, tuple(Span(*span) for span in spans))


def test_a_wait_is_bubble_until_the_sender_sends_and_communication_afterwards() -> None:
    seen = timeline(
        9.0,
        (0, "0F0", 0.0, 2.0),
        (0, "0SEND_F0>1", 2.0, 2.5),
        (0, "0RECV_B0<1", 2.5, 7.0),
        (0, "0B0", 7.0, 8.0),
        (1, "1RECV_F0<0", 0.0, 3.0),
        (1, "1F0", 3.0, 4.0),
        (1, "1B0", 4.0, 6.0),
        (1, "1SEND_B0>0", 6.0, 6.0),
    )
    assert breakdown(seen, 3) == (Parts(3.0, 0.5 + 1.0, 3.5, 1.0), Parts(3.0, 1.0, 2.0, 3.0), Parts(0.0, 0.0, 0.0, 9.0))
    assert mean_parts(breakdown(seen, 2)) == Parts(3.0, 1.25, 2.75, 2.0)


def test_a_reduction_is_bubble_until_its_last_member_is_there() -> None:
    seen = timeline(6.0, (0, "0REDUCE_GRAD", 1.0, 5.0), (1, "0REDUCE_GRAD", 3.0, 5.0), (1, "0UPDATE", 5.0, 6.0))
    assert breakdown(seen, 2) == (Parts(0.0, 2.0, 3.0, 1.0), Parts(1.0, 2.0, 3.0, 0.0))


def test_of_several_senders_the_last_one_that_can_have_sent_it_counts() -> None:
    seen = timeline(
        8.0,
        (0, "0SEND_F0>1", 1.0, 1.0),
        (1, "0SEND_F0>1", 3.0, 3.0),
        (2, "0SEND_F0>1", 6.0, 6.0),  # later than the message was there: to somebody else
        (3, "1RECV_F0<0", 0.0, 4.0),
    )
    assert breakdown(seen, 4)[3] == Parts(0.0, 1.0, 3.0, 4.0)


def test_exchanges_inside_an_action_are_communication() -> None:
    assert breakdown(timeline(3.0, (0, "0F0", 0.0, 3.0)), 1, [0.5]) == (Parts(2.5, 0.5, 0.0, 0.0),)


def test_what_a_host_prepares_beside_its_device_is_nobodys_time() -> None:
    seen = timeline(5.0, (0, "0PREP0", 0.0, 3.0), (0, "0F0", 3.0, 4.0), (0, "0PREP1", 3.0, 5.0), (0, "0F1", 5.0, 5.0))
    assert breakdown(seen, 1, (), [True]) == (Parts(1.0, 0.0, 4.0, 0.0),)
    assert breakdown(seen, 1) == (Parts(5.0, 0.0, 0.0, 0.0),)


@given(st.integers(0, 2**32), st.sampled_from(names()))
def test_the_four_parts_of_every_rank_add_up_to_the_step(seed: int, schedule: str) -> None:
    prediction, seen = predict(*random_plan(random.Random(seed), schedule))
    for rank, again in zip(prediction.ranks, breakdown(seen, len(prediction.ranks)), strict=True):
        parts = (rank.compute_s, rank.communication_s, rank.bubble_s, rank.idle_s)
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(prediction.step_s, rel=1e-12)
        assert rank.compute_s == pytest.approx(again.compute_s)
    lost_s = sum(rank.bubble_s + rank.idle_s for rank in prediction.ranks)
    assert prediction.bubble_fraction == pytest.approx(lost_s / len(prediction.ranks) / prediction.step_s)


def test_gpipe_without_transfers_has_the_bubble_of_its_closed_form() -> None:
    profile = chain_profile(4, 4, activation_bytes=4, bandwidth_bytes_per_s=1e15)
    prediction, _ = predict(profile, chain_decision(profile, (1, 2, 3), (1,) * 6, schedule="gpipe"))
    assert prediction.bubble_fraction == pytest.approx(3 / 9, rel=1e-6)
    assert [rank.idle_s for rank in prediction.ranks] == pytest.approx([0.0, 2e-3, 4e-3, 6e-3], abs=1e-9)
    assert [rank.bubble_s for rank in prediction.ranks] == pytest.approx([9e-3, 7e-3, 5e-3, 3e-3], abs=1e-9)
