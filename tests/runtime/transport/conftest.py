from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runtime.transport import Channel, ChannelTransport, Hub, InProcessTransport, Transport, open_gloo, open_mpi
from runtime.transport.base import join

Program = Callable[[Transport], Any]
Outcome = tuple[bool, Any]  # (True, what the program returned) or (False, its traceback)


def _attempt(program: Program, transport: Transport) -> Outcome:
    try:
        return True, program(transport)
    except BaseException:  # noqa: BLE001 - handed to the parent, pytest's own failures too
        return False, traceback.format_exc()
    finally:
        transport.close()


def _results(outcomes: Sequence[Outcome]) -> list[Any]:
    for rank, (succeeded, value) in enumerate(outcomes):
        if not succeeded:
            pytest.fail(f"rank {rank}:\n{value}", pytrace=False)
    return [value for _, value in outcomes]


def run_in_threads(world_size: int, program: Program, hub: Hub) -> list[Any]:
    """What ``program`` returns on each rank, the ranks being threads."""
    outcomes: list[Outcome] = [(False, "did not end")] * world_size

    def work(rank: int) -> None:
        outcomes[rank] = _attempt(program, InProcessTransport(hub, rank))

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    return _results(outcomes)


def over_gloo(rank: int, world_size: int, groups: Sequence[tuple[int, ...]], store: Path) -> Transport:
    return open_gloo(rank, world_size, dist.FileStore(str(store), world_size), 20.0, groups)


def over_channels(rank: int, world_size: int, groups: Sequence[tuple[int, ...]], store: Path) -> Transport:
    """All that NCCL's transport does, over gloo on the CPU."""
    pairs = list(itertools.permutations(range(world_size), 2))
    channels = [Channel("F", *pair, *pair) for pair in pairs] + [Channel("F", 0, 1, 1, 0)]
    channels += [Channel("F", 1, 0, 0, 1), Channel("B", 0, 1, 0, 1), Channel("B", 1, 0, 0, 1)]
    make = partial(ChannelTransport, channels, groups, backend="gloo", device="cpu", timeout_s=20.0, owns_group=True)
    transport = join("gloo", rank, world_size, dist.FileStore(str(store), world_size), 20.0, make)
    transport.barrier(20.0)
    return transport


def over_mpi(rank: int, world_size: int, groups: Sequence[tuple[int, ...]], store: Path) -> Transport:
    return open_mpi(rank, world_size, 20.0, groups)


Opened = Callable[[int, int, Sequence[tuple[int, ...]], Path], Transport]
Environment = dict[str, str]

MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}")
PLACEHOLDER = """
import json, os, signal, socket, sys
signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # says that a rank has left without a word
place = socket.socket(socket.AF_UNIX)
place.connect(sys.argv[1])
known = {name: value for name, value in os.environ.items() if name.startswith("PMI")}
socket.send_fds(place, [json.dumps(known).encode()], [int(known["PMI_FD"])])
place.recv(1)
"""
"""What mpiexec starts: it hands its place in the job over to a process that has torch and the test already."""


@contextlib.contextmanager
def places_in_mpi(world_size: int) -> Iterator[list[Environment]]:
    """The environments that make forked processes the ranks of an MPI job, in their order; of mpich's mpiexec."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install 'halopipe[mpi]'")
    if MPIEXEC is None or "HYDRA" not in subprocess.run([MPIEXEC, "--version"], capture_output=True, text=True).stdout:
        pytest.skip("mpich's mpiexec is not installed: pip install mpich")
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(tempfile.TemporaryDirectory(prefix="mpi")) + "/places"
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(world_size)
        listener.settimeout(60.0)
        command = [MPIEXEC, "-disable-auto-cleanup", "-n", str(world_size), sys.executable, "-S", "-E"]
        job = stack.enter_context(subprocess.Popen([*command, "-c", PLACEHOLDER, path], stdout=2))
        environments = []
        for _ in range(world_size):
            place = stack.enter_context(listener.accept()[0])
            text, (fd, *_), _, _ = socket.recv_fds(place, 1 << 16, 1)
            stack.callback(os.close, fd)
            environments.append({**json.loads(text), "PMI_FD": str(fd)})
        yield sorted(environments, key=lambda environment: int(environment["PMI_RANK"]))
    assert job.returncode == 0


def run_in_processes(
    world_size: int, program: Program, groups: Sequence[tuple[int, ...]], store: Path, opened: Opened = over_gloo
) -> list[Any]:
    """What ``program`` returns on each rank, the ranks being forked processes; None where one ended by itself."""

    if opened is over_mpi:
        with places_in_mpi(world_size) as places:
            return _run_forked(world_size, program, groups, store, opened, places)
    return _run_forked(world_size, program, groups, store, opened, [{}] * world_size)


def _run_forked(
    world_size: int,
    program: Program,
    groups: Sequence[tuple[int, ...]],
    store: Path,
    opened: Opened,
    places: Sequence[Environment],
) -> list[Any]:
    def work(rank: int, channel: Connection) -> None:
        os.environ.update(places[rank])
        torch.set_num_threads(1)
        transport = opened(rank, world_size, groups, store)
        channel.send_bytes(pickle.dumps(_attempt(program, transport)))
        os._exit(0)  # not pytest's own clean-up

    context = multiprocessing.get_context("fork")  # programs are closures, and importing torch anew takes seconds
    channels, processes = [], []
    for rank in range(world_size):
        mine, theirs = context.Pipe(duplex=False)
        channels.append(mine)
        processes.append(context.Process(target=work, args=(rank, theirs), daemon=True))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork beside torch's threads
            processes[-1].start()
        theirs.close()
    try:
        return _results([_outcome(channel) for channel in channels])
    finally:
        for process in processes:
            process.join(10.0)
            process.kill()


def _outcome(channel: Connection) -> Outcome:
    if not channel.poll(60.0):
        return False, "did not end"
    try:
        return pickle.loads(channel.recv_bytes())
    except EOFError:
        return True, None


PROCESSES: dict[str, Opened] = {"gloo": over_gloo, "channels": over_channels, "mpi": over_mpi}


@pytest.fixture(params=["inprocess", "rendezvous", "gloo", "channels", "mpi"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., list[Any]]:
    """``run(world_size, program, groups)``: the program on every rank of each transport."""

    def run(world_size: int, program: Program, groups: Sequence[tuple[int, ...]] = ()) -> list[Any]:
        if request.param in PROCESSES:
            store = tmp_path / f"store-{len(list(tmp_path.iterdir()))}"
            return run_in_processes(world_size, program, groups, store, PROCESSES[request.param])
        hub = Hub(world_size, groups, rendezvous=request.param == "rendezvous")
        return run_in_threads(world_size, program, hub)

    return run
