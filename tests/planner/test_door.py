"""What the planner offers to whoever plans, prices or checks."""

from __future__ import annotations

from dataclasses import replace

import pytest

import planner
from benchmarks.chains import chain_profile
from planner.ir.errors import UnknownNameError

PROFILE = chain_profile(4, 2)


def test_a_plan_is_what_its_prediction_says_and_has_no_faults() -> None:
    plan = planner.plan(planner.Problem(PROFILE, 8, confidence=0.0))
    prediction, timeline = planner.predict(PROFILE, plan.decision)
    assert prediction == plan.prediction
    assert timeline.step_s == prediction.step_s
    assert planner.faults_of(plan, PROFILE) == ()
    slow = replace(plan, prediction=replace(prediction, step_s=2 * prediction.step_s))
    assert any(fault.startswith("prediction.step_s:") for fault in planner.faults_of(slow, PROFILE))


def test_a_rival_is_asked_by_name() -> None:
    assert len(planner.plan(planner.Problem(PROFILE, 8, confidence=0.0), "data-parallel").decision.stages) == 1
    with pytest.raises(UnknownNameError):
        planner.plan(planner.Problem(PROFILE, 8, confidence=0.0), "nobody")


def test_what_the_door_names_is_there() -> None:
    assert all(getattr(planner, name) is not None for name in planner.__all__)
