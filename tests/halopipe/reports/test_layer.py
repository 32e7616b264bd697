from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from halopipe.reports.layer import describe_layer
from planner.ir.errors import UnknownNameError
from tests.planner.factories import chain_decision, plan_of

PROFILE = chain_profile(6, parameter_bytes=2**20, activation_bytes=2**16)
PLAN = plan_of(PROFILE, chain_decision(PROFILE, cuts=(3,), micro_batches=(2, 2, 2, 2)))


def test_a_layer_is_described() -> None:
    shown = describe_layer(PLAN, PROFILE, "l3")
    assert shown.startswith("l3: stage 1, on n0/cpu1\n  linear (aten.linear.default)\n  reads l2 from stage 0\n")
    assert "reads y, an input of the step" in describe_layer(PLAN, PROFILE, "loss")
    assert "add --profile" in describe_layer(PLAN, None, "l3")
    with pytest.raises(UnknownNameError, match="no layer 'l33'"):
        describe_layer(PLAN, PROFILE, "l33")


def test_how_it_is_divided_and_whether_it_is_computed_again_is_said() -> None:
    shared = chain_decision(PROFILE, micro_batches=(4,), ranks=((0, 1),), shares=((3, 1),))
    again = replace(shared, stages=tuple(replace(stage, recompute=True) for stage in shared.stages))
    shown = describe_layer(plan_of(PROFILE, again), PROFILE, "l1")
    assert "divided over the ranks: samples 3:1" in shown
    assert "computed again before the backward" in shown
