"""Predicted and counted memory of small networks on ranks that are processes, plans of every kind."""

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


@pytest.mark.exhaustive("watches a network, then runs each plan three times on its ranks")
def test_every_kind_of_plan_holds_what_is_predicted_and_runs_out_below() -> None:
    plans = ((2, ("zb-h1/4", memory.DIVIDED, memory.SEQUENCE)), (3, (memory.TO_ONE, memory.TO_TWO)))
    for label, found in memory._network(GPT, plans):
        assert max(found.errors) < 5.0, label
        assert min(found.errors) > -memory.UNDER_PERCENT, label
        assert found.fits, label


def test_every_plan_by_hand_is_asked_for_somewhere() -> None:
    named = {name for sets in memory.PLANS.values() for _, names in sets for name in names}
    assert set(memory.BY_HAND) <= named
