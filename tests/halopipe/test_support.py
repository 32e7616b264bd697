from __future__ import annotations

from dataclasses import replace

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


def test_every_schedule_runs_and_so_do_recomputation_and_a_divided_optimiser() -> None:
    stages = tuple(replace(stage, recompute=True, sharded=True) for stage in GOOD.stages)
    for name in schedules.names():
        require_executable(plan_of(PROFILE, replace(GOOD, schedule=name, stages=stages)))


def test_a_run_is_refused_before_any_process_starts() -> None:
    layers = {**GOOD.layers, "l2": replace(GOOD.layers["l2"], cuts={"height": (0, 4, 8)})}
    plan = plan_of(PROFILE, replace(GOOD, layers=layers))
    for start in (running.run_plan, execute):
        with pytest.raises(UsageError, match="cannot be run yet"):
            start(plan)
