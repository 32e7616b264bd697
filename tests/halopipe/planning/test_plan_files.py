from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chains import chain_profile
from halopipe.planning import plan_files, solve
from halopipe.planning import problem as problems
from planner.ir.codec import dump
from planner.ir.errors import StaleFileError
from tests.planner.factories import chain_decision, plan_of

PROFILE = chain_profile(4, memory_bytes=2**30)
PLAN = plan_of(PROFILE, chain_decision(PROFILE, cuts=(2,)))

CLUSTER = """
halopipe: cluster
version: 1
hosts: [{name: n, devices: [{device: T4, count: 2}]}]
links: {within-host: PCIe-3}
"""


def test_a_profile_that_the_plan_was_not_made_from_is_refused(tmp_path: Path) -> None:
    dump(PROFILE, tmp_path / "mine.json")
    dump(chain_profile(4, forward_s=2e-3), tmp_path / "other.json")
    assert plan_files.load_profile(tmp_path / "mine.json", PLAN) == PROFILE
    with pytest.raises(StaleFileError, match="the plan was made for another profile"):
        plan_files.load_profile(tmp_path / "other.json", PLAN)


def test_devices_are_named_by_rank() -> None:
    shifted = plan_of(PROFILE, chain_decision(PROFILE, ranks=((1,),)))
    assert plan_files.device_names(shifted) == ["not used", "n0/cpu1"]


def test_a_plan_for_other_machines_is_recognised_with_its_cluster_file(tmp_path: Path) -> None:
    dump(PROFILE, tmp_path / "profile.json")
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    profile = plan_files.load_profile(tmp_path / "profile.json", cluster=tmp_path / "cluster.yaml")
    plan = solve.solve(problems.make_problem(profile), "one-device")
    found = plan_files.profile_of(plan, tmp_path / "plan.json", None, tmp_path / "cluster.yaml")
    assert found == profile
    assert plan_files.profile_of(plan, tmp_path / "plan.json", None) is None
    with pytest.raises(StaleFileError):
        plan_files.profile_of(plan, tmp_path / "plan.json", tmp_path / "profile.json")
