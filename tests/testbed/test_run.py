"""Plans whose ranks are on several hosts."""

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

from benchmarks.devices.testbed import INTERFACE, Testbed
from planner.ir.codec import dump
from planner.ir.plan import Plan
from tests.halopipe.plans import mined

pytestmark = pytest.mark.testbed
Build = Callable[..., Testbed]

ROOT = Path(__file__).parents[2]
LIMIT_S = 150.0
SCRIPT = """
import sys
from pathlib import Path
from halopipe.launch.hosts import named
from halopipe.launch.run import RunOptions, run_plan
from planner.ir.codec import load
from planner.ir.errors import HalopipeError
from planner.ir.plan import Plan

plan, steps, deadline, data, *hosts = sys.argv[1:]
options = RunOptions(steps=int(steps), warmup=0, deadline_s=float(deadline), data=data, check_first_step=False)
chosen = named(Path(hosts[0]), *hosts[1:]) if hosts else None
try:
    result = run_plan(load(plan, Plan), options, lambda at: print("step", at.step, flush=True), chosen)
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
    return sys.executable, str(job / "script.py"), str(job / "plan.json"), str(steps), str(deadline_s), data


def host_file(testbed: Testbed, job: Path) -> tuple[str, ...]:
    path = job / "hosts.txt"
    path.write_text("".join(f"{host.name} slots=1\n" for host in testbed.hosts))
    return str(path), "ip netns exec {host}", INTERFACE


def on_host(testbed: Testbed, host: int) -> list[int]:
    """Processes there."""
    command = ["ip", "netns", "pids", testbed.hosts[host].name]
    return [int(pid) for pid in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]


def wait_until(happens: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
    end_s = time.monotonic() + limit_s
    while not happens() and time.monotonic() < end_s:
        time.sleep(0.05)
    return happens()


def test_a_plan_runs_on_the_hosts_of_a_file_and_nothing_stays_there(build: Build, job: Path) -> None:
    testbed = build()
    launcher = start(testbed, 0, job, *script(job), *host_file(testbed, job))
    assert launcher.ended() == 0, launcher.output
    assert len(launcher.output.split("losses")[1].split()) == 3
    assert [on_host(testbed, host) for host in range(2)] == [[], []]
    assert list((job / "tmp").glob("halopipe-*")) == []


@pytest.mark.exhaustive("hosts of the testbed, and what ends them")
def test_ranks_on_other_hosts_end_with_a_launcher_that_is_killed(build: Build, job: Path) -> None:
    testbed = build()
    launcher = start(testbed, 0, job, *script(job, steps=100_000), *host_file(testbed, job))
    launcher.said("step 2")
    assert len(on_host(testbed, 1)) == 2  # the agent and its rank
    (rank,) = [
        pid for pid in on_host(testbed, 1) if b"halopipe.launch.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(rank, signal.SIGSTOP)  # it cannot see by itself that its connections are closed
    launcher.process.kill()
    assert wait_until(lambda: on_host(testbed, 1) == [], 20.0)


@pytest.mark.exhaustive("hosts of the testbed, and what ends them")
def test_an_interrupt_ends_the_ranks_on_all_hosts(build: Build, job: Path) -> None:
    testbed = build()
    launcher = start(testbed, 0, job, *script(job, steps=100_000), *host_file(testbed, job))
    launcher.said("step 2")
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.ended() == -signal.SIGINT, launcher.output
    assert [on_host(testbed, host) for host in range(2)] == [[], []]


@pytest.mark.exhaustive("hosts of the testbed, and what ends them")
def test_a_rank_that_is_killed_ends_all_and_is_named_with_its_host(build: Build, job: Path) -> None:
    testbed = build()
    dump(on_two_hosts(mined(2, "kill")), job / "plan.json")
    command = script(job, 5, data="tests.halopipe.bombs:poison")
    launcher = start(testbed, 0, job, *command, *host_file(testbed, job))
    assert launcher.ended() == 5, launcher.output
    launcher.said(r"error\[H501\] rank 1 \(n1/cpu0 on halopipe-\d+-n1, stage 1\) ended by signal SIGKILL")
    launcher.said("stderr: about to be killed")
    assert [on_host(testbed, host) for host in range(2)] == [[], []]


@pytest.mark.exhaustive("hosts of the testbed, and what ends them")
def test_a_cut_cable_is_a_deadline_that_names_who_is_gone(build: Build, job: Path) -> None:
    testbed = build()
    launcher = start(testbed, 0, job, *script(job, 100_000, 3.0), *host_file(testbed, job))
    launcher.said("step 5")
    testbed.cut(1)
    assert launcher.ended() == 5, launcher.output
    # The rank that waits and the launcher, which hears nothing of the other, run out of patience about together.
    launcher.said(r"error\[H503\] rank (0 \(n0/cpu0|1 \(n1/cpu0.* is silent in).* step \d+")
    launcher.said(r"for rank 1 \(.*which has said nothing for .* it is stopped, or its host or link is gone")
    assert [on_host(testbed, host) for host in range(2)] == [[], []]


def test_a_host_that_cannot_be_reached_is_named_with_what_was_tried(build: Build, job: Path) -> None:
    testbed = build()
    path, _, interface = host_file(testbed, job)
    launcher = start(testbed, 0, job, *script(job), path, "ip netns exec {host}-nowhere", interface)
    assert launcher.ended() == 5, launcher.output
    assert "error[H501] no rank could be started on halopipe-" in launcher.output
    assert "stderr: Cannot open network namespace" in launcher.output


def test_torchrun_on_each_host_runs_a_plan(build: Build, job: Path) -> None:
    testbed = build()
    master = ("--master-addr", testbed.hosts[0].address, "--master-port", "29500")
    command = (*script(job)[:1], "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *master)
    ranks = [start(testbed, host, job, *command, "--node-rank", str(host), *script(job)[1:]) for host in range(2)]
    assert [rank.ended() for rank in ranks] == [0, 0], [rank.output for rank in ranks]
    assert len(ranks[0].output.split("losses")[1].split()) == 3
    assert "losses elsewhere" in ranks[1].output


def test_slurm_needs_no_other_words(build: Build, job: Path) -> None:
    testbed = build()
    first, second = (host.address for host in testbed.hosts)
    step = {"SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": f"{first},{second}", "SLURM_JOB_ID": "77"}
    tasks = [
        start(testbed, host, job, *script(job), SLURM_PROCID=str(host), SLURM_NODEID=str(host), **step)
        for host in range(2)
    ]
    assert [task.ended() for task in tasks] == [0, 0], [task.output for task in tasks]
    assert len(tasks[0].output.split("losses")[1].split()) == 3


@pytest.mark.exhaustive("hosts of the testbed, and what ends them")
def test_in_a_job_of_slurm_all_ranks_tell_the_error_of_the_one_that_failed(build: Build, job: Path) -> None:
    testbed = build()
    dump(on_two_hosts(mined(2, "raise")), job / "plan.json")
    step = {"SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": testbed.hosts[0].address, "SLURM_JOB_ID": "77"}
    command = script(job, 5, data="tests.halopipe.bombs:poison")
    tasks = [start(testbed, host, job, *command, SLURM_PROCID=str(host), **step) for host in range(2)]
    assert [task.ended() for task in tasks] == [5, 5]
    for task in tasks:
        assert "error[H502] rank 1 (n1/cpu0, stage 1) stopped at step 2" in task.output
        assert "the bomb went off" in task.output
