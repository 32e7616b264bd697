"""Runs of whole plans in real processes, and what becomes of them when a rank fails."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch.distributed as dist

from halopipe.launch import spawn, worker
from halopipe.launch.processes import workers_of
from halopipe.launch.run import run_plan
from halopipe.run_spec.job import Job, RankResult
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunProgress, RunResult
from planner.ir.codec import dump
from planner.ir.errors import (
    DeadlineError,
    EndedError,
    MissingFileError,
    RankCountError,
    StageFailedError,
    UsageError,
    WorkerDiedError,
    WorkerError,
)
from planner.ir.plan import Plan
from planner.ir.timeline import Timeline
from runtime.checkpoint import Checkpoint, complete_steps
from runtime.checkpoint.lock import held
from runtime.monitor.activity import Activity, Heartbeat
from runtime.monitor.failure import EndedWorker, leave_result, left_by
from tests.forks import forked
from tests.halopipe import learners
from tests.halopipe.bombs import POISONED_STEP
from tests.halopipe.plans import RESNET, mined, plan_of
from tests.processes import Program, writing_into

ROOT = Path(__file__).resolve().parents[3]


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


OPTIONS = {"steps": 5, "warmup": 0, "data": "tests.halopipe.bombs:poison", "check_first_step": False}


def run(plan: Plan, **options: object) -> RunResult | None:
    return run_plan(plan, RunOptions(**{**OPTIONS, **options}))


def test_a_plan_of_three_processes_computes_what_one_device_does() -> None:
    """Takes 6 s: the ranks and the one that does it alone each capture the network."""
    plan = plan_of(RESNET, [0.5], (4, 3, 3), ranks=[(0, 1), (2,)], shares=[(3, 1), (1,)])
    seen: list[RunProgress] = []
    options = RunOptions(steps=6, warmup=2, check_numerics=True, dtype="float64")
    result = run_plan(plan, options, seen.append)
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
    assert all(file.measured.peak_bytes(rank) > 10_000 for rank in range(3))
    assert result.measured(plan.prediction).error is None  # that was predicted for another transport
    measured = result.measured(replace(plan.prediction, transport=result.transport))
    assert measured.num_steps == 4
    assert measured.error == pytest.approx(measured.step_s / 0.01 - 1)
    assert len(measured.stage_forward_s) == len(measured.stage_backward_s) == 2
    assert all(seconds > 0 for seconds in (*measured.stage_forward_s, *measured.stage_backward_s))


def test_the_first_step_is_compared_with_one_device_beside_the_ranks() -> None:
    result = run_plan(mined(-1, ""), RunOptions(steps=2, warmup=0))
    assert result is not None
    assert result.numerics is not None
    assert (result.numerics.num_steps, result.numerics.skipped) == (1, "")
    assert result.numerics.witness == "the user's module on the whole batch"


def test_where_one_device_cannot_run_it_the_job_goes_on_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "ONE_DEVICE", "halopipe.launch.worker:nobody")
    result = run_plan(mined(-1, ""), RunOptions(steps=2, warmup=0))
    assert result is not None
    assert result.numerics is not None
    assert result.numerics.skipped.startswith("the run on one device ended by exit code 1 without a word")


def test_a_stage_that_raises_ends_the_run_with_its_error() -> None:
    with pytest.raises(StageFailedError) as caught:
        run(mined(2, "raise"))
    error = caught.value
    where = f"rank 1 (n0/cpu1, stage 1) stopped at step {POISONED_STEP}, micro-batch 1, forward"
    assert error.title == f"{where}: ValueError: the bomb went off"
    assert "the others: rank 0 in 0RECV_B" in str(error)
    assert ">>1F1<<" in str(error)
    assert (error.code, error.exit_code) == ("H502", 5)


def test_a_worker_that_is_killed_is_named_with_the_signal() -> None:
    with pytest.raises(WorkerDiedError) as caught:
        run(mined(0, "kill", "B"))
    error = caught.value
    assert error.title == "rank 0 (n0/cpu0, stage 0) ended by signal SIGKILL without a word"
    assert "last heard of: rank 0 in " in error.details[0]
    assert "stderr: about to be killed" in error.details
    assert error.ranks == (0,)
    assert (error.code, error.exit_code) == ("H501", 5)


def test_a_worker_that_exits_in_a_step_is_named_with_its_code() -> None:
    with pytest.raises(WorkerDiedError) as caught:
        run(mined(0, "exit", "B"))
    assert caught.value.title == "rank 0 (n0/cpu0, stage 0) ended with exit code 0 without a word"


def test_a_worker_that_hangs_is_a_deadline_that_names_who_waits_for_whom() -> None:
    with pytest.raises(DeadlineError) as caught:
        run(mined(0, "sleep"), deadline_s=2.0)
    text = str(caught.value)
    assert f"rank 1 (n0/cpu1, stage 1) stopped at step {POISONED_STEP}, micro-batch 1, receiving the activation" in text
    assert re.search(r"rank 1 waited \d+\.\d\d s for rank 0, deadline 2 s", text)
    assert f"the others: rank 0 in 0F1 (step {POISONED_STEP}, " in text
    assert "for rank 0 (activation of micro-batch 1, stage 0 -> stage 1), " in text
    assert caught.value.ranks == (0,), "it is the one that the others wait for"
    assert f"which is computing stage 0 forward of micro-batch 1 (step {POISONED_STEP}) for " in text
    assert (caught.value.code, caught.value.exit_code) == ("H503", 5)


def test_a_worker_that_is_stopped_is_found_by_its_silence() -> None:
    with pytest.raises(DeadlineError) as caught:
        run(mined(2, "stop", "B"), deadline_s=2.0)
    text = str(caught.value)
    assert f"step {POISONED_STEP}" in caught.value.title
    assert "for rank 1 (gradient of micro-batch 1, stage 1 -> stage 0), which has said nothing for " in text
    assert "it is stopped, or its host or link is gone" in text
    assert caught.value.ranks == (1,)


def test_what_a_rank_leaves_needs_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers, store = workers_of(tmp_path / "gone", 2)
    for rank, (code, do) in enumerate([(0, lambda *_: "done"), (1, lambda *_: str(1 / 0))]):
        with monkeypatch.context() as patch:
            for name, value in workers._variables[rank].items():
                patch.setenv(name, value)
            assert worker.leave_outcome(do, is_named=True) == code
    error = left_by(store, 1)
    assert left_by(store, 0) == "done"
    assert isinstance(error, WorkerError)
    assert error.title == "a worker failed: ZeroDivisionError: division by zero"
    assert error.details[-1] == "on rank 1"
    with pytest.raises(MissingFileError, match="is gone"):
        workers.start()


def test_a_job_of_another_size_is_refused_with_the_command_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = mined(-1, "")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(RankCountError) as caught:
        run_plan(plan)
    assert caught.value.title == "the plan is for 2 ranks, the job has 3"
    assert "torchrun --nproc-per-node 2" in caught.value.remedies[0]
    assert caught.value.exit_code == 2


SCRIPT = """
import os
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background may have had it ignored
from halopipe.launch.run import RunOptions, run_plan
from planner.ir.codec import load
from planner.ir.plan import Plan

