"""Jobs whose ranks are processes forked from this one, on hosts of a testbed or on this one.

Each runs ``halopipe`` as a batch system starts it, with ``RANK`` and ``MASTER_ADDR`` in its environment, or is the
agent of torchrun on its host, which starts the ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from benchmarks.devices.testbed import INTERFACE, Testbed
from benchmarks.report import Row, at_least, at_most
from cuda_ops import die_with_parent
from cuda_ops.device.host import process_state

PORT = 29500
"""Where the ranks of hosts meet."""

_CLONE_NEWUTS = 0x04000000  # <sched.h>


@dataclass(slots=True)
class Job:
    """One start of a job: a process a rank.

    Attributes:
        pids: by rank.
        ended: exit code of each rank that has ended, and when.
    """

    folder: Path
    pids: dict[int, int] = field(default_factory=dict)
    ended: dict[int, tuple[int, float]] = field(default_factory=dict)

    @classmethod
    def start(
        cls,
        folder: Path,
        host_of: Mapping[int, int],
        words: Sequence[str],
        testbed: Testbed | None = None,
        port: int = PORT,
    ) -> Job:
        """Runs ``halopipe`` with these words as each rank; to be called by the main thread, with which they end.

        Args:
            host_of: those that start, by rank of the plan; they are numbered anew.
            testbed: None: all are on this host.
        """
        job = cls(folder)
        hosts = sorted(set(host_of.values()))
        for number, (rank, host) in enumerate(sorted(host_of.items())):
            here = [other for other in sorted(host_of) if host_of[other] == host]
            address = "127.0.0.1" if testbed is None else testbed.hosts[hosts[0]].address
            variables = {
                "RANK": number,
                "WORLD_SIZE": len(host_of),
                "LOCAL_RANK": here.index(rank),
                "LOCAL_WORLD_SIZE": len(here),
                "GROUP_RANK": hosts.index(host),
                "GROUP_WORLD_SIZE": len(hosts),
                "MASTER_ADDR": address,
                "MASTER_PORT": port,
                "SLURM_JOB_ID": os.getpid(),  # by which a job that starts again on another host knows its own lock
                "TMPDIR": folder,
            }
            text = {name: str(value) for name, value in variables.items()}
            job.pids[rank] = _forked(folder / f"output-{rank}.txt", text, partial(_halopipe, words), testbed, host)
        return job

    @classmethod
    def start_agents(cls, folder: Path, host_of: Mapping[int, int], words: Sequence[str], testbed: Testbed) -> Job:
        """The same by torchrun: a process a host, its agent, which starts the ranks, and starts them again."""
        job = cls(folder)
        ranks = Counter(host_of.values())
        for host in ranks:
            meeting = ("--master-addr", testbed.hosts[0].address, "--master-port", str(PORT))
            name = ("--node-rank", str(host))
            count = ("--nnodes", str(len(ranks)), "--nproc-per-node", str(ranks[host]), "--max-restarts", "2")
            options = (*count, *meeting, *name, "--monitor-interval", "0.1", "-m", "halopipe", *words)
            call = partial(_torchrun, options)
            text = {"TMPDIR": str(folder)}
            job.pids[host] = _forked(folder / f"output-{host}.txt", text, call, testbed, host)
        return job

    def look(self) -> bool:
        """Whether all have ended; notes those that did."""
        for rank in self.pids.keys() - self.ended.keys():
            pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
            if pid:
                self.ended[rank] = os.waitstatus_to_exitcode(status), time.monotonic()
        return len(self.ended) == len(self.pids)

    def wait(self, limit_s: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Until all have ended or ``until`` says so; False: neither was within ``limit_s``."""
        end_s = time.monotonic() + limit_s
        while not (self.look() or until()):
            if time.monotonic() > end_s:
                return False
            time.sleep(0.005)
        return True

    def kill(self, ranks: Sequence[int] | None = None) -> None:
        """Those that still run, of ``ranks`` or all."""
        for rank in self.pids.keys() - self.ended.keys():
            if ranks is None or rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pids[rank], signal.SIGKILL)
                self.ended[rank] = os.waitstatus_to_exitcode(os.waitpid(self.pids[rank], 0)[1]), time.monotonic()

    def codes(self) -> dict[int, int]:
        """Of those that have ended."""
        return {rank: code for rank, (code, _) in sorted(self.ended.items())}

    def output(self, rank: int) -> str:
        """What it has said so far, on standard error."""
        return (self.folder / f"output-{rank}.txt").read_text(errors="replace")

    def result(self) -> dict[str, Any]:
        """What rank 0 printed, of a job with ``--json`` that has ended."""
        found: dict[str, Any] = json.loads((self.folder / "output-0.out").read_text())
        return found


