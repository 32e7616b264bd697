"""Sets a process up as one device: an allocator that keeps its pages, its cores, a fixed number of threads.

Without the allocator's settings glibc gives every large tensor fresh pages, and the same convolution differs by up to
48 % between two processes; with them, operators above 1 ms agree within about 3 %.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import sys
import threading
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

# <malloc.h> and <sys/prctl.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4
_PR_SET_PDEATHSIG = 1

_ALLOCATOR = ((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, (1 << 31) - 1), (_M_MMAP_MAX, 0))
"""Freed memory stays with the process, and large tensors come from the heap, whose pages are already there."""


_SWITCH_S = 1e-4
"""After so long a thread that wants the interpreter is given it (Python's own: 5 ms)."""

_GIVES_WAY = 19
"""Of a thread's niceness: it has 1.5 % of a core that another thread wants (Linux, ``man 7 sched``)."""

MPI_JOB = "HALOPIPE_MPI_JOB"
"""Set in the environment of a process that mpiexec started as a rank."""


@dataclass(frozen=True, slots=True)
class DeviceDescription:
    """What this host offers each of several workers.

    Attributes:
        processor: model name of the processor.
        num_cores: cores that this process may use.
        memory_bytes: memory that is available now, for each worker.
    """

    processor: str
    num_cores: int
    memory_bytes: int


def prepare_process(core: int | Collection[int] | None) -> None:
    """Make this process one device; call it first, before large tensors and before torch starts threads.

    May be called again.  What the operating system lacks (``mallopt``, affinity) is left out.

    Args:
        core: the only core this process may use, or those that it may use; None leaves it free.
    """
    keep_pages()
    if core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core} if isinstance(core, int) else set(core))
    os.environ["OMP_NUM_THREADS"] = "1"  # for what a library reads at its first use
    import torch  # late: the settings above come first

    torch.set_num_threads(1)


def core_of(rank: int) -> int | None:
    """The core that ``rank`` of this host runs on: ``rank`` modulo the cores that this process may use.

    Ask before ``prepare_process`` pins the caller.  None where the operating system knows no affinity.
    """
    cores = _cores()
    return cores[rank % len(cores)] if cores else None


def spare_core(rank: int, num_ranks: int) -> int | None:
    """The core that works beside ``rank`` of the ``num_ranks`` of this host, if there is one without a rank.

    Ranks take spare cores by turns, as :func:`planner.costs.stages.input_pipeline.spare_cores` expects.  Ask before
    ``prepare_process``.
    """
    spare = _cores()[num_ranks:]
    return spare[rank % len(spare)] if spare else None


def work_beside(core: int | None) -> None:
    """Make this thread one that works beside its process's main thread: on ``core``, or where that one is, giving way.

    What the operating system lacks, or forbids, is left out: then both take turns.  On another core both threads run at
    once, and the main one asks for the interpreter every time that native code ends: it shall not wait for long.
    """
    if core is not None:
        sys.setswitchinterval(_SWITCH_S)
    with contextlib.suppress(OSError, AttributeError):
        if core is not None:
            os.sched_setaffinity(0, {core})  # Linux: of this thread alone
        else:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _GIVES_WAY)


def cores_beside(accelerator: int, count: int) -> tuple[int, ...] | None:
    """The cores of a process that drives one of ``count`` accelerators of this host: its share, in one piece.

    Such a process has several threads that want to run at once: that of the program, autograd's, those that move
    messages and prepare batches.  Ask before ``prepare_process``; None where the operating system knows no affinity.
    """
    cores = _cores()
    if not cores:
        return None
    start, stop = (len(cores) * part // count for part in (accelerator, accelerator + 1))
    return tuple(cores[start:stop]) or (cores[accelerator % len(cores)],)


def device_description(num_workers: int = 1) -> DeviceDescription:
    """What each of ``num_workers`` processes on this host may use; memory is what is available, shared evenly."""
    num_cores = len(_cores()) or os.cpu_count() or 1
    return DeviceDescription(_processor(), num_cores, available_bytes() // num_workers)


def die_with_parent(parent: int) -> None:
    """Have this process killed when the process ``parent``, which started it, ends; at once if it already has.

    Does nothing where the operating system has no such signal.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process as the kernel tells of it (``man 5 proc``).

    Attributes:
        state: of its main thread: R runs or would like to, S sleeps, D waits for a disk, T is stopped, Z has ended.
        cpu_s: that it has used, with those of its children that have ended.
        started: when, in ticks since the boot: numbers of processes come again.
    """

    state: str
    parent: int
    cpu_s: float
    started: int


def process_state(pid: int) -> ProcessState | None:
    """A process of this host; None where there is none, or no ``/proc`` to tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        cpu_s = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        return ProcessState(fields[0], int(fields[1]), cpu_s, int(fields[19]))
    except (OSError, ValueError, IndexError):
        return None


def cpu_s_of_all(pid: int) -> float:
    """That a process and all that it has started have used."""
    own = process_state(pid)
    children = list[str]()
    with contextlib.suppress(OSError):  # it may end meanwhile; its first thread, which starts most, is read first
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            children += task.read_text(encoding="ascii").split()
    return (own.cpu_s if own is not None else 0.0) + sum(cpu_s_of_all(int(child)) for child in children)


def keep_pages() -> None:
    """Freed memory stays with this process from here on; before torch is loaded, so that its tensors do as well."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in _ALLOCATOR:
            mallopt(ctypes.c_int(parameter), ctypes.c_int(value))


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def available_bytes() -> int:
    """The smaller of what the machine has available and what the control group still allows."""
    amounts = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                amounts.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text(encoding="utf-8"))
        amounts.append(max(0, limit - int((group / "memory.current").read_text(encoding="utf-8"))))
    if not amounts:
        amounts.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(amounts)
