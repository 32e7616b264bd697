"""Plans, profiles and measurements of links whose ranks are on several hosts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.devices.testbed import RATES, Testbed
from benchmarks.links.__main__ import answer_of
from planner.ir.cluster import ACROSS_HOSTS, MEASURED, WITHIN_HOST
from planner.ir.codec import dump, load
from planner.ir.plan import Plan
from planner.ir.profile import Profile
from profiler.links.messages import LinkEffort
from profiler.links.processes import LinkCosts
from tests.halopipe.plans import RESNET, mined, plan_of

pytestmark = pytest.mark.testbed
Build = Callable[..., Testbed]

ROOT = Path(__file__).parents[2]
LIMIT_S = 150.0
SCRIPT = """
import sys
from halopipe.launch.run import RunOptions, run_plan
from planner.ir.codec import load
from planner.ir.errors import HalopipeError
from planner.ir.plan import Plan

plan, steps, deadline, data = sys.argv[1:]
options = RunOptions(steps=int(steps), warmup=0, deadline_s=float(deadline), data=data, check_first_step=False)
try:
    result = run_plan(load(plan, Plan), options, lambda at: print("step", at.step, flush=True))
    print("losses", *(result.losses if result else ["elsewhere"]), flush=True)
except HalopipeError as error:
    print(error, flush=True)
    sys.exit(error.exit_code)
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder with a script and a plan of two stages, each on a host of its own."""
    (tmp_path / "script.py").write_text(SCRIPT)
    dump(on_two_hosts(mined()), tmp_path / "plan.json")
    (tmp_path / "tmp").mkdir()
    return tmp_path


def on_two_hosts(plan: Plan) -> Plan:
    stages = (replace(stage, devices=(f"n{number}/cpu0",)) for number, stage in enumerate(plan.decision.stages))
    return replace(plan, decision=replace(plan.decision, stages=tuple(stages)))


@dataclass
class Running:
    """A process whose output goes to a file."""

    process: subprocess.Popen[bytes]
    path: Path

    @property
    def output(self) -> str:
        return self.path.read_text()

    def said(self, pattern: str) -> str:
        """The first match of a pattern in its output, which must come."""
        assert wait_until(lambda: re.search(pattern, self.output) or self.process.poll() is not None)
        found = re.search(pattern, self.output)
        assert found, self.output
        return found.group()

    def ended(self) -> int:
        return self.process.wait(LIMIT_S)


def start(testbed: Testbed, host: int, job: Path, *arguments: str, **variables: str) -> Running:
    """A command on a host, in the job's folder and an environment of its own."""
    environment = {"PYTHONPATH": str(ROOT), "TMPDIR": str(job / "tmp"), "OMP_NUM_THREADS": "1", **variables}
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LD_LIBRARY_PATH")}
    path = job / f"output-{host}.txt"
    with path.open("wb") as file:
        options: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT, "cwd": job}
        return Running(testbed.start(host, arguments, env=kept | environment, **options), path)


def script(job: Path, steps: int = 3, deadline_s: float = 60.0, data: str = "") -> tuple[str, ...]:
    return str(job / "script.py"), str(job / "plan.json"), str(steps), str(deadline_s), data


def torchrun(testbed: Testbed, job: Path, counts: tuple[int, ...], *words: str) -> list[Running]:
    """One torchrun on each host, of so many ranks, that meet at the first host."""
    master = ("--master-addr", testbed.hosts[0].address, "--master-port", "29500", "--monitor-interval", "0.1")
    command = (sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(counts)), *master)
    return [
        start(testbed, host, job, *command, "--node-rank", str(host), "--nproc-per-node", str(count), *words)
        for host, count in enumerate(counts)
    ]


