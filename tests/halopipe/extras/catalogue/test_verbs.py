from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chains import chain_profile
from halopipe.extras.catalogue import command
from halopipe.planning import plan_files, problem, solve
from planner.ir.cluster import DATASHEET, MEASURED
from planner.ir.errors import CorruptFileError

PROFILE = chain_profile(4, num_devices=2)
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


def test_this_host_is_one_device_a_core() -> None:
    found = command.detected()
    assert found.devices[0].name == "n0/cpu0"
    assert found.devices[0].memory_bytes > 0
