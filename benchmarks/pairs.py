"""Two fresh processes, forked from one that has done nothing yet: as separate as two workers, there in no time."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from cuda_ops.host import core_of, prepare_process
from runtime.transport.gloo import GlooTransport, open_gloo

T = TypeVar("T")
NUM_RANKS = 2
_LIMIT_S = 600.0


def on_two_ranks(work: Callable[[int, GlooTransport], T]) -> list[T]:
    """What ``work(rank, transport)`` returns on both ranks, each pinned to a core, with one thread.

    The process group of the transport is torch's default one, so torch's own pipelining works beside it.

    Raises:
        RuntimeError: a rank failed; the text has its traceback.
    """
    context = multiprocessing.get_context("fork")
    started = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(NUM_RANKS):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(rank, Path(folder) / "store", work, theirs), daemon=True)
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", DeprecationWarning
                )  # Python 3.12 warns of a fork beside torch's threads
                process.start()
            theirs.close()
            started.append((process, mine))
        try:
            outcomes = [_outcome(channel) for _, channel in started]
        finally:
            for process, _ in started:
                process.kill()
                process.join()
    failed = [text for text, _ in outcomes if text]
    if failed:
        raise RuntimeError("\n".join(failed))
    return [value for _, value in outcomes]


def _run(rank: int, store: Path, work: Callable[[int, GlooTransport], Any], channel: Connection) -> None:
    try:
        prepare_process(core_of(rank))
        transport = open_gloo(rank, NUM_RANKS, dist.FileStore(str(store), NUM_RANKS), timeout_s=60.0)
        outcome: tuple[str, Any] = "", work(rank, transport)
        transport.barrier(60.0)  # who leaves first breaks what the other still has to say
        transport.close()
    except BaseException:  # noqa: BLE001  # told to the parent
        outcome = f"rank {rank}:\n{traceback.format_exc()}", None
    channel.send_bytes(pickle.dumps(outcome))
    os._exit(0)


def _outcome(channel: Connection) -> tuple[str, Any]:
    try:
        found: tuple[str, Any] = pickle.loads(channel.recv_bytes()) if channel.poll(_LIMIT_S) else ("no answer", None)
    except EOFError:
        found = "a rank died", None
    return found
