from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from halopipe import running
from halopipe.executing import execute
from halopipe.support import require_executable
from planner import schedules
from planner.ir.errors import UsageError
from planner.ir.plan import Decision
from tests.planner.factories import chain_decision, chain_profile, plan_of

PROFILE = chain_profile(4)
GOOD = chain_decision(PROFILE, micro_batches=(4, 4), ranks=((0, 1),), shares=((3, 1),))


def refused(decision: Decision) -> UsageError:
    with pytest.raises(UsageError, match="this plan cannot be run yet") as caught:
        require_executable(plan_of(PROFILE, decision))
    assert "executed today: layers cut along samples alone" in caught.value.details[-1]
    return caught.value


@pytest.mark.parametrize("name", schedules.default_names())
def test_what_the_planner_chooses_by_default_runs(name: str) -> None:
    require_executable(plan_of(PROFILE, chain_decision(PROFILE, cuts=(2,), schedule=name)))
    require_executable(plan_of(PROFILE, GOOD))


def test_layers_cut_along_space_are_refused_by_name() -> None:
    layers = {**GOOD.layers, "l2": replace(GOOD.layers["l2"], cuts={"height": (0, 4, 8)})}
    error = refused(replace(GOOD, layers=layers))
    assert error.details[0] == "1 layers are cut along other dims than samples, such as l2 along height"


def test_several_layouts_in_a_stage_are_refused() -> None:
    layers = {**GOOD.layers, "l2": replace(GOOD.layers["l2"], cuts={"sample": (0, 1, 4)})}
    assert refused(replace(GOOD, layers=layers)).details[0] == "stage 0 divides l2 otherwise than its other layers"


def test_recomputation_is_refused() -> None:
    stages = tuple(replace(stage, recompute=True) for stage in GOOD.stages)
    assert "stage 0 computes activations again" in refused(replace(GOOD, stages=stages)).details[0]


def test_schedules_that_change_the_optimisation_or_do_not_train_are_refused() -> None:
    asynchronous = [name for name in schedules.names() if not schedules.traits(name).synchronous]
    for name in asynchronous:
        assert "changes the optimisation" in refused(replace(GOOD, schedule=name)).details[0]
    forward = tuple(tuple(text for text in row if "F" in text) for row in GOOD.program)
    assert "forward passes alone" in refused(replace(GOOD, program=forward)).details[0]


def test_all_reasons_are_given_at_once() -> None:
    layers = {**GOOD.layers, "l2": replace(GOOD.layers["l2"], cuts={"height": (0, 4, 8)})}
    stages = tuple(replace(stage, recompute=True) for stage in GOOD.stages)
    assert len(refused(replace(GOOD, layers=layers, stages=stages)).details) == 3


def test_a_run_is_refused_before_any_process_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = plan_of(PROFILE, replace(GOOD, stages=tuple(replace(stage, recompute=True) for stage in GOOD.stages)))
    for start in (running.run_plan, execute):
        with pytest.raises(UsageError, match="cannot be run yet"):
            start(plan)