options = RunOptions(steps=int(sys.argv[1]), warmup=0, check_first_step="RANK" not in os.environ)
result = run_plan(load("plan.json", Plan), options)
print("losses", len(result.losses) if result else None, flush=True)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script beside its plan, in the working directory."""
    monkeypatch.chdir(tmp_path)
    dump(mined(-1, ""), tmp_path / "plan.json")
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


def test_ranks_that_torchrun_started_join_and_rank_0_has_the_result(script: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [Program.start(script, ["3"], RANK=str(rank), LOCAL_RANK=str(rank), **job) for rank in range(2)]
    ended = [rank.end() for rank in ranks]
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert [stdout.split() for _, stdout, _ in ended] == [["losses", "3"], ["losses", "None"]]


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, -signal.SIGINT),
        (signal.SIGTERM, 128 + signal.SIGTERM),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_a_run_that_is_interrupted_or_killed_ends_its_workers_and_leaves_no_file(
    script: Path, nothing_left: Path, number: signal.Signals, code: int
) -> None:
    """Takes 6 s: a new interpreter, which is what is killed, and a server of processes of its own, load torch."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, script, "100000"], env=environment, stderr=subprocess.DEVNULL)
    end_s = time.monotonic() + 60
    while len(writing_into(nothing_left)) < 2 and time.monotonic() < end_s:
        time.sleep(0.05)
    assert len(writing_into(nothing_left)) >= 2  # and one that computes the first step alone
    process.send_signal(number)
    assert process.wait(timeout=60) == code
    end_s = time.monotonic() + 10  # who was killed leaves that to the process that forked its workers
    while (writing_into(nothing_left) or list(nothing_left.glob("halopipe-*"))) and time.monotonic() < end_s:
        time.sleep(0.05)


