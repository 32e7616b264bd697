"""A cluster file in place of the profile's machines: ``--cluster``, ``hp.on_cluster``, ``halopipe cluster``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import halopipe as hp
from benchmarks.chains import chain_profile
from halopipe.planning import plan_files, solve
from halopipe.planning import problem as problems
from planner.ir.codec import dump, load
from planner.ir.errors import StaleFileError
from planner.ir.plan import Plan
from tests.halopipe.cli.conftest import folder as folder
from tests.halopipe.commands import call, require_said

PROFILE = chain_profile(4, num_devices=2)
CLUSTER = """
halopipe: cluster
version: 1
hosts: [{name: n, count: 2, devices: [{device: T4, count: 2}]}]
links: {within-host: PCIe-3, across-hosts: Ethernet-10G}
"""


def test_machines_one_does_not_have_are_planned_for(folder: Path) -> None:
    (folder / "cluster.yaml").write_text(CLUSTER)
    machines = ["--cluster", "cluster.yaml"]
    made = call("plan", "profile.json", *machines, "--solver", "even-split", "-o", "t4.json")
    assert made.exit_code == 0, made.stderr
    assert "costs: datasheet" in made.stdout
    assert load("t4.json", Plan).decision.stages[0].devices == ("n0/gpu0",)
    for verb in ("explain", "check"):
        found = call(verb, "t4.json", *machines)
        assert found.exit_code == 0, found.stderr
    assert call("explain", "t4.json", "--profile", "profile.json").exit_code == 3
    forgotten = call("check", "t4.json", "--profile", "profile.json")
    assert (forgotten.exit_code, "with --cluster FILE" in forgotten.stderr) == (6, True)
    written = call("cluster", "cluster.yaml", "--profile", "profile.json", "-o", "scaled.json")
    assert written.exit_code == 0, written.stderr
    assert "across-hosts" in written.stdout
    assert call("check", "t4.json", "--profile", "scaled.json").exit_code == 0


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


def test_a_script_names_a_cluster_file(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    there = hp.plan(PROFILE, cluster=tmp_path / "cluster.yaml", memory="8GiB", solver="even-split")
    assert there.decision.stages[0].devices == ("n0/gpu0",)
    assert there == hp.plan(hp.on_cluster(PROFILE, tmp_path / "cluster.yaml"), memory=8 * 2**30, solver="even-split")


def test_the_catalogue_and_this_host_are_listed(folder: Path) -> None:
    assert "V100-16GB" in call("devices").stdout
    assert "n0" in call("cluster").stdout


@pytest.mark.parametrize("verb", ["devices", "cluster"])
def test_json_stands_alone_on_stdout(folder: Path, verb: str) -> None:
    result = call(verb, "--json")
    assert isinstance(json.loads(result.stdout), dict), result.stderr


@pytest.mark.parametrize(
    ("arguments", "exit_code", "text"),
    [
        (["plan", "profile.json", "--cluster", "nowhere.yaml"], 3, "error[H301] cannot read nowhere.yaml"),
        (["plan", "profile.json", "--cluster", "broken.json"], 3, "error[H302] broken.json is not YAML"),
        (["cluster", "broken.json"], 3, "error[H302] broken.json is not YAML"),
        (["cluster", "-o", "x.json"], 2, "--output needs a cluster file and --profile"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_goes_wrong_is_said_on_stderr_with_its_exit_code(
    folder: Path, arguments: list[str], exit_code: int, text: str
) -> None:
    require_said(folder, arguments, exit_code, text)
