"""Ranks of a test that are forked processes, also as the ranks of an MPI job."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import multiprocessing
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from cuda_ops.device import gpus

if not gpus.may_have_gpus():
    # Autograd starts a thread for each GPU at its first backward, and forks of its process cannot go backward then.  A
    # build for CUDA takes one for there once there were fake tensors (torch 2.11).
    torch.ones(1, requires_grad=True).backward()

Outcome = tuple[bool, Any]  # (True, what a function returned) or (False, its traceback)


def attempt(function: Callable[[], Any]) -> Outcome:
    """What ``function`` returns, or how it fails."""
    try:
        return True, function()
    except BaseException:  # noqa: BLE001 - handed to the parent, pytest's own failures too
        return False, traceback.format_exc()


def results(outcomes: Sequence[Outcome]) -> list[Any]:
    """Of all ranks; the first that failed fails the test."""
    for rank, (succeeded, value) in enumerate(outcomes):
        if not succeeded:
            pytest.fail(f"rank {rank}:\n{value}", pytrace=False)
    return [value for _, value in outcomes]


def forked(count: int, work: Callable[[int], Any], environments: Sequence[dict[str, str]] = ()) -> list[Any]:
    """What ``work(rank)`` returns in each of ``count`` forked processes; None where one ended by itself."""
    return results(outcomes(count, work, environments))


def outcomes(
    count: int, work: Callable[[int], Any], environments: Sequence[dict[str, str]] = (), limit_s: float = 60.0
) -> list[Outcome]:
    """The same with how a rank failed, where it did."""

    def act(rank: int, channel: Connection) -> None:
        gc.freeze()  # what the parent's threads belong to is not taken down here: that would abort the process
        os.environ.update(environments[rank] if environments else {})
        channel.send_bytes(pickle.dumps(attempt(functools.partial(work, rank))))
        os._exit(0)  # not pytest's own clean-up

    context = multiprocessing.get_context("fork")  # programs are closures, and importing torch anew takes seconds
    channels = []
    processes = []
    for rank in range(count):
        mine, theirs = context.Pipe(duplex=False)
        channels.append(mine)
        processes.append(context.Process(target=act, args=(rank, theirs)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork beside torch's threads
            processes[-1].start()
        theirs.close()
    try:
        return [_outcome(channel, limit_s) for channel in channels]
    finally:
        for process in processes:
            process.join(10.0)
            process.kill()


def _outcome(channel: Connection, limit_s: float) -> Outcome:
    if not channel.poll(limit_s):
        return False, "did not end"
    try:
        return pickle.loads(channel.recv_bytes())
    except EOFError:
        return True, None


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


@functools.cache
def require_mpich() -> str:
    """mpich's mpiexec; the test is skipped where it, or mpi4py, is not installed."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install 'halopipe[mpi]'")
    found = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}") or ""
    if not found or "HYDRA" not in subprocess.run([found, "--version"], capture_output=True, text=True).stdout:
        pytest.skip("mpich's mpiexec is not installed: pip install 'halopipe[mpi]'")
    return found


@contextlib.contextmanager
def places_in_mpi(world_size: int) -> Iterator[list[dict[str, str]]]:
    """The environments that make forked processes the ranks of an MPI job, in their order; of mpich's mpiexec."""
    command = [require_mpich(), "-disable-auto-cleanup", "-n", str(world_size), sys.executable, "-S", "-E"]
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(tempfile.TemporaryDirectory(prefix="mpi")) + "/places"
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(world_size)
        listener.settimeout(60.0)
        job = stack.enter_context(subprocess.Popen([*command, "-c", PLACEHOLDER, path], stdout=2))
        environments = []
        for _ in range(world_size):
            place = stack.enter_context(listener.accept()[0])
            text, (fd, *_), _, _ = socket.recv_fds(place, 1 << 16, 1)
            stack.callback(os.close, fd)
            environments.append({**json.loads(text), "PMI_FD": str(fd)})
        yield sorted(environments, key=lambda environment: int(environment["PMI_RANK"]))
    assert job.returncode == 0
