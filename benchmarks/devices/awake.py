"""Cores that never sleep while something is measured.

The cores of a virtual machine are threads of its host.  One that sleeps is put to rest, and where it wakes is up to the
host: perhaps beside this machine's other core, on one physical core, where both compute at little more than half their
speed, or it has lost its caches, or has to wait.  On the machine that most of our figures come from, adding to 16 MiB
took up to twice as long on two cores at once as on one, changing from second to second; with both cores kept awake both
took the same as one, and the spread fell from a factor of 2 to a tenth.  Pipelines wait for messages all the time, so
that their layers took a quarter longer than the same layers in a profile.

So a process spins on every core that this one may use.  It has the policy ``SCHED_IDLE``: whatever else wants the core
has it at once.  That holds within one group of the scheduler, hence sessions are not given groups meanwhile
(``kernel.sched_autogroup_enabled``), which takes root; without it cores are left as they are.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cuda_ops import die_with_parent

_GROUPS = Path("/proc/sys/kernel/sched_autogroup_enabled")


@contextmanager
def awake() -> Iterator[bool]:
    """Keeps the cores awake inside; whether that was possible."""
    with _no_session_groups() as possible:
        if not possible or not hasattr(os, "SCHED_IDLE"):
            yield False
            return
        command = [sys.executable, "-m", "benchmarks.devices.awake"]
        spinning = [subprocess.Popen([*command, str(core), str(os.getpid())]) for core in os.sched_getaffinity(0)]
        try:
            yield True
        finally:
            for process in spinning:
                process.kill()
                process.wait()


def _spin(core: int, parent: int) -> None:
    die_with_parent(parent)
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while True:
        pass


@contextmanager
def _no_session_groups() -> Iterator[bool]:
    """Whether all processes compete alike, whatever their session."""
    if not _GROUPS.exists():
        yield True
        return
    before = _GROUPS.read_text(encoding="ascii").strip()
    try:
        _GROUPS.write_text("0", encoding="ascii")
    except OSError:
        yield before == "0"
        return
    try:
        yield True
    finally:
        with contextlib.suppress(OSError):
            _GROUPS.write_text(before, encoding="ascii")


if __name__ == "__main__":
    _spin(*map(int, sys.argv[1:]))