LONG = {"steps": 100_000, "data": "tests.halopipe.learners:stream", "deadline_s": 30.0}


def ending(number: signal.Signals, step: int) -> Callable[[RunProgress], None]:
    """Sends this process a signal when a step is done, once."""
    sent: list[int] = []

    def progress(at: RunProgress) -> None:
        if at.step >= step and not sent:
            sent.append(at.step)
            os.kill(os.getpid(), number)

    return progress


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_launcher_that_is_asked_to_end_has_its_workers_save(
    tmp_path: Path, number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "saved"
    with pytest.raises(EndedError) as caught:
        run_plan(learners.plan(), RunOptions(**{**OPTIONS, **LONG, "checkpoint": str(folder)}), ending(number, 3))
    (saved,) = complete_steps(folder)
    assert caught.value.title.startswith(f"the job ended after {saved} steps: ")
    assert caught.value.details == (f"saved as {folder}/step-{saved}",)
    assert saved >= 3
    Checkpoint.open(folder).verify()
    assert list(folder.iterdir()) == [folder / f"step-{saved}"]  # no lock
    assert f"{number.name}: the job saves before its next step, and ends" in capfd.readouterr().err


def test_ranks_that_torchrun_started_end_together_when_one_is_asked(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    folder, plan = tmp_path / "saved", learners.plan()

    def rank(number: int) -> tuple[str, tuple[str, ...]]:
        options = RunOptions(**{**OPTIONS, **LONG, "checkpoint": str(folder), "checkpoint_every": "1ms"})
        try:
            run_plan(plan, options, ending(signal.SIGTERM, 3) if number == 0 else None)
        except EndedError as error:
            return error.title.partition(": ")[0], error.details
        return "", ()

    ended = forked(2, rank, [{**job, "RANK": str(each), "LOCAL_RANK": str(each)} for each in range(2)])
    last = complete_steps(folder)[-1]
    assert ended == [(f"the job ended after {last} steps", (f"saved as {folder}/step-{last}",))] * 2
    assert not (folder / ".halopipe.lock").exists()


def test_a_job_that_does_not_end_within_the_grace_time_is_ended(tmp_path: Path) -> None:
    options = {**OPTIONS, "checkpoint": str(tmp_path / "saved"), "grace_s": 0.3}
    begun_s = time.monotonic()
    with pytest.raises(SystemExit) as caught:
        run_plan(mined(0, "sleep"), RunOptions(**options), ending(signal.SIGTERM, POISONED_STEP))
    assert caught.value.code == 128 + signal.SIGTERM
    assert time.monotonic() - begun_s < 60
    assert complete_steps(tmp_path / "saved") == ()


def test_a_folder_that_another_job_writes_to_is_refused_before_any_process_starts(tmp_path: Path) -> None:
    with held(tmp_path / "saved"), pytest.raises(UsageError, match="another job writes its checkpoints into"):
        run(mined(), checkpoint=str(tmp_path / "saved"))


def test_what_a_rank_has_to_say_is_told_while_the_job_runs(tmp_path: Path) -> None:
    store, seen = dist.HashStore(), list[str]()
    result = RankResult(0, (0.5,), (1.0,), {}, 0, ())

    class Speaking:
        """A worker that says something, and ends once it was heard."""

        numbers: ClassVar[dict[int, int]] = {}

        def start(self) -> None:
            heartbeat = Heartbeat(store, 0, Activity(remarks=("the disk is full",)))
            heartbeat.publish()
            heartbeat.publish()
            leave_result(store, 0, result.to_json())

        def ended(self) -> dict[int, EndedWorker]:
            return {0: EndedWorker(0)} if seen else {}

        def end(self) -> None:
            pass

    job = Job(learners.plan([]), RunOptions(), tmp_path)
    assert spawn._watched(job, Speaking(), store, lambda at: seen.append(at.word)) == [result]
    assert seen == ["the disk is full"]
