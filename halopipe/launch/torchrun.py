"""One rank of a job that torchrun started: what a launcher does for ranks of this host, they do for one another.

They settle where they begin and by which plan, rank 0 has their results, and each hears what became of the others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from cuda_ops.device.host import die_with_parent
from halopipe.launch.combine import combine, nothing_left
from halopipe.launch.job_environment import JobRank
from halopipe.launch.job_stores import is_torchruns_store, job_stores
from halopipe.launch.replanning import RankAssignment, Replanner, ranks_assigned
from halopipe.launch.restart import EventLogs
from halopipe.launch.spawn import one_device
from halopipe.run_spec.job import JOB, Job, RankResult
from halopipe.run_spec.options import IF_ANY, RunOptions
from halopipe.run_spec.result import RunProgress, RunResult, ShowRun
from halopipe.training.resuming import resume_point_by_rank_0
from halopipe.training.work import work
from planner.ir.errors import HalopipeError
from planner.ir.plan import Plan
from planner.ir.scratch import scratch_folder
from runtime.checkpoint.lock import held
from runtime.engine import StepResult
from runtime.monitor.activity import Activity, BoardSilentError, StatusStore
from runtime.monitor.failure import (
    FAILED,
    blame,
    cause,
    errors_left,
    leave_error,
    leave_result,
    read_error,
    write_error,
)
from runtime.monitor.watch import Supervisor
from runtime.timeouts import SETUP_S

if TYPE_CHECKING:
    from cuda_ops._torch import PrefixStore, Store

_POLL_S = 0.05
_FAREWELL_S = 0.5
"""How long a rank that failed listens for errors of others, which may explain its own; less where all have spoken."""

_IDLE = "idle"
_UNNAMED = "none"
_WATCH_S = 1.0
_HANGING_S = 15.0
"""How long a rank may go on after another failed before it ends itself: it hangs where no message can wake it."""

_log = logging.getLogger(__name__)


def join(
    job_rank: JobRank,
    plan: Plan,
    options: RunOptions,
    progress: ShowRun | None,
    replanner: Replanner | None = None,
) -> RunResult | None:
    """Be one rank of the job that torchrun started; the result on rank 0, None elsewhere.

    Args:
        replanner: chooses the plan for the ranks that came; None: it is ``plan``, all of whose ranks must come.
    """
    if replanner is None:
        job_rank.require_size(plan.decision)
    end_with_torchrun()
    store, board = job_stores(job_rank.rank, job_rank.num_ranks)

    def show(step: int, result: StepResult, activity: Activity) -> None:
        if progress is not None and rank == 0:
            latest = (result.loss, result.step_s, activity.slow, activity.left_out)
            progress(RunProgress(step + 1, options.steps, *latest))

    is_writer = bool(options.checkpoint) and job_rank.rank == 0
    event_logs = _event_logs(options, store)
    with (
        event_logs.noted(),
        raised_by_all(board, job_rank.rank, job_rank.num_ranks),
        held(Path(options.checkpoint)) if is_writer else contextlib.nullcontext(),
        scratch_folder("job") as folder,
    ):
        start = resume_point_by_rank_0(plan, options, store, job_rank.rank, event_logs.resume_point)
        if progress is not None and job_rank.rank == 0:
            for line in start.lines:
                progress(RunProgress(start.step, options.steps, None, 0.0, word=line))
        options = start.options
        if start.is_end:
            gathered(store, job_rank.rank, job_rank.num_ranks, "done")
            return event_logs.whole(nothing_left(start)) if job_rank.rank == 0 else None
        if replanner is None:
            assignment = RankAssignment(plan, {job_rank.rank: job_rank.planned_rank(plan.decision)})
        else:
            assignment = ranks_assigned(job_rank, store, replanner)
        rank = assignment.planned_ranks.get(job_rank.rank)
        job = Job(assignment.plan, options, folder)
        job.write(folder / JOB)
        with one_device(job, board) if rank == 0 else contextlib.nullcontext():
            text = _IDLE
            if rank is None:  # this process must not end before the others, or torchrun counts its host as done
                Supervisor(_titles(assignment.planned_ranks), board, deadline_s=options.deadline_s).wait()
            else:
                log = event_logs.event_log(rank)
                local_rank = job_rank.local_rank
                result = work(job, rank, store, board, after_step=show, local_rank=local_rank, event_log=log)
                text = result.to_json()
            texts = gathered(store, job_rank.rank, job_rank.num_ranks, text, options.deadline_s)
    rank_results = (RankResult.from_json(text) for text in texts if text != _IDLE)
    results = sorted(rank_results, key=lambda result: result.rank)
    return event_logs.whole(combine(assignment.plan, options, results, None)) if results else None


def _event_logs(options: RunOptions, store: Store) -> EventLogs:
    """Where attempts of this job tell of themselves, if they can know that they are of one job."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", _UNNAMED)
    is_shared = is_torchruns_store()
    if options.resume != IF_ANY or (run == _UNNAMED and not is_shared):
        run = ""
    elif is_shared:  # it knows one start of a run from the next
        root = cast("PrefixStore", store).underlying_store
        run = root.compare_set(f"halopipe/job/{run}", "", uuid.uuid4().hex).decode()
    return EventLogs(Path(options.checkpoint), run)


