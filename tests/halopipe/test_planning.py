from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from halopipe import planning
from planner.ir.codec import dump
from planner.ir.errors import RankCountError, StaleFileError, UnknownNameError, UsageError
from tests.planner.factories import chain_decision, chain_profile, plan_of

PROFILE = chain_profile(4, memory_bytes=2**30)
PLAN = plan_of(PROFILE, chain_decision(PROFILE, cuts=(2,)))


def test_the_defaults_are_the_batch_of_the_example_and_all_schedules() -> None:
    problem = planning.make_problem(PROFILE)
    assert problem.global_batch == PROFILE.graph.samples
    assert problem.schedules == planning.schedule_names()
    assert problem.ranks == (0, 1)


def test_a_memory_limit_is_kept_to_the_byte_or_just_below() -> None:
    problem = planning.make_problem(PROFILE, memory_bytes=300_000_001)
    assert 300_000_000 <= problem.memory_limit_bytes(0) <= 300_000_001


def test_more_memory_than_there_is_cannot_be_asked_for() -> None:
    with pytest.raises(UsageError, match="more than the devices have"):
        planning.make_problem(PROFILE, memory_bytes=2**31)
    uneven = chain_profile(4, memory_bytes=(2**30, 2**29))
    with pytest.raises(UsageError, match="one memory size"):
        planning.make_problem(uneven, memory_bytes=2**20)


def test_more_ranks_than_devices_cannot_be_asked_for() -> None:
    with pytest.raises(RankCountError, match="3 ranks are asked for, the profile has 2"):
        planning.make_problem(PROFILE, num_ranks=3)


def test_an_unknown_schedule_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="no schedule '1b1f'") as caught:
        planning.make_problem(PROFILE, schedules=["gpipe", "1b1f"])
    assert caught.value.remedies == ("1f1b (did you mean that?)",)


def test_a_micro_batch_larger_than_the_batch_is_refused() -> None:
    with pytest.raises(UsageError, match="micro-batch 16 is larger than the global batch 8"):
        planning.make_problem(PROFILE, micro_batch=[16])


def test_the_margin_is_read_back_from_the_plan() -> None:
    assert planning.memory_margin(PLAN, PROFILE) == 0.0
    tight = replace(PLAN.prediction.ranks[0], memory_limit_bytes=2**29)
    plan = replace(PLAN, prediction=replace(PLAN.prediction, ranks=(tight,)))
    assert planning.memory_margin(plan, PROFILE) == 0.5


def test_a_profile_that_the_plan_was_not_made_from_is_refused(tmp_path: Path) -> None:
    dump(PROFILE, tmp_path / "mine.json")
    dump(chain_profile(4, forward_s=2e-3), tmp_path / "other.json")
    assert planning.load_profile(tmp_path / "mine.json", PLAN) == PROFILE
    with pytest.raises(StaleFileError, match="the plan was made for another profile"):
        planning.load_profile(tmp_path / "other.json", PLAN)


def test_devices_are_named_by_rank() -> None:
    shifted = plan_of(PROFILE, chain_decision(PROFILE, ranks=((1,),)))
    assert planning.device_names(shifted) == ["not used", "n0/cpu1"]


def test_baselines_that_do_not_fit_say_why() -> None:
    solved = planning.solve_baselines(planning.make_problem(PROFILE))
    assert {"one-device", "data-parallel", "even-split"} <= set(solved.plans)
    tight = planning.make_problem(chain_profile(4, parameter_bytes=2**20), memory_bytes=3 * 2**20)
    assert "one-device" in planning.solve_baselines(tight).infeasible
