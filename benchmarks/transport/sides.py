"""The sides of the comparison: for each transport ranks of its own, which wait while another side has its turn.

Each rank is a process on a core, as in a run, and does what this program asks for through a socket: ranks are forked
from here, or started by ``mpiexec``.  While a side waits for its turn all its ranks sleep.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import itertools
import mmap
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Client, Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch.distributed as dist

from benchmarks.turns import by_turns
from cuda_ops import core_of, die_with_parent, prepare_process
from runtime.transport import Transport

OPENERS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "gloo": ("runtime.transport:open_gloo", {}),
    "shared": ("runtime.transport:open_shared", {"required": True}),
    "mpi": ("runtime.transport.mpi:open_mpi", {}),
}
"""By name ``module:function`` of the opener, and what it is given beside its rank and the others."""

BY_MPIEXEC = ("mpi",)
"""They find one another by themselves; the others are given a store."""

_RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")
_LIMIT_S = 120.0

T = TypeVar("T")
P = ParamSpec("P")


class Start:
    """Where the ranks of a side find one another by looking at shared memory: no transport has a part in it."""

    def __init__(self, path: Path, rank: int, num_ranks: int) -> None:
        with path.open("r+b") as file:
            self._came = memoryview(mmap.mmap(file.fileno(), 8 * num_ranks)).cast("q")
        self._rank = rank
        self._meetings = 0

    def meet(self, meanwhile: Callable[[], object] = os.sched_yield) -> None:
        """Return when all ranks are here, within a microsecond of each other where each has a core.

        Args:
            meanwhile: done again and again by who waits; who only looks does so for five milliseconds, then sleeps.
        """
        self._meetings += 1
        self._came[self._rank] = self._meetings
        looks_until_s = time.perf_counter() + 5e-3
        while min(self._came) < self._meetings:
            meanwhile()
            if meanwhile is os.sched_yield and time.perf_counter() > looks_until_s:
                time.sleep(1e-4)


@dataclass(frozen=True, slots=True)
class Place:
    """What a rank works with; ``numbers`` never come again, and all ranks draw the same."""

    transport: Transport
    start: Start
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.transport.rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """All of the side."""
        return tuple(range(self.transport.world_size))

    @property
    def peer(self) -> int:
        """The other one of two."""
        return 1 - self.rank


class NotThereError(Exception):
    """A transport that cannot be opened here, and why."""


class Side:
    """The ranks of one transport.

    Raises:
        NotThereError: it cannot be opened.
    """

    def __init__(self, name: str, num_ranks: int) -> None:
        self.name = name
        self.num_ranks = num_ranks
        self._ranks: dict[int, Connection] = {}
        self._processes: list[BaseProcess | subprocess.Popen[bytes]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="halopipe-")
        try:
            self._open(Path(self._folder.name))
        except BaseException:
            self.close()
            raise

    def turn(self, work: Callable[Concatenate[Place, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """What ``work(place, *args, **kwargs)``, a function of a module, returns on each rank.

        Raises:
            RuntimeError: a rank failed; the text has its traceback.
        """
        for channel in self._ranks.values():
            channel.send((work, args, kwargs))
        outcomes = [self._outcome(rank) for rank in sorted(self._ranks)]
        if failed := [fault for fault, _ in outcomes if fault]:
            raise RuntimeError(f"{self.name}:\n" + "\n".join(failed))
        return [value for _, value in outcomes]

    def close(self) -> None:
        """End the ranks."""
        for channel in self._ranks.values():
            channel.close()
        for process in self._processes:
            process.kill()
            process.join() if isinstance(process, BaseProcess) else process.wait()
        self._folder.cleanup()

    def _open(self, folder: Path) -> None:
        module, _, function = OPENERS[self.name][0].partition(":")
        if importlib.util.find_spec(module) is None or not hasattr(importlib.import_module(module), function):
            raise NotThereError(f"there is no {module}.{function}")
        (folder / "start").write_bytes(bytes(8 * self.num_ranks))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "socket"))
            listener.listen(self.num_ranks)
            listener.settimeout(_LIMIT_S)
            self._start(folder)
            for _ in range(self.num_ranks):
                try:
                    channel = Connection(listener.accept()[0].detach())
                except TimeoutError as error:
                    raise NotThereError(f"after {_LIMIT_S:g} s its processes were not there") from error
                self._ranks[channel.recv()] = channel
        for rank in sorted(self._ranks):
            if fault := self._outcome(rank)[0]:
                raise NotThereError(fault.strip().splitlines()[-1])

    def _start(self, folder: Path) -> None:
        if self.name in BY_MPIEXEC:
            program = Path(sys.executable).with_name("mpiexec")
            mpiexec = str(program) if program.exists() else shutil.which("mpiexec")
            if mpiexec is None:
                raise NotThereError("there is no mpiexec")
            command = [sys.executable, "-m", "benchmarks.transport.sides", self.name, str(self.num_ranks), str(folder)]
            environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
            self._processes.append(subprocess.Popen([mpiexec, "-n", str(self.num_ranks), *command], env=environment))
            return
        context = multiprocessing.get_context("fork")
        for rank in range(self.num_ranks):
            process = context.Process(target=_serve, args=(self.name, rank, self.num_ranks, folder, os.getpid()))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: of a fork beside torch's threads
                process.start()
            self._processes.append(process)

    def _outcome(self, rank: int) -> tuple[str, Any]:
        channel = self._ranks[rank]
        try:
            found: tuple[str, Any] = channel.recv() if channel.poll(_LIMIT_S) else (f"rank {rank}: no answer", None)
        except EOFError:
            found = f"rank {rank} died", None
        return found


def turns_of(
    sides: Sequence[Side], rounds: int, work: Callable[Concatenate[Place, P], T], *args: P.args, **kwargs: P.kwargs
) -> dict[str, list[list[T]]]:
    """What each rank of each side returns in each round: [round][rank]."""
    return by_turns(rounds, {side.name: partial(side.turn, work, *args, **kwargs) for side in sides})


def _serve(name: str, rank: int, num_ranks: int, folder: Path, parent: int | None = None) -> None:
    if parent is not None:
        die_with_parent(parent)
    channel = Client(str(folder / "socket"))
    channel.send(rank)
    try:
        prepare_process(core_of(rank))
        call, options = OPENERS[name]
        store: dict[str, Any] = {}
        if name not in BY_MPIEXEC:
            store["store"] = dist.FileStore(str(folder / "store"), num_ranks)
        module, _, function = call.partition(":")
        opener = getattr(importlib.import_module(module), function)
        transport = opener(rank=rank, world_size=num_ranks, timeout_s=60.0, **store, **options)
        place = Place(transport, Start(folder / "start", rank, num_ranks))
        gc.disable()
        gc.freeze()  # a collection after each turn has little to look at
        outcome: tuple[str, Any] = "", None
        while True:
            channel.send(outcome)
            work, args, kwargs = channel.recv()
            try:
                outcome = "", work(place, *args, **kwargs)
            except Exception:  # noqa: BLE001  # told to the parent
                outcome = f"rank {rank}:\n{traceback.format_exc()}", None
            gc.collect()
    except (EOFError, ConnectionError):  # no more turns
        pass
    except BaseException:  # noqa: BLE001  # told to the parent
        with contextlib.suppress(OSError):
            channel.send((traceback.format_exc(), None))
    os._exit(0)


if __name__ == "__main__":
    _name, _num_ranks, _folder = sys.argv[1:]
    _serve(_name, int(next(os.environ[key] for key in _RANK if key in os.environ)), int(_num_ranks), Path(_folder))
