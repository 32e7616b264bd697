"""A model and the links between several hosts, measured by a job of torchrun."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.devices.testbed import RATES, Testbed
from planner.ir.cluster import ACROSS_HOSTS, MEASURED, WITHIN_HOST
from planner.ir.codec import load
from planner.ir.profile import Profile
from tests.testbed.test_run import ROOT, Running, torchrun

pytestmark = pytest.mark.testbed
Build = Callable[..., Testbed]

MODEL = "small.py:net"
OPTIONS = ("--input", "2,8", "--sizes", "2", "--quick")
FACTORY = """
import torch

def net():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
"""


def begin(testbed: Testbed, job: Path, counts: tuple[int, ...], model: str = MODEL) -> list[Running]:
    """One torchrun on each host, of so many ranks."""
    (job / "tmp").mkdir()
    (job / "small.py").write_text(FACTORY)
    words = ("-m", "halopipe", "profile", model, *OPTIONS, "-o", "profile.json")
    return torchrun(testbed, job, counts, *words)


@pytest.mark.exhaustive("two hosts measure a model and their links")
def test_two_hosts_become_one_profile(build: Build, tmp_path: Path) -> None:
    testbed = build()
    hosts = begin(testbed, tmp_path, (2, 1))
    assert [host.ended() for host in hosts] == [0, 0], [host.output for host in hosts]
    found = load(tmp_path / "profile.json", Profile)
    assert [device.name for device in found.cluster.devices] == ["n0/cpu0", "n0/cpu1", "n1/cpu0"]
    assert list(found.cluster.links) == [WITHIN_HOST, ACROSS_HOSTS]
    link = found.cluster.links[ACROSS_HOSTS]
    assert link.evidence == MEASURED
    assert link.bandwidth_bytes_per_s == pytest.approx(RATES["1gbit"].payload_bytes_per_s, rel=0.3)
    assert {(table.num_ranks, table.num_hosts) for table in found.cluster.collectives} == {
        (1, 0),  # calls around exchanges
        (2, 1),
        (2, 2),
        (3, 2),
    }
    assert {process.host for process in found.provenance.processes} == {"n0", "n1"}
    assert "wrote profile.json" in hosts[0].output
    assert "wrote" not in hosts[1].output
    assert [testbed.processes(host) for host in range(2)] == [[], []]
    plan = (sys.executable, "-m", "halopipe", "plan", "profile.json", "-o", "plan.json", "--time-limit", "5")
    planned = subprocess.run(plan, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert planned.returncode == 0, planned.stderr


@pytest.mark.exhaustive("hosts of the testbed")
def test_a_host_that_cannot_measure_is_named(build: Build, tmp_path: Path) -> None:
    testbed = build()
    hosts = begin(testbed, tmp_path, (1, 1), "no_such:net")
    assert 0 not in [host.ended() for host in hosts]
    assert all("no_such" in host.output for host in hosts)
    assert [testbed.processes(host) for host in range(2)] == [[], []]
