"""Runs of whole plans in real processes, and what becomes of them when a rank fails or somebody asks them to end."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch.distributed as dist

from cuda_ops.memory import available
from halopipe.launch import spawn, worker
from halopipe.launch.processes import workers_of
from halopipe.launch.run import run_plan
from halopipe.run_spec.job import Job, RankResult
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunProgress
from planner.ir import errors
from planner.ir.profile import ModelSource
from planner.ir.timeline import Timeline
from runtime.checkpoint import Checkpoint, complete_steps
from runtime.checkpoint.lock import held
from runtime.monitor.activity import Activity, Heartbeat
from runtime.monitor.failure import EndedWorker, leave_result, left_by
from tests.forks import forked
from tests.halopipe import learners
from tests.halopipe.bombs import POISONED_STEP
from tests.halopipe.launch.jobs import places
from tests.halopipe.plans import mined, plan_of
from tests.processes import writing_into


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The job's folder lies in a folder of the test's own; afterwards there is no file, and nobody works there."""
    folder = tmp_path / "jobs"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    assert list(folder.glob("halopipe-*")) == []  # torch itself leaves a cache here
    assert writing_into(folder) == []


@pytest.fixture(autouse=True)
def hears_ctrl_c() -> Iterator[None]:
    """What is started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


OPTIONS = {"steps": 5, "warmup": 0, "data": "tests.halopipe.bombs:poison", "check_first_step": False}
LONG = {**OPTIONS, "steps": 100_000, "data": "tests.halopipe.learners:stream", "deadline_s": 30.0}


def test_a_plan_of_three_processes_computes_what_one_device_does() -> None:
    source = ModelSource("tests.halopipe.launch.networks:normalised", {}, (4, 6))
    plan = plan_of(source, [0.5], (4, 3, 3), ranks=[(0, 1), (2,)], shares=[(3, 1), (1,)])
    seen: list[RunProgress] = []
    result = run_plan(plan, RunOptions(steps=6, warmup=2, check_numerics=True, dtype="float64"), seen.append)
    assert result is not None
    assert (len(result.losses), len(result.step_seconds)) == (6, 6)
    assert result.losses[-1] < result.losses[0]
    assert result.numerics.num_steps == 5
    assert set(result.numerics.worst) == {"loss", "gradient", "parameter", "buffer"}
    assert max(each.error for each in result.numerics.worst.values()) < 1e-10
    assert (seen[-1].step, seen[-1].num_steps, seen[-1].loss) == (6, 6, result.losses[-1])
    file = result.timeline_file(plan, Timeline("predicted", 0.01, ()))
    rows = [[span.action for span in file.measured.spans if span.rank == rank] for rank in range(3)]
    assert [tuple(row) for row in rows] == list(plan.decision.program)
    assert all(file.measured.peak_bytes(rank) > 0 for rank in range(3))
    assert result.measured(plan.prediction).error is None  # that was predicted for another transport
    measured = result.measured(replace(plan.prediction, transport=result.transport))
    assert measured.num_steps == 4
    assert measured.error == pytest.approx(measured.step_s / 0.01 - 1)
    assert len(measured.stage_forward_s) == len(measured.stage_backward_s) == 2
    assert min(*measured.stage_forward_s, *measured.stage_backward_s) > 0


@pytest.mark.skipif(bool(available()), reason="no compiler for the counting allocator")
def test_what_ranks_are_forked_with_counts_as_theirs() -> None:
    """Weights are made before the fork, by the process that captures the model for all ranks."""
    source = ModelSource("tests.halopipe.launch.networks:heavy", {}, (4, 8))
    plan = plan_of(source, [0.3], (4,), ranks=[(0,), (1,)], shares=[(1,), (1,)])
    result = run_plan(plan, RunOptions(steps=3, warmup=1, check_first_step=False, dtype="float64"))
    assert result is not None
    weights = 8 * 4096 * 8
    assert min(result.peak_bytes) >= 3 * weights, "weights, gradients and momentum"
    assert max(result.peak_bytes) < 6 * weights, "of the rank's own layer alone"


def test_where_one_device_cannot_run_it_the_job_goes_on_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "ONE_DEVICE", "halopipe.launch.worker:nobody")
    result = run_plan(mined(-1, ""), RunOptions(steps=2, warmup=0))
    assert result is not None
    assert result.numerics is not None
    assert result.numerics.skipped.startswith("the run on one device ended by exit code 1 without a word")


AT = f"step {POISONED_STEP}, micro-batch 1"


FAILURES = {
    "raise": (2, "F", "H502", 1),
    "kill": (0, "B", "H501", 0),
    "sleep": (0, "F", "H503", 0),
    "stop": (2, "B", "H503", 1),
}
"""By deed: of which layer, in which direction, the code of the error, and the rank that it names."""

SAID = {
    "raise": [
        rf"^rank 1 \(n0/cpu1, stage 1\) stopped at {AT}, forward: ValueError: the bomb went off$",
        "the others: rank 0 in 0RECV_B",
        ">>1F1<<",
    ],
    "kill": [
        r"^rank 0 \(n0/cpu0, stage 0\) ended by signal SIGKILL without a word$",
        "last heard of: rank 0 in ",
        "stderr: about to be killed",
    ],
    "sleep": [
        rf"^rank 1 \(n0/cpu1, stage 1\) stopped at {AT}, receiving the activation",
        r"rank 1 waited \d+\.\d\d s for rank 0, deadline 2 s",
        rf"the others: rank 0 in 0F1 \(step {POISONED_STEP}, ",
        r"for rank 0 \(activation of micro-batch 1, stage 0 -> stage 1\), ",
        rf"which is computing stage 0 forward of micro-batch 1 \(step {POISONED_STEP}\) for ",
    ],
    "stop": [
        rf"^.*step {POISONED_STEP}",
        r"for rank 1 \(gradient of micro-batch 1, stage 1 -> stage 0\), which has said nothing for ",
        "it is stopped, or its host or link is gone",
    ],
}


@pytest.mark.every_case
@pytest.mark.parametrize("deed", FAILURES)
def test_a_rank_that_fails_ends_the_run_and_is_named_with_what_it_did_and_who_waited(deed: str) -> None:
    layer, direction, code, rank = FAILURES[deed]
    deadline_s = 2.0 if code == "H503" else 60.0
    with pytest.raises(errors.HalopipeError) as caught:
        run_plan(mined(layer, deed, direction), RunOptions(**OPTIONS, deadline_s=deadline_s))
    error = caught.value
    assert (error.code, error.exit_code, error.ranks) == (code, 5, (rank,))
    for text in SAID[deed]:
        assert re.search(text, f"{error.title}\n{error}", re.MULTILINE), f"{text}: {error}"


def test_what_a_rank_leaves_needs_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers, store = workers_of(tmp_path / "gone", 2)
    for rank, (code, do) in enumerate([(0, lambda *_: "done"), (1, lambda *_: str(1 / 0))]):
        with monkeypatch.context() as patch:
            for name, value in workers._variables[rank].items():
                patch.setenv(name, value)
            assert worker.leave_outcome(do, is_named=True) == code
    error = left_by(store, 1)
    assert left_by(store, 0) == "done"
    assert isinstance(error, errors.WorkerError)
    assert error.title == "a worker failed: ZeroDivisionError: division by zero"
    assert error.details[-1] == "on rank 1"
    with pytest.raises(errors.MissingFileError, match="is gone"):
        workers.start()


def test_a_job_of_another_size_and_a_folder_of_another_job_are_refused_before_any_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held(tmp_path / "saved"), pytest.raises(errors.UsageError, match="another job writes its checkpoints into"):
        run_plan(mined(), RunOptions(checkpoint=str(tmp_path / "saved")))
    for name, value in places(3)[0].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(errors.RankCountError, match="the plan is for 2 ranks, the job has 3") as caught:
        run_plan(mined())
    assert "torchrun --nproc-per-node 2" in caught.value.remedies[0]
    assert caught.value.exit_code == 2


def ending(number: signal.Signals, step: int) -> Callable[[RunProgress], None]:
    """Sends this process a signal when a step is done, once."""
    sent: list[int] = []

    def progress(at: RunProgress) -> None:
        if at.step >= step and not sent:
            sent.append(at.step)
            os.kill(os.getpid(), number)

    return progress


@pytest.mark.parametrize(("number", "ends"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_run_that_is_interrupted_ends_its_workers_and_leaves_no_file(
    number: signal.Signals, ends: type[BaseException]
) -> None:
    with pytest.raises(ends) as caught:
        run_plan(learners.plan(), RunOptions(**LONG), ending(number, 3))
    assert number == signal.SIGINT or caught.value.code == 128 + number


def test_the_workers_of_a_run_that_is_killed_end_and_leave_no_file(nothing_left: Path) -> None:
    """Takes 4 s: the server of processes that is to clean up belongs to the launcher, and loads torch."""
    assert forked(1, lambda _: run_plan(learners.plan(), RunOptions(**LONG), ending(signal.SIGKILL, 3))) == [None]
    end_s = time.monotonic() + 10
    while (writing_into(nothing_left) or list(nothing_left.glob("halopipe-*"))) and time.monotonic() < end_s:
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_launcher_that_is_asked_to_end_has_its_workers_save(
    tmp_path: Path, number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "saved"
    with pytest.raises(errors.EndedError) as caught:
        run_plan(learners.plan(), RunOptions(**LONG, checkpoint=str(folder)), ending(number, 3))
    (saved,) = complete_steps(folder)
    assert caught.value.title.startswith(f"the job ended after {saved} steps: ")
    assert caught.value.details == (f"saved as {folder}/step-{saved}",)
    assert saved >= 3
    Checkpoint.open(folder).verify()
    assert list(folder.iterdir()) == [folder / f"step-{saved}"]  # no lock
    assert f"{number.name}: the job saves before its next step, and ends" in capfd.readouterr().err


def test_ranks_that_torchrun_started_end_together_when_one_is_asked(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    plan = learners.plan()

    def rank(number: int) -> tuple[str, tuple[str, ...]]:
        options = RunOptions(**LONG, checkpoint=str(folder), checkpoint_every="1ms")
        try:
            run_plan(plan, options, ending(signal.SIGTERM, 3) if number == 0 else None)
        except errors.EndedError as error:
            return error.title.partition(": ")[0], error.details
        return "", ()

    ended = forked(2, rank, places(2, GLOO_SOCKET_IFNAME="lo"))
    last = complete_steps(folder)[-1]
    assert ended == [(f"the job ended after {last} steps", (f"saved as {folder}/step-{last}",))] * 2
    assert not (folder / ".halopipe.lock").exists()


def test_a_job_that_does_not_end_within_the_grace_time_is_ended(tmp_path: Path) -> None:
    options = RunOptions(**OPTIONS, checkpoint=str(tmp_path / "saved"), grace_s=0.3)
    with pytest.raises(SystemExit) as caught:
        run_plan(mined(0, "sleep"), options, ending(signal.SIGTERM, POISONED_STEP))
    assert caught.value.code == 128 + signal.SIGTERM
    assert complete_steps(tmp_path / "saved") == ()


@pytest.mark.parametrize("is_over", [False, True])
def test_what_a_rank_has_to_say_is_told_once_while_the_job_runs_or_at_its_end(is_over: bool, tmp_path: Path) -> None:
    store = dist.HashStore()
    seen = list[str]()
    activity = Activity()
    for _ in range(2):
        activity.tell("the disk is full")
    result = RankResult(0, (0.5,), (1.0,), {}, 0, (), remarks=activity.remarks)

    class Speaking:
        """A worker that says something, and ends once it was heard, or at once."""

        pids: ClassVar[dict[int, int]] = {}

        def start(self) -> None:
            for _ in range(0 if is_over else 2):
                Heartbeat(store, 0, activity).publish()
            leave_result(store, 0, result.to_json())

        def ended(self) -> dict[int, EndedWorker]:
            return {0: EndedWorker(0)} if seen or is_over else {}

        def end(self) -> None:
            pass

    job = Job(learners.plan([]), RunOptions(), tmp_path)
    assert spawn._watched(job, Speaking(), store, lambda at: seen.append(at.word)) == [result]
    assert seen == ["the disk is full"]
