from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chains import chain_profile
from halopipe.planning import plan_files
from planner.ir.codec import dump
from planner.ir.errors import StaleFileError
from tests.planner.factories import chain_decision, plan_of

PROFILE = chain_profile(4, memory_bytes=2**30)
PLAN = plan_of(PROFILE, chain_decision(PROFILE, cuts=(2,)))


def test_a_profile_that_the_plan_was_not_made_from_is_refused(tmp_path: Path) -> None:
    dump(PROFILE, tmp_path / "mine.json")
    dump(chain_profile(4, forward_s=2e-3), tmp_path / "other.json")
    assert plan_files.load_profile(tmp_path / "mine.json", PLAN) == PROFILE
    with pytest.raises(StaleFileError, match="the plan was made for another profile"):
        plan_files.load_profile(tmp_path / "other.json", PLAN)


def test_devices_are_named_by_rank() -> None:
    shifted = plan_of(PROFILE, chain_decision(PROFILE, ranks=((1,),)))
    assert plan_files.device_names(shifted) == ["not used", "n0/cpu1"]