def _forked(output: Path, variables: Mapping[str, str], call: partial[int], testbed: Testbed | None, host: int) -> int:
    """A process on a host that ends with what ``call`` returns; it ends with this one."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        die_with_parent(parent)
        sys.stdout = output.with_suffix(".out").open("w")
        sys.stderr = output.open("w", buffering=1)
        os.dup2(sys.stdout.fileno(), 1)
        os.dup2(sys.stderr.fileno(), 2)
        if testbed is not None:
            testbed.enter(host)
            # torchrun's agent looks its own name up, which no server here knows.
            if call.func is not _torchrun and ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUTS) == 0:
                socket.sethostname(testbed.hosts[host].name)
        os.environ.update(variables)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if testbed is None else INTERFACE
        os.chdir(output.parent)
        code = call()
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001  # told in its output
        traceback.print_exc()
    finally:
        os._exit(code)


def _halopipe(words: Sequence[str]) -> int:
    from halopipe.cli.app import main

    sys.argv = ["halopipe", *words]
    return main()


def _torchrun(options: Sequence[str]) -> int:
    from torch.distributed.run import main

    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    try:
        main([*options])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def last_words(job: Job, rank: int) -> str:
    """The end of what a rank said, as one line."""
    return " / ".join(line.strip() for line in job.output(rank).splitlines()[-6:] if line.strip())


STEPS = 12
EVERY = 3
"""Of a job, and between its checkpoints."""

RECOVERY_S = 6.0
BEYOND_S = 2.0
"""Goals: from the loss of ranks to the first step of their successors; from the deadline to the end of all others."""


class Trial(Protocol):
    """A job with a fault; its text says what happens, and where."""

    @property
    def plan(self) -> str: ...
    @property
    def deed(self) -> str: ...
    @property
    def moment(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a trial.

    Attributes:
        wrong: why it did not end as it should; empty if it did.
        recoveries_s: of each restart by halopipe.
        repeated: steps done again.
        beyond_s: from the deadline after the fault to the end of the last process that was left, where all had to end.
    """

    trial: Trial
    wrong: str
    recoveries_s: tuple[float, ...] = ()
    repeated: int = 0
    beyond_s: float | None = None


def rows(found: Sequence[Outcome]) -> Iterator[Row]:
    """What is asked of all."""
    good = [each for each in found if not each.wrong]
    yield Row("trials", len(found), "")
    yield at_least("ended as they should", len(good), "", len(found))
    for name, of in (("fault", lambda t: t.deed), ("moment", lambda t: t.moment), ("plan", lambda t: t.plan)):
        counts = Counter(of(each.trial) for each in found)
        well = Counter(of(each.trial) for each in good)
        for kind, count in sorted(counts.items()):
            yield Row(f"{name} {kind}: trials", count, "")
            yield at_least(f"{name} {kind}: as they should", well[kind], "", count)
    recoveries = [s for each in found for s in each.recoveries_s]
    if recoveries:
        yield Row("restarts", len(recoveries), "")
        yield at_most("recovery, median", statistics.median(recoveries), "s", RECOVERY_S)
        yield Row("recovery, largest", max(recoveries), "s")
    yield at_most("steps repeated, most", max((each.repeated for each in found), default=0), "steps", 3 * EVERY)
    beyond: dict[str, list[float]] = {}
    for each in found:
        if each.beyond_s is not None:
            beyond.setdefault(each.trial.deed, []).append(each.beyond_s)
    for deed, seconds in sorted(beyond.items()):
        yield at_most(f"fault {deed}: ended beyond the deadline, latest", max(seconds), "s", BEYOND_S)
    if beyond:
        yield at_most("ended beyond the deadline, latest", max(max(each) for each in beyond.values()), "s", BEYOND_S)


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """A temporary directory of its own, for this process and those that it starts."""
    with tempfile.TemporaryDirectory() as name:
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = name
        tempfile.tempdir = None
        try:
            yield Path(name)
        finally:
            tempfile.tempdir = None
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before


def left(folder: Path, before: set[str]) -> str:
    """Processes of the job, files of it, memory, as one line; empty: nothing is left.

    Args:
        before: memory that was there before the job.
    """
    end_s = time.monotonic() + 2.0
    while (processes := workers()) and time.monotonic() < end_s:
        time.sleep(0.05)
    files = [path.name for path in folder.glob("halopipe-*")]
    more = sorted(memory() - before)
    return "; ".join(
        f"{what} left: {', '.join(map(str, each))}"
        for what, each in (("processes", processes), ("folders", files), ("memory", more))
        if each
    )


def workers() -> list[int]:
    """Processes that the forking servers of this process have forked."""
    numbers = [int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal()]
    parents = {number: state.parent for number in numbers if (state := process_state(number)) is not None}
    mine = {number for number, parent in parents.items() if parent == os.getpid()}
    return [number for number, parent in parents.items() if parent in mine]


def memory() -> set[str]:
    """Names of what processes of this machine share."""
    shared = Path("/dev/shm")
    return {path.name for path in shared.iterdir()} if shared.is_dir() else set()
