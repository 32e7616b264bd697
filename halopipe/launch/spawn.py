"""The ranks of a run, spawned on this host and watched until all have ended."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from halopipe.launch.combine import combine
from halopipe.launch.processes import Processes, captured_once, workers_of
from halopipe.run_spec.job import JOB, REFERENCE, Job, RankResult
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunProgress, RunResult, ShowRun
from halopipe.training.rank_device import device_assignments_of, on_gpus, require_devices
from halopipe.training.save_times import EndRequest
from planner.ir.errors import EndedError, HalopipeError, WorkerDiedError
from planner.ir.plan import Decision, Plan
from runtime.monitor.activity import Beat
from runtime.monitor.failure import EndedWorker, left_by, set_text
from runtime.monitor.waits import Waits
from runtime.monitor.watch import Supervisor

if TYPE_CHECKING:
    from cuda_ops._torch import Store
    from cuda_ops.device.fork_server import Server
    from runtime.monitor.activity import StatusStore

ONE_DEVICE = "halopipe.launch.worker:reference"
_POLL_S = 0.02


def spawn(plan: Plan, options: RunOptions, progress: ShowRun | None, folder: Path) -> RunResult:
    """Run all ranks as processes of this host; none of them is left afterwards.

    Args:
        folder: of the job, see :func:`planner.ir.scratch.scratch_folder`.

    Raises:
        MissingDeviceError: the plan's GPUs are not there.
    """
    assignments = device_assignments_of(plan.decision, options.device)
    require_devices(assignments, plan.prediction.ranks)
    job = Job(plan, options, folder)
    is_afresh = on_gpus(assignments)
    num_ranks = len(assignments)
    job.write(folder / JOB)
    num_workers = num_ranks + job.is_compared
    with nullcontext() if is_afresh or num_workers == 1 else captured_once(folder, num_workers) as server:
        workers, store = workers_of(folder, num_ranks, afresh=is_afresh, server=server)
        with one_device(job, store, server):
            results = _watched(job, workers, store, progress)
    return combine(plan, options, results, progress)


@contextmanager
def one_device(job: Job, store: Store | StatusStore, server: Server | None = None) -> Iterator[None]:
    """Where the job is compared with one device, its first steps are run there, in a process of their own.

    Where the user asked for it, before the ranks start: its memory is gone by then, and what it raises ends the job.
    Else beside them, and why it failed is said in place of the reference.

    Args:
        store: of the job, on which the reference is left for the ranks.
        server: that the process is forked from, as of :func:`halopipe.launch.processes.captured_once`.
    """
    if not job.is_compared:
        yield
        return
    is_afresh = on_gpus(device_assignments_of(job.plan.decision, job.options.device))
    one, own_store = workers_of(job.folder, 1, call=ONE_DEVICE, afresh=is_afresh, server=server)
    if job.options.check_numerics:
        try:
            text = Supervisor({0: "the run on one device"}, own_store).run(one)[0]
        except HalopipeError as error:
            error.ranks = ()  # it is none of the job
            raise
        set_text(store, REFERENCE, text)
        yield
        return

    def watch() -> None:
        while not over.wait(_POLL_S):
            with suppress(OSError, RuntimeError):  # no more files can be opened, or the store is gone, as ranks say too
                ended = one.ended().get(0)
                if ended is not None:
                    set_text(store, REFERENCE, _reference_text(own_store, ended))
                    return

    over = threading.Event()
    watching = threading.Thread(target=watch, name="one device", daemon=True)
    one.start()
    try:
        watching.start()
        yield
    finally:
        over.set()
        watching.join()
        one.end()


def _reference_text(store: Store, ended: EndedWorker) -> str:
    """What a run on one device has left, or why it has left nothing."""
    from halopipe.training.reference import Reference  # late: most runs need none here

    left = left_by(store, 0)
    if isinstance(left, HalopipeError):
        return Reference(skipped=f"one device could not run it: {left.title}").to_text()
    how = f"signal {-ended.code}" if ended.code < 0 else f"exit code {ended.code}"
    return left or Reference(skipped=f"the run on one device ended by {how} without a word").to_text()


def _watched(job: Job, workers: Processes, store: Store, progress: ShowRun | None) -> list[RankResult]:
    """The result of each rank.

    Where checkpoints are written, who asks this process to end asks the ranks: they save, and raise EndedError.
    """
    last = 0
    end = EndRequest(job.options.grace_s)
    passed_on = False
    remarks = set[str]()

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
            last = with_loss[0].num_done
            first = beats.get(0, with_loss[0])
            latest = (with_loss[0].loss, with_loss[0].step_s, first.slow, first.left_out)
            progress(RunProgress(last, job.options.steps, *latest))

    supervisor = supervisor_of(job.plan.decision, store, job.options.deadline_s, watch)
    with end.heard() if job.options.checkpoint else nullcontext():
        try:
            texts = supervisor.run(workers)
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


def supervisor_of(
    decision: Decision,
    store: Store,
    deadline_s: float,
    watch: Callable[[Mapping[int, Beat]], None] = lambda beats: None,
) -> Supervisor:
    """Of the ranks of a plan, which errors call by device and stages."""
    titles = {}
    for rank in range(decision.num_ranks):
        numbers = [str(number) for number, stage in enumerate(decision.stages) if rank in stage.ranks]
        titles[rank] = f"rank {rank} ({decision.device_of(rank)}, stage {', '.join(numbers) or 'none'})"
    waits = Waits(decision.rows(), [stage.ranks for stage in decision.stages])
    return Supervisor(titles, store, watch=watch, waits=waits, deadline_s=deadline_s)
