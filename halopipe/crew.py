"""The ranks of a run together: spawned on this host, or as torchrun started them; and their results as one."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType

from torch import distributed as dist

from cuda_ops.host import core_of, prepare_process
from halopipe.job import Job, RankResult
from halopipe.runs import Progress, RunOptions, RunProgress, RunResult, stage_medians
from halopipe.worker import REFERENCE
from planner.ir.codec import plain
from planner.ir.errors import RankCountError
from planner.ir.plan import Decision, Plan
from planner.ir.schedule import Op
from planner.ir.timeline import MemorySample, Timeline
from runtime.activity import Beat
from runtime.engine import StepResult, device_of
from runtime.launch import SETUP_S, Member, host_store, result_path, run_workers, worker_environment
from runtime.numerics import Difference, NumericsReport, report
from runtime.transport import open_gloo

_ROOT = Path(__file__).resolve().parent.parent
_JOB = "job.json"


def spawn(plan: Plan, options: RunOptions, progress: Progress | None) -> RunResult:
    """Run all ranks as processes of this host; none of them, and no file, is left afterwards."""
    num_ranks = plan.decision.num_ranks
    with _folder() as folder:
        job = Job(plan, options, folder)
        _make_reference(job)
        members = [_member(folder, rank, str(rank), _title(plan.decision, rank)) for rank in range(num_ranks)]
        _run(job, members, progress)
        texts = [result_path(folder, rank).read_text(encoding="utf-8") for rank in range(num_ranks)]
    return _finish(plan, options, [RankResult.from_json(text) for text in texts], progress)


def join(plan: Plan, options: RunOptions, progress: Progress | None) -> RunResult | None:
    """Be one rank of the job that torchrun or Slurm started; the result on rank 0, None elsewhere."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if num_ranks != plan.decision.num_ranks:
        raise RankCountError(
            f"the plan is for {plan.decision.num_ranks} ranks, the job has {num_ranks}",
            [f"WORLD_SIZE is {num_ranks}"],
            [f"torchrun --nproc-per-node {plan.decision.num_ranks} -m halopipe run PLAN", "plan again with --ranks"],
        )
    with _folder() as folder:
        job = Job(plan, options, folder)
        _make_reference(job)
        prepare_process(core_of(int(os.environ.get("LOCAL_RANK", rank))))
        results = _work_with(job, rank, num_ranks, progress if rank == 0 else None)
    return _finish(plan, options, results, None) if rank == 0 else None


def _work_with(job: Job, rank: int, num_ranks: int, progress: Progress | None) -> list[RankResult]:
    """Work as ``rank``; the results of all ranks, on rank 0 alone."""
    from halopipe.work import work

    def after_step(step: int, result: StepResult) -> None:
        if progress is not None:
            progress(RunProgress(step + 1, job.options.steps, result.loss, result.step_s))

    store, board = _environment_store(), _environment_store()
    open_transport = partial(open_gloo, rank, num_ranks, store, SETUP_S)
    store.set(f"result/{rank}", work(job, rank, store, board, open_transport, after_step).to_json())
    if rank != 0:
        return []
    # Rank 0 may host the store: it goes last, having read what all others wrote.
    return [RankResult.from_json(store.get(f"result/{other}").decode()) for other in range(num_ranks)]


def _environment_store() -> dist.Store:
    """A client of the job's store; each attempt of torchrun has keys of its own, since the store outlives it."""
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=SETUP_S)))
    return dist.PrefixStore(f"halopipe/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _make_reference(job: Job) -> None:
    """The first steps on one device, in a process of its own: its memory is gone before the ranks start."""
    if job.options.check_numerics:
        _run(job, [_member(job.folder, 0, REFERENCE, "the run on one device")], None)
        result_path(job.folder, 0).unlink()


def _run(job: Job, members: Sequence[Member], progress: Progress | None) -> None:
    store, port = host_store()
    replace(job, port=port, parent=os.getpid()).write(job.folder / _JOB)
    last = 0

    def watch(beats: Mapping[int, Beat]) -> None:
        nonlocal last
        known = [beat for beat in beats.values() if beat.loss is not None]
        if progress is not None and known and known[0].num_done > last:
            last = known[0].num_done
            progress(RunProgress(last, job.options.steps, known[0].loss, known[0].step_s))

    run_workers(members, job.folder, worker_environment(_ROOT), store, watch)


def _member(folder: Path, rank: int, name: str, title: str) -> Member:
    # -P: the working folder must not hide our packages; the model is looked for there all the same.
    return Member(rank, (sys.executable, "-P", "-m", "halopipe.worker", str(folder / _JOB), name), title)


def _title(decision: Decision, rank: int) -> str:
    numbers = [str(number) for number, stage in enumerate(decision.stages) if rank in stage.ranks]
    return f"rank {rank} ({device_of(decision, rank)}, stage {', '.join(numbers) or 'none'})"


def _finish(plan: Plan, options: RunOptions, results: list[RankResult], progress: Progress | None) -> RunResult:
    """The run as a whole; NumericsError if it is not what one device computes."""
    seconds = tuple(max(each) for each in zip(*(result.step_seconds for result in results), strict=True))
    losses = next((result.losses for result in results if result.losses), ())
    timelines = {step: _timeline(results, step, seconds[step]) for step in results[0].spans}
    timed = [step for step in timelines if step >= options.warmup] or list(timelines)
    median = sorted(timed, key=seconds.__getitem__)[len(timed) // 2]
    num_stages = len(plan.decision.stages)
    shown = [timelines[step] for step in timed]
    result = RunResult(
        losses,
        seconds,
        options.warmup,
        timelines[median],
        stage_medians(shown, num_stages, (Op.FORWARD,)),
        stage_medians(shown, num_stages, (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)),
        tuple(result.peak_bytes for result in results),
        _numerics(options, plan, results) if options.check_numerics else None,
    )
    if progress is not None:
        progress(RunProgress(len(seconds), options.steps, losses[-1], seconds[-1]))
    return result


def _timeline(results: list[RankResult], step: int, step_s: float) -> Timeline:
    spans = tuple(span for result in results for span in result.spans[step])
    memory = tuple(MemorySample(result.rank, 0.0, result.peak_bytes) for result in results if result.peak_bytes)
    return Timeline("measured", step_s, spans, memory)


def _numerics(options: RunOptions, plan: Plan, results: list[RankResult]) -> NumericsReport:
    found = (Difference(**plain(each)) for result in results for each in result.compared)
    return report(found, options.dtype or plan.inputs.model.dtype)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder that is removed at the end, also when the process is told to end."""
    with tempfile.TemporaryDirectory(prefix="halopipe-") as name, _ended_by_exception():
        yield Path(name)


@contextlib.contextmanager
def _ended_by_exception() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that what must be cleaned up is; only the main thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