def wait_until(happens: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
    end_s = time.monotonic() + limit_s
    while not happens() and time.monotonic() < end_s:
        time.sleep(0.05)
    return happens()


def begin(testbed: Testbed, job: Path, *words: str) -> list[Running]:
    """A rank on each of two hosts, which have come so far as step 2."""
    hosts = torchrun(testbed, job, (1, 1), *words)
    hosts[0].said("step 2")
    return hosts


def rank_on(testbed: Testbed, host: int) -> int:
    """The rank there: the child of its torchrun."""
    (rank,) = [
        pid
        for pid in testbed.processes(host)
        if b"torch.distributed.run" not in (command := Path(f"/proc/{pid}/cmdline").read_bytes())
        and b"script.py" in command
    ]
    return rank


@pytest.mark.exhaustive("hosts of the testbed")
def test_a_plan_runs_on_several_hosts_and_nothing_stays_there(build: Build, job: Path) -> None:
    testbed = build()
    hosts = torchrun(testbed, job, (1, 1), *script(job))
    assert [host.ended() for host in hosts] == [0, 0], [host.output for host in hosts]
    assert len(hosts[0].output.split("losses")[1].split()) == 3
    assert "losses elsewhere" in hosts[1].output
    assert [testbed.processes(host) for host in range(2)] == [[], []]
    assert list((job / "tmp").glob("halopipe-*")) == []


@pytest.mark.exhaustive("hosts of the testbed")
def test_ranks_run_on_the_hosts_of_their_devices_whatever_their_numbers(build: Build, job: Path) -> None:
    """Of the plan's ranks 0, 1, 2 the first and the last are on one host."""
    plan = plan_of(RESNET, [0.3, 0.6])
    stages = zip(plan.decision.stages, ("n0/cpu0", "n1/cpu0", "n0/cpu1"), strict=True)
    placed = tuple(replace(stage, devices=(device,)) for stage, device in stages)
    dump(replace(plan, decision=replace(plan.decision, stages=placed)), job / "plan.json")
    testbed = build()
    hosts = torchrun(testbed, job, (2, 1), "-m", "halopipe", "run", "plan.json", "--steps", "2", "--check-numerics")
    assert [host.ended() for host in hosts] == [0, 0], [host.output for host in hosts]
    assert "numerics: " in hosts[0].output


@pytest.mark.exhaustive("hosts of the testbed, and what ends them")
def test_ranks_end_with_the_torchrun_of_their_host(build: Build, job: Path) -> None:
    testbed = build()
    hosts = begin(testbed, job, *script(job, steps=100_000, deadline_s=5.0))
    assert len(testbed.processes(1)) == 2  # torchrun and its rank
    os.kill(rank_on(testbed, 1), signal.SIGSTOP)  # it cannot see by itself that its connections are closed
    hosts[1].process.kill()
    assert wait_until(lambda: testbed.processes(1) == [], 20.0)
    assert hosts[0].ended() != 0
    hosts[0].said(r"error\[H50\d\]")
    assert testbed.processes(0) == []


@pytest.mark.exhaustive("hosts of the testbed, and what ends them")
def test_an_interrupt_ends_the_ranks_on_all_hosts(build: Build, job: Path) -> None:
    testbed = build()
    hosts = begin(testbed, job, *script(job, steps=100_000, deadline_s=5.0))
    hosts[0].process.send_signal(signal.SIGINT)
    assert 0 not in [host.ended() for host in hosts]
    assert [testbed.processes(host) for host in range(2)] == [[], []]


@pytest.mark.exhaustive("hosts of the testbed, and what ends them")
def test_a_rank_that_is_killed_ends_all_and_is_named(build: Build, job: Path) -> None:
    testbed = build()
    dump(on_two_hosts(mined(2, "kill")), job / "plan.json")
    hosts = torchrun(testbed, job, (1, 1), *script(job, 5, 5.0, data="tests.halopipe.bombs:poison"))
    assert 0 not in [host.ended() for host in hosts]
    hosts[0].said(r"error\[H50\d\] .*rank 1")
    hosts[1].said("about to be killed")
    assert [testbed.processes(host) for host in range(2)] == [[], []]


@pytest.mark.exhaustive("hosts of the testbed, and what ends them")
def test_a_rank_that_raises_is_heard_of_by_all_hosts(build: Build, job: Path) -> None:
    testbed = build()
    dump(on_two_hosts(mined(2, "raise")), job / "plan.json")
    hosts = torchrun(testbed, job, (1, 1), *script(job, 5, data="tests.halopipe.bombs:poison"))
    assert 0 not in [host.ended() for host in hosts]
    for host in hosts:
        assert "error[H502] rank 1 (n1/cpu0, stage 1) stopped at step 2" in host.output
        assert "the bomb went off" in host.output


@pytest.mark.exhaustive("hosts of the testbed, and what ends them")
def test_a_cut_cable_is_a_deadline_that_names_who_is_gone(build: Build, job: Path) -> None:
    testbed = build()
    hosts = torchrun(testbed, job, (1, 1), *script(job, 100_000, 3.0))
    hosts[0].said("step 5")
    testbed.cut(1)
    assert hosts[0].ended() != 0, hosts[0].output
    hosts[0].said(r"error\[H503\] rank 0 \(n0/cpu0.* step \d+")
    hosts[0].said(r"for rank 1 \(.*which has said nothing for .* it is stopped, or its host or link is gone")
    assert testbed.processes(0) == []


def test_tasks_of_slurm_are_told_to_start_torchrun(job: Path) -> None:
    slurm = {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_JOB_ID": "77", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *script(job)], env=os.environ | slurm, capture_output=True, text=True)
    assert done.returncode == 2
    assert "srun --ntasks-per-node 1 torchrun" in done.stdout


LEAST = LinkEffort(rounds=1, most=3, each_s=1e-3, longest_s=1e-3, stream_s=0.2, bends=False)


@pytest.mark.exhaustive("hosts of the testbed")
def test_links_to_a_slower_host_are_stated_apart(build: Build, tmp_path: Path) -> None:
    testbed = build(3, "1gbit")
    slow = RATES["200mbit"]
    bucket = ("tbf", "rate", f"{slow.bits_per_s:.0f}bit", "burst", str(slow.burst_bytes), "limit", "1000000")
    for namespace, device in ((testbed.hosts[2].name, "eth0"), (f"{testbed.name}-switch", "port2")):
        assert os.spawnlp(os.P_WAIT, "tc", *("tc", "-n", namespace), *_replace(device), *bucket) == 0
    found = answer_of(tmp_path, ("n0", "n1", "n2"), testbed, {"effort": LEAST})
    assert isinstance(found, LinkCosts)
    rates = {(pair.src_host, pair.dst_host): pair.link.bandwidth_bytes_per_s for pair in found.pairs}
    usual = found.links[ACROSS_HOSTS].bandwidth_bytes_per_s
    limit = 1.2 * slow.payload_bytes_per_s  # what a busy machine cannot make faster
    assert all(rates.get(ends, usual) < limit for ends in (("n0", "n2"), ("n1", "n2"), ("n2", "n0"), ("n2", "n1")))
    assert all(rates.get(ends, usual) > limit for ends in (("n0", "n1"), ("n1", "n0")))


def _replace(device: str) -> tuple[str, ...]:
    return ("qdisc", "replace", "dev", device, "root")


MODEL = "small.py:net"
OPTIONS = ("--input", "2,8", "--sizes", "2", "--quick")
FACTORY = """
import torch

def net():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
"""


def measuring(testbed: Testbed, job: Path, counts: tuple[int, ...], model: str = MODEL) -> list[Running]:
    """One torchrun on each host, of so many ranks."""
    (job / "tmp").mkdir()
    (job / "small.py").write_text(FACTORY)
    words = ("-m", "halopipe", "profile", model, *OPTIONS, "-o", "profile.json")
    return torchrun(testbed, job, counts, *words)


@pytest.mark.exhaustive("two hosts measure a model and their links")
def test_two_hosts_become_one_profile(build: Build, tmp_path: Path) -> None:
    testbed = build()
    hosts = measuring(testbed, tmp_path, (2, 1))
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
    hosts = measuring(testbed, tmp_path, (1, 1), "no_such:net")
    assert 0 not in [host.ended() for host in hosts]
    assert all("no_such" in host.output for host in hosts)
    assert [testbed.processes(host) for host in range(2)] == [[], []]
