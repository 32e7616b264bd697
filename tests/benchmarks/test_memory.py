"""Predicted and counted memory of a small network on ranks that are processes, under several kinds of plan."""

from __future__ import annotations

import pytest

from benchmarks import memory
from benchmarks.accuracy.cases import Network
from cuda_ops.memory import available
from planner.ir.problem import SAMPLE_DIMS
from planner.ir.profile import ModelSource

pytestmark = pytest.mark.skipif(bool(available()), reason="no compiler for the counting allocator")

GPT = Network(
    ModelSource(
        "profiler.models.gpt:gpt",
        {"vocabulary": "500", "width": "256", "layers": "2", "heads": "4", "context": "64"},
        (8, 64),
    ),
    8,
    (1, 2, 4, 8),
    (SAMPLE_DIMS,),
)


@pytest.mark.exhaustive("watches a network, then runs each plan on its ranks, which capture it again")
def test_plans_hold_what_is_predicted_and_fit_into_it() -> None:
    plans = ((2, ("zb-h1/4", memory.DIVIDED)),)
    for label, found in memory.plans_of(GPT, memory.profile_of(GPT), plans):
        assert max(found.errors) < 5.0, label
        assert min(found.errors) > -memory.UNDER_PERCENT, label
        assert found.fits, label
        assert found.runs_out, label


def test_every_plan_by_hand_is_asked_for_somewhere() -> None:
    named = {name for sets in memory.PLANS.values() for _, names in sets for name in names}
    assert set(memory.BY_HAND) <= named
