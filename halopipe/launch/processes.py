"""Worker processes of this host: started together, looked at, ended together.

Each worker leaves its result or its error on the store of its job; one that leaves neither died.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from cuda_ops.device import fork_server
from cuda_ops.device.host import MPI_JOB
from halopipe.launch import ahead
from halopipe.launch.job_environment import ATTEMPT, GLOO, LOOPBACK, JobRank
from halopipe.run_spec.job import JOB
from planner.ir.errors import MissingFileError
from runtime.monitor.failure import EndedWorker
from runtime.timeouts import SETUP_S

if TYPE_CHECKING:
    from cuda_ops._torch import Store

ROOT = Path(__file__).resolve().parents[2]
RANK = "halopipe.launch.worker:rank"
LOADS = (*fork_server.CAPTURE, "halopipe.training.work")

OUTPUT_BYTES = 64 * 1024
"""So much of the end of a worker's output is kept."""

_ANOTHER = ("TMPDIR=FOLDER, of which nothing is cleaned up while jobs run",)

_OF_RANK = (*JobRank(0, 1).variables(LOOPBACK, 0), ATTEMPT)
_ONLY = "job"
"""What an attempt of a job is called that has a store of its own."""


class Processes:
    """Workers of this host.

    Args:
        call: ``module:function``, whose result is a worker's exit code.
        arguments: of the function.
        variables: by number of a worker, what it finds in its environment beside ``environment``.
        folder: of the job, for the workers' output.
        loads: modules that they need, loaded once for all.
        afresh: whether each has an interpreter of its own.
        is_own: whether nobody else needs the folder: it goes even if this process is killed.
        server: that they are forked from, if that is alive; None: one that has loaded modules alone.
    """

    def __init__(
        self,
        call: str,
        arguments: Sequence[str],
        variables: Mapping[int, Mapping[str, str]],
        folder: Path,
        environment: Mapping[str, str],
        *,
        loads: Sequence[str] = (),
        afresh: bool = False,
        is_own: bool = False,
        server: fork_server.Server | None = None,
    ) -> None:
        self._name = call.rpartition(":")[2]
        self._call = call
        self._arguments = list(arguments)
        if server is not None:
            self._call, self._arguments = ahead.continued(call, arguments)
        self._variables = variables
        self._folder = folder
        self._environment = environment
        self._loads = loads
        self._afresh = afresh
        self._leaves = str(folder) if is_own else ""
        self._server = server
        self._processes = dict[int, fork_server.Process]()
        self._ended: dict[int, EndedWorker] = {}

    def start(self) -> None:
        """Start all of them.

        Raises:
            MissingFileError: the folder is gone.
        """
        for rank, variables in self._variables.items():
            with self._opened(rank) as output:
                self._processes[rank] = fork_server.start(
                    self._call,
                    self._arguments,
                    environment=self._environment,
                    variables=variables,
                    output=output.fileno(),
                    loads=self._loads,
                    afresh=self._afresh,
                    leaves=self._leaves,
                    server=self._server,
                )

    @property
    def pids(self) -> Mapping[int, int]:
        """Ids of their processes, by rank."""
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
        return self._folder / f"{self._name}-output-{rank}.txt"


def workers_of(
    folder: Path,
    num_ranks: int,
    *,
    call: str = RANK,
    afresh: bool = False,
    server: fork_server.Server | None = None,
) -> tuple[Processes, Store]:
    """Workers of the job in ``folder``, by rank, and the store that they meet on, which this process hosts.

    Args:
        call: what each calls with the job's file, see :mod:`halopipe.launch.worker`.
        afresh: as where they drive GPUs: CUDA shall not have been touched before a process is forked.
        server: as of :class:`Processes`.
    """
    from cuda_ops._torch import PrefixStore  # late: loads torch
    from runtime.monitor.watch import host_store

    store = host_store()
    ranks = [JobRank(rank, num_ranks, rank, num_ranks) for rank in range(num_ranks)]
    variables = {each.rank: each.variables(LOOPBACK, store.port) | {ATTEMPT: _ONLY} for each in ranks}
    workers = Processes(
        call,
        [str(folder / JOB)],
        variables,
        folder,
        _environment_here(),
        loads=LOADS,
        afresh=afresh,
        is_own=True,
        server=server,
    )
    return workers, PrefixStore(_ONLY, store)


@contextmanager
def captured_once(folder: Path, num_workers: int) -> Iterator[fork_server.Server | None]:
    """A server that has captured the model of the job in ``folder``, for ``num_workers``; ends, and they with it.

    None where each worker had better capture it itself, as :func:`halopipe.launch.ahead.begun` says: what is
    wrong with the model a worker then says.
    """
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
        if name not in _OF_RANK and not name.startswith(("TORCHELASTIC_", "SLURM_", "PMI", "OMPI_", MPI_JOB))
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
