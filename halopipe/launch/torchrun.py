"""One rank of a job that torchrun or Slurm started: where its ranks meet, and how rank 0 hears of all others.

torchrun hosts a store of its own, as it likes; in any other job rank 0 hosts it at ``MASTER_ADDR``, on that address and
no other.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from torch import distributed as dist

from halopipe.launch.agent import JOB
from halopipe.launch.interfaces import GLOO, address_of, choose_gloo_interface, is_loopback
from halopipe.launch.rank_device import Seat, device_of, opened, prepare, seat_of
from halopipe.launch.spawn import combine, one_device
from halopipe.run_spec.job import Job, RankResult, job_folder
from halopipe.run_spec.options import Progress, RunOptions, RunProgress, RunResult
from planner.ir.errors import RankCountError, TransportError, UsageError
from planner.ir.plan import Plan
from planner.ir.program import Program
from runtime.engine import StepResult
from runtime.monitor.activity import PATIENCE_S, within
from runtime.monitor.failure import cause, read_error, write_error
from runtime.monitor.watch import SETUP_S, host_store_at, join_store, meet
from runtime.transport import Transport

if TYPE_CHECKING:
    from cuda_ops._torch import Store

_POLL_S = 0.05
_FAREWELL_S = 1.0
"""How long a rank that failed listens for errors of others, which may explain its own."""

_FAILED = "failed"
_WATCH_S = 1.0
_HANGING_S = 15.0
"""How long a rank may go on after another failed before it ends itself: it hangs where no message can wake it."""

_log = logging.getLogger(__name__)


def join(plan: Plan, options: RunOptions, progress: Progress | None) -> RunResult | None:
    """Be one rank of the job that torchrun or Slurm started; the result on rank 0, None elsewhere."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if num_ranks != plan.decision.num_ranks:
        raise RankCountError(
            f"the plan is for {plan.decision.num_ranks} ranks, the job has {num_ranks}",
            [f"WORLD_SIZE is {num_ranks}"],
            [f"torchrun --nproc-per-node {plan.decision.num_ranks} -m halopipe run PLAN", "plan again with --ranks"],
        )
    with job_folder() as folder:
        job = Job(plan, options, folder, parent=os.getpid())
        job.write(folder / JOB)
        seat = seat_of(plan.decision, rank, options.device)
        with one_device(job) if rank == 0 else contextlib.nullcontext():
            prepare(seat, int(os.environ.get("LOCAL_RANK", rank)))
            results = _work_with(job, seat, num_ranks, progress if rank == 0 else None)
    return combine(plan, options, results, None) if rank == 0 else None


def job_stores(rank: int, num_ranks: int) -> tuple[Store, Store]:
    """Two clients of the store of this attempt of the job, once all ranks are there: one to wait with, one to talk.

    Raises:
        TransportError: there is no store, or it cannot be reached.
        DeadlineError: not all ranks came.
    """
    choose_gloo_interface(os.environ)
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise UsageError(
            "this job does not say where its ranks meet",
            [f"MASTER_ADDR is {address!r}, MASTER_PORT is {port!r}"],
            ["start with torchrun or srun, or set both to an address and a free port of the host of rank 0"],
        )
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and rank == 0
    store = host_store_at(_own(address), int(port)) if hosted else join_store(address, int(port), SETUP_S)
    board = join_store(_own(address) if hosted else address, int(port))
    attempt = meet(store, rank, num_ranks)
    prefixed = dist.PrefixStore  # type: ignore[attr-defined]  # public, but not by torch's types
    return prefixed(attempt, store), prefixed(attempt, board)


def _own(address: str) -> str:
    """``MASTER_ADDR`` on the host that has it, where a host's own name may stand for the loopback interface."""
    try:
        found = socket.gethostbyname(address)
    except OSError as error:
        raise TransportError(f"MASTER_ADDR {address!r} is no host", [str(error)]) from error
    interface = os.environ.get(GLOO, "")
    is_alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE") or interface in ("", "lo")
    return found if is_alone or not is_loopback(found) else address_of(interface)


def _work_with(job: Job, seat: Seat, num_ranks: int, progress: Progress | None) -> list[RankResult]:
    """Work as the rank of ``seat``; the results of all ranks, on rank 0 alone."""
    from halopipe.training.work import work

    rank = seat.rank

    def after_step(step: int, result: StepResult) -> None:
        if progress is not None:
            progress(RunProgress(step + 1, job.options.steps, result.loss, result.step_s))

    store, board = job_stores(rank, num_ranks)

    def open_transport(groups: tuple[tuple[int, ...], ...], program: Callable[[], Program]) -> Transport:
        return opened(seat, device, num_ranks, store, groups, program, SETUP_S)

    try:
        with _ended_if_it_hangs(board):
            device = device_of(seat)
            found = work(job, rank, store, board, open_transport, after_step, device=device)
            store.set(f"result/{rank}", found.to_json())
    except Exception as error:
        raise _explained(board, rank, num_ranks, error) from error
    if rank != 0:
        return []
    # Rank 0 may host the store: it goes last, having read what all others wrote.
    return [RankResult.from_json(_result(store, other)) for other in range(num_ranks)]


def _explained(board: Store, rank: int, num_ranks: int, error: Exception) -> Exception:
    """Tell the others what happened here, hear what happened there, and return what came first."""
    mine = write_error(error)

    def tell() -> None:
        board.set(f"error/{rank}", mine)
        board.set(_FAILED, "")

    within(PATIENCE_S, tell, None)
    time.sleep(_FAREWELL_S)  # also because rank 0 may host the store
    failures = {rank: read_error(mine)}
    for other in range(num_ranks):
        text = within(PATIENCE_S, partial(_read, board, f"error/{other}"), "") if other != rank else ""
        if text:
            failures[other] = read_error(text)
    first = cause(failures)
    return error if first is failures[rank] else first


@contextlib.contextmanager
def _ended_if_it_hangs(board: Store) -> Iterator[None]:
    """Ends this process where another rank has failed and this one neither fails nor succeeds.

    torchrun ends such a rank itself, Slurm only if it was told to.
    """
    over = threading.Event()

    def watch() -> None:
        try:
            while not board.check([_FAILED]) and not over.wait(_WATCH_S):
                pass
        except RuntimeError as error:
            _log.debug("the store of the job is gone: %s", error)
        if not over.wait(_HANGING_S):
            sys.stderr.write(f"another rank failed {_HANGING_S:g} s ago, and this one hangs: it is ended\n")
            sys.stderr.flush()
            os._exit(1)

    threading.Thread(target=watch, name="others", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _result(store: Store, rank: int) -> str:
    """What a rank found, or its error."""
    end_s = time.monotonic() + SETUP_S
    while time.monotonic() < end_s:
        text = _read(store, f"result/{rank}")
        if text:
            return text
        text = _read(store, f"error/{rank}")
        if text:
            raise read_error(text)
        time.sleep(_POLL_S)
    raise TransportError(f"rank {rank} left no result")


def _read(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""
