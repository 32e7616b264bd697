"""A cluster file in place of the profile's machines, and the catalogue of devices: from scripts and verbs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import halopipe as hp
from benchmarks.chains import chain_profile
from halopipe.extras.catalogue import command
from halopipe.planning import plan_files, problem, solve
from planner.ir.cluster import DATASHEET, MEASURED
from planner.ir.codec import load
from planner.ir.errors import CorruptFileError
from planner.ir.plan import Plan
from tests.halopipe.commands import call, good, require_said

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
    made = good("plan", "profile.json", *machines, "--solver", "even-split", "-o", "t4.json")
    assert "costs: datasheet" in made.stdout
    assert load("t4.json", Plan).decision.stages[0].devices == ("n0/gpu0",)
    for verb in ("explain", "check"):
        good(verb, "t4.json", *machines)
    assert call("explain", "t4.json", "--profile", "profile.json").exit_code == 3
    forgotten = call("check", "t4.json", "--profile", "profile.json")
    assert (forgotten.exit_code, "with --cluster FILE" in forgotten.stderr) == (6, True)
    written = good("cluster", "cluster.yaml", "--profile", "profile.json", "-o", "scaled.json")
    assert "across-hosts" in written.stdout
    assert call("check", "t4.json", "--profile", "scaled.json").exit_code == 0


def test_a_script_names_a_cluster_file(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    there = hp.plan(PROFILE, cluster=tmp_path / "cluster.yaml", memory="8GiB", solver="even-split")
    assert there.decision.stages[0].devices == ("n0/gpu0",)
    assert there == hp.plan(hp.on_cluster(PROFILE, tmp_path / "cluster.yaml"), memory=8 * 2**30, solver="even-split")


@pytest.mark.parametrize(("verb", "text"), [("devices", "V100-16GB"), ("cluster", "n0")])
def test_the_catalogue_and_this_host_are_listed_and_json_stands_alone_on_stdout(verb: str, text: str) -> None:
    assert text in call(verb).stdout
    result = call(verb, "--json")
    assert isinstance(json.loads(result.stdout), dict), result.stderr


MIXED = """
halopipe: cluster
version: 1
hosts:
  - name: m
    count: 2
    devices: [{device: kind-1, count: 2}, T4]
links: {within-host: measured, across-hosts: Ethernet-10G}
"""


def test_a_profile_is_had_on_machines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(MIXED)
    found = plan_files.on_cluster(PROFILE, path)
    assert [device.kind for device in found.cluster.devices] == ["kind-1", "kind-1", "T4"] * 2
    assert found.measurements["kind-1"] == PROFILE.measurements["kind-1"]
    assert {m.evidence for m in found.measurements["T4"]} == {DATASHEET}
    plan = solve.solve(problem.make_problem(found), "one-device")
    assert plan.prediction.evidence == DATASHEET
    assert plan_files.on_cluster(PROFILE, PROFILE.cluster) == PROFILE
    path.write_text("hosts: 1")
    with pytest.raises(CorruptFileError):
        plan_files.on_cluster(PROFILE, path)


def test_a_cluster_is_shown_by_host_and_kind(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(MIXED)
    shown = command.cluster_text(plan_files.on_cluster(PROFILE, path).cluster, PROFILE.measurements).splitlines()
    assert shown[1].split() == ["m0", "cpu0", "...", "cpu1", "(2)", "kind-1", "1.00", "GiB", "measured"]
    assert shown[2].split() == ["m0", "gpu0", "T4", "14.8", "GiB", "–"]
    assert shown[-2].split()[-1] == MEASURED
    assert shown[-1].split() == ["across-hosts", "1.16", "GiB/s", "0", "s", DATASHEET]


def test_the_catalogue_is_a_table_and_data_with_sources() -> None:
    table = command.catalogue_table()
    assert "V100-16GB" in table
    assert "InfiniBand-NDR" in table
    data = command.catalogue_data()
    (entry,) = (entry for entry in data["devices"] if entry["name"] == "V100-16GB")
    assert entry["memory_bytes"]["value"] == 2**34
    assert entry["memory_bytes"]["source"]
    assert entry["memory_bytes"]["date"]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("words", "exit_code", "text"),
    [
        ("plan profile.json --cluster nowhere.yaml", 3, "error[H301] cannot read nowhere.yaml"),
        ("plan profile.json --cluster broken.json", 3, "error[H302] broken.json is not YAML"),
        ("cluster broken.json", 3, "error[H302] broken.json is not YAML"),
        ("cluster -o x.json", 2, "--output needs a cluster file and --profile"),
    ],
)
def test_what_goes_wrong_is_said_on_stderr_with_its_exit_code(
    folder: Path, words: str, exit_code: int, text: str
) -> None:
    require_said(folder, words.split(), exit_code, text)
