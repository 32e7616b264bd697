from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cuda_ops import core_of, device_description, prepare_process
from cuda_ops.device.host import cpu_s_of_all

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")


def in_new_process(program: str) -> str:
    command = [sys.executable, "-c", program]
    path = os.pathsep.join(sys.path)
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60, env={**os.environ, "PYTHONPATH": path}
    ).stdout


@linux_only
def test_ranks_take_the_cores_of_this_process_in_turn() -> None:
    cores = sorted(os.sched_getaffinity(0))
    assert [core_of(rank) for rank in range(2 * len(cores))] == cores * 2


@linux_only
def test_a_prepared_process_has_one_core_and_one_thread() -> None:
    core = core_of(1)
    program = (
        "import os; from cuda_ops import prepare_process\n"
        f"for _ in range(2): prepare_process({core})\n"
        "import torch; print(sorted(os.sched_getaffinity(0)), torch.get_num_threads())"
    )
    assert in_new_process(program).strip() == f"[{core}] 1"


@linux_only
def test_freed_memory_stays_with_a_prepared_process() -> None:
    program = (
        "from cuda_ops import prepare_process; prepare_process(None)\n"
        "import torch, resource\n"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(20): torch.zeros(1 << 24)\n"  # glibc 2.36 leaves splinters in the first rounds
        "before = faults()\n"
        "for _ in range(5): torch.zeros(1 << 24)\n"  # 64 MiB = 16384 pages
        "print(faults() - before)"
    )
    assert int(in_new_process(program)) < 16384


def test_without_a_core_the_affinity_stays() -> None:
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    prepare_process(None)
    assert before is None or os.sched_getaffinity(0) == before


def test_memory_is_shared_by_the_workers() -> None:
    alone, shared = device_description(1), device_description(4)
    assert shared.processor == alone.processor != ""
    assert shared.num_cores == alone.num_cores >= 1
    assert shared.memory_bytes == pytest.approx(alone.memory_bytes / 4, rel=0.2)


@linux_only
def test_a_child_dies_with_its_parent() -> None:
    child = "import sys, time; from cuda_ops import die_with_parent; die_with_parent(int(sys.argv[1])); time.sleep(60)"
    parent = (
        "import os, subprocess, sys\n"
        f"process = subprocess.Popen([sys.executable, '-c', {child!r}, str(os.getpid())])\n"
        "import time; time.sleep(1)\n"
        "print(process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    result = subprocess.run(
        [sys.executable, "-c", parent],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert result.returncode == -signal.SIGKILL
    assert _is_gone(int(result.stdout), deadline_s=10)


def _is_gone(process: int, deadline_s: float) -> bool:
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        try:
            with open(f"/proc/{process}/stat", encoding="ascii") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def test_a_process_that_ends_while_it_is_looked_at_has_used_what_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python looks whether the folder of its threads is there, and only then into it."""

    def ended(self: Path, _: str) -> Iterator[Path]:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "glob", ended)
    assert cpu_s_of_all(os.getpid()) > 0
