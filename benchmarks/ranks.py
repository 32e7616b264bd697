"""Fresh processes on this machine, forked from one that has done nothing yet: as separate as workers, there at once."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from cuda_ops.host import core_of, prepare_process
from runtime.transport.gloo import GlooTransport, open_gloo

T = TypeVar("T")
_LIMIT_S = 600.0


def on_ranks(
    num_ranks: int,
    work: Callable[[GlooTransport], T],
    groups: Sequence[tuple[int, ...]] = (),
    limit_s: float = _LIMIT_S,
    enter: Callable[[int], None] | None = None,
) -> list[T]:
    """What ``work(transport)`` returns on every rank, each with one thread, pinned to a core; ranks may share cores.

    The process group of the transport is torch's default one, so torch's own pipelining works beside it.

    Args:
        groups: of ranks that do something together.
        limit_s: the longest that one rank may take.
        enter: called with its number in each new process, before it meets the others.

    Raises:
        RuntimeError: a rank failed; the text has its traceback.
    """
    context = multiprocessing.get_context("fork")
    started = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(num_ranks):
            mine, theirs = context.Pipe(duplex=False)
            given = (rank, num_ranks, Path(folder) / "store", groups, work, theirs, enter)
            process = context.Process(target=_run, args=given, daemon=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: of a fork beside torch's threads
                process.start()
            theirs.close()
            started.append((process, mine))
        try:
            outcomes = [_outcome(channel, limit_s) for _, channel in started]
        finally:
            for process, _ in started:
                process.kill()
                process.join()
    failed = [text for text, _ in outcomes if text]
    if failed:
        raise RuntimeError("\n".join(failed))
    return [value for _, value in outcomes]


def _run(
    rank: int,
    num_ranks: int,
    store: Path,
    groups: Sequence[tuple[int, ...]],
    work: Callable[[GlooTransport], Any],
    channel: Connection,
    enter: Callable[[int], None] | None,
) -> None:
    try:
        if enter is not None:
            enter(rank)
        prepare_process(core_of(rank))
        transport = open_gloo(rank, num_ranks, dist.FileStore(str(store), num_ranks), 60.0, groups)
        outcome: tuple[str, Any] = "", work(transport)
        transport.barrier(60.0)  # who leaves first breaks what the others still have to say
        transport.close()
    except BaseException:  # noqa: BLE001  # told to the parent
        outcome = f"rank {rank}:\n{traceback.format_exc()}", None
    channel.send_bytes(pickle.dumps(outcome))
    os._exit(0)


def _outcome(channel: Connection, limit_s: float) -> tuple[str, Any]:
    try:
        found: tuple[str, Any] = pickle.loads(channel.recv_bytes()) if channel.poll(limit_s) else ("no answer", None)
    except EOFError:
        found = "a rank died", None
    return found