def end_with_torchrun() -> None:
    """Has this process ended when torchrun, which started it, is killed: nothing stays behind on a host."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())


@contextlib.contextmanager
def raised_by_all(board: StatusStore, rank: int, num_ranks: int) -> Iterator[None]:
    """What one rank raises inside, all raise: whatever came first.

    A rank that hangs then is ended.
    """
    try:
        with _ended_if_it_hangs(board):
            yield
    except Exception as error:
        raise _explained(board, rank, num_ranks, error) from error


def gathered(store: Store, rank: int, num_ranks: int, text: str, limit_s: float = SETUP_S) -> list[str]:
    """The results of all ranks, on rank 0; it may host the store, and so goes last, having read what all others wrote.

    Args:
        store: of the attempt.
        rank: this one.
        num_ranks: of the job.
        text: this rank's result.
        limit_s: longest that rank 0 waits for one of the others.

    Raises:
        HalopipeError: what a rank failed by.
    """
    leave_result(store, rank, text)
    if rank:
        return []
    texts = Supervisor(_titles(range(num_ranks)), store, deadline_s=limit_s).wait(limit_s)
    return [texts[other] for other in range(num_ranks)]


def _explained(board: StatusStore, rank: int, num_ranks: int, error: Exception) -> Exception:
    """Tell the others what happened here, hear what happened there, and return what came first."""
    mine = write_error(error)
    failures = {rank: read_error(mine)}
    others = [other for other in range(num_ranks) if other != rank]
    with contextlib.suppress(RuntimeError):
        leave_error(board, rank, mine)
        end_s = time.monotonic() + _FAREWELL_S
        while True:
            failures |= board.ask(lambda store: errors_left(store, others))
            if len(failures) == num_ranks or time.monotonic() >= end_s:
                break
            time.sleep(_POLL_S)
        time.sleep(0.0 if rank else 2 * _POLL_S)  # rank 0 may host the store: the others read what it told
    first = cause(failures)
    if not blame(first):  # who waited in vain does not know for whom
        first.ranks = tuple(other for other, failure in failures.items() if failure is first)
    if first is not failures[rank]:
        return first
    if isinstance(error, HalopipeError):
        error.ranks = first.ranks
    return error


@contextlib.contextmanager
def _ended_if_it_hangs(board: StatusStore) -> Iterator[None]:
    """Ends this process where another rank has failed and this one neither fails nor succeeds.

    torchrun ends such a rank itself where both are on one host.
    """
    over = threading.Event()

    def watch() -> None:
        has_failed = False
        while not has_failed and not over.wait(_WATCH_S):
            try:
                has_failed = board.check([FAILED])
            except BoardSilentError:
                pass  # its link may be back in time; else this rank's own waits end
            except RuntimeError as error:
                _log.debug("the store of the job is gone: %s", error)
                break
        if not over.wait(_HANGING_S):
            sys.stderr.write(f"another rank failed {_HANGING_S:g} s ago, and this one hangs: it is ended\n")
            sys.stderr.flush()
            os._exit(1)

    threading.Thread(target=watch, name="others", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _titles(ranks: Iterable[int]) -> dict[int, str]:
    return {rank: f"rank {rank}" for rank in ranks}
