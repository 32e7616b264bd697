"""Starts the worker processes of a plan on this host, watches them, and ends all of them when one fails.

Each worker leaves ``result-RANK.json`` or ``error-RANK.json`` in the job's folder; one that leaves neither died.  They
meet in a store that the launcher hosts on the loopback interface; on it they also say what they do, so that a worker
that hangs is found although it says nothing any more.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from planner.ir.errors import DeadlineError, HalopipeError
from runtime.activity import Beat, describe, read_board
from runtime.failure import also, blame, cause, died, read_error

LOOPBACK = "127.0.0.1"
SETUP_S = 600.0
"""Longest time until a worker says its first word, and that each part of its set-up may take."""

_POLL_S = 0.02
_BOARD_S = 0.25
_PATIENCE_S = {0: 0.0, 1: 0.1, 2: 0.3, 3: 1.0}
"""How long to wait for a better explanation, by :func:`runtime.failure.blame`."""

_GRACE_S = 1.0
"""Beyond its deadline a wait should have ended by itself; later the launcher ends it."""


@dataclass(frozen=True, slots=True)
class Member:
    """One worker to start.

    Attributes:
        title: such as ``rank 1 (n0/cpu1, stage 1)``, for errors.
    """

    rank: int
    command: tuple[str, ...]
    title: str


def result_path(folder: Path, rank: int) -> Path:
    """Where a worker that succeeds writes what it found."""
    return folder / f"result-{rank}.json"


def error_path(folder: Path, rank: int) -> Path:
    """Where a worker that fails says why."""
    return folder / f"error-{rank}.json"


def host_store() -> tuple[dist.TCPStore, int]:
    """A store on a free port of the loopback interface (by itself torch listens on every interface), and its port."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port


def join_store(host: str, port: int) -> dist.TCPStore:
    """One more client of a store."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=SETUP_S))


def run_workers(
    members: Sequence[Member],
    folder: Path,
    environment: Mapping[str, str],
    store: dist.Store,
    watch: Callable[[Mapping[int, Beat]], None] = lambda beats: None,
) -> None:
    """Start all members and return when each has left its result; none is alive afterwards, whatever happens.

    Args:
        folder: for results, errors and the workers' output.
        store: that the workers publish their activity on.
        watch: called a few times a second with what each rank does.

    Raises:
        HalopipeError: what the worker that failed first raised; WorkerDiedError if it could not say.
        DeadlineError: a worker did one thing for longer than its deadline, or went silent for so long.
    """
    crew = _Crew(members, folder, store, watch)
    try:
        crew.start(environment)
        crew.wait()
    finally:
        crew.end()


@dataclass(slots=True)
class _Crew:
    members: Sequence[Member]
    folder: Path
    store: dist.Store
    watch: Callable[[Mapping[int, Beat]], None]
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    beats: Mapping[int, Beat] = field(default_factory=dict)
    heard_s: dict[int, float] = field(default_factory=dict)
    failures: dict[int, HalopipeError] = field(default_factory=dict)

    def start(self, environment: Mapping[str, str]) -> None:
        for member in self.members:
            with self._output(member.rank).open("wb") as output:
                self.processes[member.rank] = subprocess.Popen(
                    member.command,
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C is for the launcher, which then ends them all
                )
            self.heard_s[member.rank] = time.monotonic()

    def wait(self) -> None:
        read_s = 0.0
        while self._look():
            if time.monotonic() - read_s >= _BOARD_S:
                self._read_board()
                read_s = time.monotonic()
            if self.failures:
                self._raise_cause()
            time.sleep(_POLL_S)

    def end(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
        for process in self.processes.values():
            process.wait()

    def _look(self) -> bool:
        """Whether anybody still runs, or failed; failures of those that ended are noted."""
        for member in self.members:
            code = self.processes[member.rank].poll()
            if code is not None and member.rank not in self.failures:
                if error_path(self.folder, member.rank).exists():
                    self.failures[member.rank] = read_error(error_path(self.folder, member.rank))
                elif not result_path(self.folder, member.rank).exists():
                    self.failures[member.rank] = self._death(member, code)
        return bool(self.failures) or any(process.poll() is None for process in self.processes.values())

    def _raise_cause(self) -> None:
        """Wait a little for the rank that failed first to be heard, then raise."""
        first_s = time.monotonic()
        while True:
            error = cause(self.failures)
            if time.monotonic() - first_s >= _PATIENCE_S[blame(error)]:
                raise error
            self._look()
            time.sleep(_POLL_S)

    def _read_board(self) -> None:
        now_s = time.monotonic()
        before, self.beats = self.beats, read_board(self.store, len(self.members))
        for rank, beat in self.beats.items():
            if rank not in before or before[rank].number != beat.number:
                self.heard_s[rank] = now_s
        self.watch(self.beats)
        for member in self.members:
            if self.processes[member.rank].poll() is None and member.rank not in self.failures:
                self._check_alive(member, now_s)

    def _check_alive(self, member: Member, now_s: float) -> None:
        beat = self.beats.get(member.rank)
        deadline_s = beat.deadline_s if beat else SETUP_S
        silent_s = now_s - self.heard_s[member.rank]
        busy_s = beat.for_s + silent_s if beat else silent_s
        if busy_s <= deadline_s + _GRACE_S:
            return
        doing = f"in {beat.what}" if beat else "starting"
        where = f", step {beat.step}" if beat and beat.step >= 0 else ""
        said = "nothing was heard of it for" if silent_s > deadline_s else "it has been there for"
        error = DeadlineError(
            f"{member.title} hangs {doing}{where}: {said} {busy_s:.1f} s, deadline {deadline_s:g} s",
            remedies=["if it is only slow, raise --deadline"],
        )
        others = describe(self.beats, but=member.rank)
        self.failures[member.rank] = also(error, [f"the others: {others}"] if others else [])

    def _death(self, member: Member, code: int) -> HalopipeError:
        self.beats = read_board(self.store, len(self.members))
        beat = self.beats.get(member.rank)
        stderr = self._output(member.rank).read_text(encoding="utf-8", errors="replace")
        return died(member.title, code, str(beat) if beat else "", stderr)

    def _output(self, rank: int) -> Path:
        return self.folder / f"output-{rank}.txt"


def worker_environment(root: Path) -> dict[str, str]:
    """This process's environment for workers: our packages first, one thread, loopback, no job of somebody else's."""
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "LOCAL_WORLD_SIZE")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in foreign and not name.startswith(("TORCHELASTIC_", "SLURM_"))
    }
    paths = [str(root), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    if Path("/sys/class/net/lo").exists():
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return environment
