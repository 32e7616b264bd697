"""The ranks of a run, spawned on this host and watched until all have ended."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from halopipe.launch.combine import combine
from halopipe.launch.processes import Processes, captured_once, workers_of
from halopipe.run_spec.job import JOB, REFERENCE, REFERENCE_RANK, Job, RankResult, failed_path
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import Progress, RunProgress, RunResult
from halopipe.training.rank_device import device_assignments_of, on_gpus, require_devices
from halopipe.training.save_times import EndRequest
from planner.ir.errors import EndedError, HalopipeError, MissingFileError, WorkerDiedError
from planner.ir.files import write_text
from planner.ir.plan import Decision, Plan
from runtime.monitor.activity import Beat
from runtime.monitor.failure import EndedWorker, left_by
from runtime.monitor.waits import Waits
from runtime.monitor.watch import host_store, run_workers

if TYPE_CHECKING:
    from cuda_ops._torch import Store
    from cuda_ops.device.fork_server import Server

_POLL_S = 0.02


def spawn(plan: Plan, options: RunOptions, progress: Progress | None, folder: Path) -> RunResult:
    """Run all ranks as processes of this host; none of them is left afterwards.

    Args:
        folder: of the job, see :func:`halopipe.run_spec.job.job_folder`.

    Raises:
        MissingDeviceError: the plan's GPUs are not there.
    """
    assignments = device_assignments_of(plan.decision, options.device)
    require_devices(assignments, plan.prediction.ranks)
    store, port = host_store()
    job = Job(plan, options, folder)
    job.write(folder / JOB)
    names = {assignment.rank: str(assignment.rank) for assignment in assignments}
    num_workers = len(names) + job.is_compared
    is_afresh = on_gpus(assignments)
    with nullcontext() if is_afresh or num_workers == 1 else captured_once(folder, num_workers) as server:
        workers = workers_of(folder, port, names, afresh=is_afresh, server=server)
        with one_device(job, server):
            results = _watched(job, workers, store, progress)
    return combine(plan, options, results, progress)


@contextmanager
def one_device(job: Job, server: Server | None = None) -> Iterator[None]:
    """Where the job is compared with one device, its first steps are run there, in a process of their own.

    Where the user asked for it, before the ranks start: its memory is gone by then, and what it raises ends the job.
    Else beside them, and why it failed is left for rank 0.

    Args:
        server: that the process is forked from, as of :func:`halopipe.launch.processes.captured_once`.
    """
    if not job.is_compared:
        yield
        return
    assignments = device_assignments_of(job.plan.decision, job.options.device)
    store, port = host_store()
    workers = workers_of(job.folder, port, {REFERENCE_RANK: REFERENCE}, afresh=on_gpus(assignments), server=server)
    if job.options.check_numerics:
        run_workers(workers, {REFERENCE_RANK: "the run on one device"}, store)
        yield
        return
    with _beside(workers, store, job):
        yield


@contextmanager
def _beside(one: Processes, store: Store, job: Job) -> Iterator[None]:
    """The run on one device, beside the ranks; it ends with them.  If it fails, why is written for rank 0."""

    def watch() -> None:
        while not over.wait(_POLL_S):
            try:
                ended = one.ended().get(REFERENCE_RANK)
            except OSError:  # no more files can be opened, which the ranks' launcher meets and says as well
                return
            if ended is not None:
                if not job.reference_path.exists():
                    _leave(kept, failed_path(job.reference_path), _why(store, ended))
                return

    kept = job.folder / "no reference"
    kept.touch()
    over, watching = threading.Event(), threading.Thread(target=watch, name="one device", daemon=True)
    one.start()
    try:
        watching.start()
        yield
    finally:
        over.set()
        watching.join()
        one.end()


def _leave(kept: Path, path: Path, why: str) -> None:
    """Writes it; where a disk is full, the empty file ``kept`` gets that name, which needs no room: rank 0 waits."""
    try:
        write_text(path, why)
    except MissingFileError:
        with suppress(OSError):  # the job's folder was removed, which rank 0 sees as well
            kept.rename(path)


def _why(store: Store, ended: EndedWorker) -> str:
    """What a run on one device that failed left behind, as one line."""
    left = left_by(store, REFERENCE_RANK)
    if isinstance(left, HalopipeError):
        return f"one device could not run it: {left.title}"
    how = f"signal {-ended.code}" if ended.code < 0 else f"exit code {ended.code}"
    return f"the run on one device ended by {how} without a word"


def _watched(job: Job, workers: Processes, store: Store, progress: Progress | None) -> list[RankResult]:
    """The result of each rank.

    Where checkpoints are written, who asks this process to end asks the ranks: they save, and raise EndedError.
    """
    last, end, passed_on, remarks = 0, EndRequest(job.options.grace_s), False, set[str]()

    def tell(remark: str) -> None:
        if progress is not None and remark and remark not in remarks:
            remarks.add(remark)
            progress(RunProgress(last, job.options.steps, None, 0.0, word=remark))

    def watch(beats: Mapping[int, Beat]) -> None:
        nonlocal last, passed_on
        if end.why and not passed_on:
            passed_on = True
            sys.stderr.write(f"{end.why}: the job saves before its next step, and ends; Ctrl-C again ends it at once\n")
            workers.ask_to_end()
        if end.is_late():
            sys.stderr.write(f"{end.late()}\n")
            raise SystemExit(end.exit_code)
        for beat in beats.values():
            tell(beat.remark)
        with_loss = [beat for beat in beats.values() if beat.loss is not None]
        if progress is not None and with_loss and with_loss[0].num_done > last:
            last, first = with_loss[0].num_done, beats.get(0, with_loss[0])
            latest = (with_loss[0].loss, with_loss[0].step_s, first.slow, first.left_out)
            progress(RunProgress(last, job.options.steps, *latest))

    decision = job.plan.decision
    waits = Waits(decision.rows(), [stage.ranks for stage in decision.stages])
    with end.heard() if job.options.checkpoint else nullcontext():
        try:
            texts = run_workers(workers, titles_of(decision), store, watch, waits, job.options.deadline_s)
        except EndedError as error:  # the ranks were asked in another way
            error.title = error.title.replace("SIGTERM", end.why or "SIGTERM")
            raise
        except WorkerDiedError:
            if end.signal:  # it was not ready to hear that
                raise SystemExit(end.exit_code) from None
            raise
    results = [RankResult.from_json(texts[rank]) for rank in sorted(texts)]
    for result in results:
        for remark in result.remarks:
            tell(remark)
    return results


def titles_of(decision: Decision) -> dict[int, str]:
    """What errors call each rank: its device and its stages."""
    titles = {}
    for rank in range(decision.num_ranks):
        numbers = [str(number) for number, stage in enumerate(decision.stages) if rank in stage.ranks]
        titles[rank] = f"rank {rank} ({decision.device_of(rank)}, stage {', '.join(numbers) or 'none'})"
    return titles
