"""Worker processes of this host: started together, looked at, ended together.

Each worker leaves its result or its error on the store of its job; one that leaves neither died.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from cuda_ops.device import fork_server
from cuda_ops.device.host import MPI_JOB
from halopipe.launch import ahead
from halopipe.launch.job_environment import GLOO
from halopipe.run_spec.job import JOB
from planner.ir.errors import MissingFileError
from runtime.monitor.failure import EndedWorker

ROOT = Path(__file__).resolve().parents[2]
WORKER = "halopipe.launch.worker:main"
LOADS = (*fork_server.CAPTURE, "halopipe.training.work")

OUTPUT_BYTES = 64 * 1024
"""So much of the end of a worker's output is kept."""

_ANOTHER = ("TMPDIR=FOLDER, of which nothing is cleaned up while jobs run",)

_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, slots=True)
class Member:
    """One worker to start.

    Attributes:
        call: ``module:function``, whose result is the worker's exit code.
        arguments: of the function.
    """

    rank: int
    call: str
    arguments: tuple[str, ...]


class Processes:
    """Workers of this host.

    Args:
        folder: of the job, for the workers' output.
        loads: modules that they need, loaded once for all.
        afresh: whether each has an interpreter of its own.
        is_own: whether nobody else needs the folder: it goes even if this process is killed.
        server: that they are forked from, if that is alive; None: one that has loaded modules alone.
    """

    def __init__(
        self,
        members: Sequence[Member],
        folder: Path,
        environment: Mapping[str, str],
        *,
        loads: Sequence[str] = (),
        afresh: bool = False,
        is_own: bool = False,
        server: fork_server.Server | None = None,
    ) -> None:
        self._members, self._folder, self._environment = tuple(members), folder, dict(environment)
        self._loads, self._afresh, self._leaves = tuple(loads), afresh, str(folder) if is_own else ""
        self._server, self._processes = server, dict[int, fork_server.Process]()
        self._ended: dict[int, EndedWorker] = {}

    def start(self) -> None:
        """Start all members.

        Raises:
            MissingFileError: the folder is gone.
        """
        for member in self._members:
            with self._opened(member.rank) as output:
                call, arguments = member.call, [*member.arguments]
                if self._server is not None:
                    call, arguments = ahead.continued(call, arguments)
                self._processes[member.rank] = fork_server.start(
                    call,
                    arguments,
                    environment=self._environment,
                    output=output.fileno(),
                    loads=self._loads,
                    afresh=self._afresh,
                    leaves=self._leaves,
                    server=self._server,
                )

    @property
    def numbers(self) -> Mapping[int, int]:
        """Those of their processes, by rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def ended(self) -> Mapping[int, EndedWorker]:
        """Those that have ended by now."""
        for rank, process in self._processes.items():
            code = process.poll()
            if code is not None and rank not in self._ended:
                self._ended[rank] = EndedWorker(code, _end_of(self._output(rank)))
        return self._ended

    def ask_to_end(self) -> None:
        """Send SIGTERM to those that still run."""
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()

    def end(self) -> None:
        """Kill those that still run; none is alive afterwards."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
        for process in self._processes.values():
            process.wait()

    def _opened(self, rank: int) -> BinaryIO:
        try:
            return self._output(rank).open("wb")
        except FileNotFoundError as error:
            why = error.strerror or str(error)
            raise MissingFileError(f"the job's folder {self._folder} is gone", [why], _ANOTHER) from None

    def _output(self, rank: int) -> Path:
        return self._folder / f"output-{rank}.txt"


def workers_of(
    folder: Path,
    port: int,
    names: Mapping[int, str],
    *,
    afresh: bool = False,
    call: str = WORKER,
    server: fork_server.Server | None = None,
) -> Processes:
    """Workers of the job in ``folder``: by rank, what :mod:`halopipe.launch.worker` calls their part.

    Args:
        port: of the store of this host that they meet on.
        call: what each calls with the job's file, its part and the port.
        afresh: as where they drive GPUs: CUDA shall not have been touched before a process is forked.
        server: as of :class:`Processes`.
    """
    members = [Member(rank, call, (str(folder / JOB), name, str(port))) for rank, name in names.items()]
    return Processes(members, folder, _environment_here(), loads=LOADS, afresh=afresh, is_own=True, server=server)


@contextmanager
def captured_once(folder: Path, num_workers: int) -> Iterator[fork_server.Server | None]:
    """A server that has captured the model of the job in ``folder``, for so many workers; ends, and they with it.

    None where each worker had better capture it itself, as :func:`halopipe.launch.ahead.begun` says: what is
    wrong with the model a worker then says.
    """
    from runtime.monitor.watch import SETUP_S  # late: loads torch, which the server loads meanwhile

    with (folder / "output-capture.txt").open("wb") as output:
        server = ahead.begun(
            "halopipe.training.shared_capture:capture_ahead",
            [str(folder / JOB)],
            environment=_environment_here(),
            output=output.fileno(),
            loads=LOADS,
            num_processes=num_workers,
            deadline_s=SETUP_S,
            leaves=str(folder),
        )
    try:
        yield server
    finally:
        if server is not None:
            server.end()


def warm_workers() -> None:
    """Let what workers need be loaded while this process prepares their job."""
    fork_server.warm(_environment_here(), LOADS)


def _environment_here() -> dict[str, str]:
    return worker_environment([str(ROOT)], "lo" if Path("/sys/class/net/lo").exists() else "")


def worker_environment(paths: Sequence[str], interface: str) -> dict[str, str]:
    """This process's environment for workers: our packages first, one thread, no job of somebody else's.

    Args:
        paths: to look for packages in before those of ``PYTHONPATH``.
        interface: that gloo's connections go over; gloo's own choice if empty.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _FOREIGN and not name.startswith(("TORCHELASTIC_", "SLURM_", "PMI", "OMPI_", MPI_JOB))
    }
    search_paths = [*paths, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    chosen = os.pathsep.join(dict.fromkeys(filter(None, search_paths)))
    settings = {"PYTHONPATH": chosen, **fork_server.SETTINGS}
    return environment | settings | ({GLOO: interface} if interface else {})


def _end_of(path: Path) -> str:
    """The end of a file; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - OUTPUT_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
