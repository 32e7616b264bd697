"""The small questions that plans, clusters, problems and timelines answer about themselves."""

from __future__ import annotations

import pytest

from benchmarks.chains import chain_profile
from planner.ir.layout import Layout
from planner.ir.plan import Decision
from planner.ir.problem import Problem
from planner.ir.schedule import Action
from planner.ir.timeline import MemorySample, Span, Timeline
from tests.planner.factories import chain_decision

PROFILE = chain_profile(3, num_devices=3, hosts=("n0", "n0", "n1"), memory_bytes=(1000, 2000, 3000))


def test_a_decision_knows_its_layers_layouts_and_sizes() -> None:
    decision = chain_decision(PROFILE, (1,), (2, 1), ((0, 1), (2,)), ((3, 1), (1,)))
    assert decision.layers_of(1) == ("l1", "l2", "loss")
    assert decision.layout_of(0) == Layout({"sample": (0, 3, 4)})
    assert decision.layout_of(7) == Layout()
    assert (decision.num_ranks, decision.global_batch) == (3, 3)
    assert decision.rows()[2][0] == Action.parse("1RECV_F0<0")


def test_a_program_that_is_edited_wrongly_says_where() -> None:
    decision = Decision("1f1b", (1,), (), {}, (("0F0", "0FF"),))
    with pytest.raises(ValueError, match="'0FF' is not an action"):
        decision.rows()


def test_a_problem_limits_ranks_and_memory() -> None:
    assert Problem(PROFILE, 8).ranks == (0, 1, 2)
    assert Problem(PROFILE, 8, num_ranks=2).ranks == (0, 1)
    assert Problem(PROFILE, 8, num_ranks=9).ranks == (0, 1, 2)
    assert Problem(PROFILE, 8, memory_margin=0.25).memory_limit_bytes(1) == 1500


def test_a_timeline_knows_its_peaks_and_busy_times() -> None:
    spans = (
        Span(0, "0F0", 0.0, 1.0),
        Span(0, "0SEND_F0>1", 1.0, 1.25),
        Span(0, "0RECV_B0<1", 1.25, 2.0),
        Span(0, "0REDUCE_GRAD", 2.0, 2.5),
        Span(1, "1F0", 1.0, 4.0),
    )
    memory = (MemorySample(0, 0.0, 5), MemorySample(0, 1.0, 9), MemorySample(0, 2.0, 3))
    timeline = Timeline("measured", 4.0, spans, memory)
    assert timeline.busy_s(0) == 1.5
    assert timeline.peak_bytes(0) == 9
    assert timeline.peak_bytes(1) == 0
