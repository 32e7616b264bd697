"""When a run saves, what scripts and runs save and load, and where a run goes on; the ranks are threads."""

from __future__ import annotations

import functools
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from halopipe.run_spec.options import RunOptions
from halopipe.training import save_times
from halopipe.training.resuming import ResumePoint, resume_point, resume_point_by_rank_0, said_by_rank_0
from halopipe.training.save_times import FIRST_S, HOST_MTBF_S, EndRequest, SaveTimes, best_interval_s
from halopipe.training.session import Execution
from planner.ir.errors import CorruptFileError, NewerFileError, StaleFileError, UnknownNameError, UsageError
from planner.ir.plan import Plan
from runtime.checkpoint import complete_steps
from runtime.checkpoint.lock import LOCK, held
from tests.forks import forked
from tests.halopipe import learners
from tests.halopipe.plans import mined, plan_of
from tests.halopipe.ranks import run_job
from tests.halopipe.training.sessions import CALM_PLANS, adamw, batch, lone, loss_of, one_device, steps, together
from tests.runtime.checkpoint.cases import forge


def saves(folder: Path, *counts: int) -> Callable[[Execution], list[float]]:
    """Saves before the first step and behind so many more, each time."""

    def run(execution: Execution) -> list[float]:
        losses: list[float] = []
        for count in counts:
            losses += steps(len(losses), len(losses) + count)(execution)
            execution.save(folder)
        return losses

    return run


def rest(folder: Path, first: int, last: int, **options: object) -> Callable[[Execution], list[float]]:
    """Goes on after ``first`` steps."""

    def run(execution: Execution) -> list[float]:
        assert execution.load(folder, **options) == execution.num_steps == first
        return steps(first, last)(execution)

    return run


def test_what_is_saved_is_loaded_under_another_plan(tmp_path: Path) -> None:
    whole = loss_of(together(lone(), steps(0, 5), clip_norm=0.7))
    together(learners.replicas(), saves(tmp_path, 3), clip_norm=0.7)
    found = loss_of(together(learners.plan(), rest(tmp_path, 3, 5), clip_norm=0.7))
    assert found == pytest.approx(whole[3:], rel=1e-10)
    with pytest.raises(UsageError, match="was drawn from another seed") as caught:
        together(lone(), rest(tmp_path, 3, 5), seed=3)
    assert caught.value.remedies == ("execute(..., seed=0)",)
    with pytest.raises(StaleFileError, match="belongs to another model"):
        together(learners.plan_of_taggers(), rest(tmp_path, 3, 5))


def test_a_checkpoint_brings_the_users_schedule_back(tmp_path: Path) -> None:
    expected, _ = one_device(adamw, 4)
    plan = CALM_PLANS["two stages"]()
    together(plan, saves(tmp_path, 2), make=adamw)
    assert loss_of(together(plan, rest(tmp_path, 2, 4), make=adamw)) == pytest.approx(expected[2:], rel=1e-10)


def test_a_script_goes_on_from_the_newest_sound_checkpoint_if_there_is_any(tmp_path: Path) -> None:
    def begun(execution: Execution) -> list[float]:
        assert execution.load(tmp_path, step="auto") == execution.num_steps == 0
        return saves(tmp_path, 2, 2)(execution)

    losses = loss_of(together(learners.plan(), begun))
    (tmp_path / "step-4" / "rank-1" / "tensors.safetensors").unlink()
    assert loss_of(together(learners.plan(), rest(tmp_path, 2, 4, step="auto"))) == losses[2:]
    (tmp_path / "step-2" / "manifest.sha256").write_text("0" * 64)
    with pytest.raises(CorruptFileError, match="sound"):
        together(learners.plan(), rest(tmp_path, 2, 4, step="auto"))
    with pytest.raises(UnknownNameError, match="no checkpoint 'newest'"):
        together(lone(), lambda execution: execution.load(tmp_path, step="newest"))


def test_a_script_saves_into_no_folder_that_another_job_writes_to_and_goes_on(tmp_path: Path) -> None:
    def refused(execution: Execution) -> list[float]:
        losses = steps(0, 2)(execution)
        with pytest.raises(UsageError) as caught:
            execution.save(tmp_path / "theirs")
        who = "another job writes its checkpoints into" if execution.rank == 0 else "rank 0 cannot write into"
        assert caught.value.title == f"{who} {tmp_path / 'theirs'}"
        execution.save(tmp_path / "own")
        assert (tmp_path / "own" / LOCK).exists()
        return losses + steps(2, 3)(execution)

    with held(tmp_path / "theirs"):
        losses = loss_of(together(learners.plan(), refused))
    assert losses == loss_of(together(learners.plan(), steps(0, 3)))
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["step-2"], "the lock is gone with the run"


def test_who_goes_on_by_other_micro_batches_hears_what_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def loads(folder: Path) -> Callable[[Execution], object]:
        return lambda execution: execution.load(folder)

    def said() -> list[str]:
        return [text for name, _, text in caplog.record_tuples if name.startswith("halopipe")]

    thirds = learners.plan(micro_batches=(2, 2, 2))
    together(learners.plan(), saves(tmp_path / "draws", 0))
    together(learners.plan([]), loads(tmp_path / "draws"))
    assert said() == [], "stages and ranks change nothing"
    together(thirds, loads(tmp_path / "draws"))
    (word,) = said()
    was = f"{tmp_path}/draws/step-0 was saved by 2 micro-batches of 3, this plan has 3 micro-batches of 2: "
    assert word.startswith(f"{was}random draws or statistics of layer 2 go by micro-batch")
    assert word.endswith("to keep them: halopipe plan --micro-batch 3")
    run_job(thirds, tmp_path, steps=1, resume=True, checkpoint=str(tmp_path / "draws"))
    assert said() == [word] * 2, "before the first step of a run, too"
    together(learners.plan_of_taggers(), saves(tmp_path / "none", 0))
    other = learners.plan_of_taggers()
    micro_batches = replace(plan_of(other.inputs.model, [0.5], (4,)), inputs=other.inputs)
    together(micro_batches, loads(tmp_path / "none"))
    assert said() == [word] * 2, "this network draws nothing"


def test_a_checkpoint_is_never_overwritten_and_none_is_between_updates(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is a checkpoint of step 0"):
        together(lone(), saves(tmp_path, 0, 0))
    for deed in (lambda execution: execution.save(tmp_path / "other"), lambda execution: execution.load(tmp_path)):
        with pytest.raises(UsageError, match="gradients wait for the update"):
            together(lone(), lambda execution, deed=deed: (execution.step(batch(6, 0)), deed(execution)), accumulate=2)


@functools.cache
def whole_plan() -> Plan:
    return mined()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a run of six steps: 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("saved")
    run_job(whole_plan(), folder, checkpoint=str(folder), checkpoint_every=2)
    assert complete_steps(folder) == (2, 4, 6)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of them."""
    return Path(shutil.copytree(saved, tmp_path / "saved"))


def begin(folder: Path, plan: Plan | None = None, **options: object) -> ResumePoint:
    plan = plan or whole_plan()
    return resume_point(plan, RunOptions(**{"steps": 8, "checkpoint": str(folder), "resume": "auto", **options}))


def damage(path: Path) -> None:
    """Flip a bit in the middle of the data of rank 1."""
    data = path / "rank-1" / "tensors.safetensors"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)


def test_a_run_that_goes_on_from_what_there_is_begins_anew_where_there_is_nothing(folder: Path, tmp_path: Path) -> None:
    start = begin(tmp_path / "none")
    assert (start.options.resume, start.step, start.skipped, start.is_end) == (False, 0, (), False)
    for resume in (False, True):  # what was asked for in so many words is left as it is
        assert begin(folder, resume=resume).options.resume is resume


def test_damaged_checkpoints_are_passed_over_with_a_word_each(folder: Path) -> None:
    start = begin(folder)
    assert (start.options.resume, start.options.resume_step, start.step, start.skipped) == (True, 6, 6, ())
    damage(folder / "step-6")
    shutil.rmtree(folder / "step-4" / "rank-0")
    start = begin(folder)
    assert (start.options.resume_step, start.step) == (2, 2)
    newest, older = start.skipped
    assert newest.startswith(f"checkpoint {folder}/step-6 is damaged and passed over: rank-1/tensors.safetensors")
    assert older.startswith(f"checkpoint {folder}/step-4 is damaged and passed over: rank-0")
    damage(folder / "step-2")
    with pytest.raises(CorruptFileError) as caught:
        begin(folder)
    assert caught.value.title == f"no checkpoint in {folder} is sound"
    assert len(caught.value.details) == 3


def test_a_checkpoint_of_a_newer_release_is_not_passed_over(folder: Path) -> None:
    forge(folder / "step-6", lambda text: text.replace('"version": 3', '"version": 99'))
    with pytest.raises(NewerFileError):
        begin(folder)


def test_a_run_all_of_whose_steps_are_done_is_at_its_end_if_they_were_those_of_its_model(folder: Path) -> None:
    start = begin(folder, steps=6)
    assert (start.is_end, start.end) == (True, f"all 6 steps are done: {folder}/step-6")
    assert begin(folder, steps=5).is_end
    assert begin(folder).lines == (f"going on from {folder}/step-6",)
    assert start.lines == ()
    other = replace(whole_plan(), inputs=replace(whole_plan().inputs, model_fingerprint="sha256:other"))
    with pytest.raises(StaleFileError, match="belongs to another model"):
        begin(folder, other, steps=6)


def test_it_goes_on_as_if_it_had_not_stopped_also_after_a_damaged_one(folder: Path, tmp_path: Path) -> None:
    damage(folder / "step-6")
    whole = run_job(whole_plan(), tmp_path, steps=8).losses
    options = begin(folder).options
    asked = {name: getattr(options, name) for name in ("steps", "checkpoint", "resume", "resume_step")}
    found = run_job(whole_plan(), tmp_path, **asked)
    assert (found.first_step, found.losses) == (4, whole[4:])


def test_rank_0_looks_for_all_and_what_it_raises_all_raise(folder: Path) -> None:
    options = RunOptions(8, checkpoint=str(folder), resume="auto")
    store = dist.HashStore()
    found = dict[int, ResumePoint]()

    def look(rank: int) -> None:
        found[rank] = resume_point_by_rank_0(whole_plan(), options, store, rank)

    other = threading.Thread(target=look, args=(1,))
    other.start()
    damage(folder / "step-6")
    look(0)
    other.join()
    assert found[0] == found[1]
    assert (found[1].step, len(found[1].skipped)) == (4, 1)
    for step in (2, 4):
        damage(folder / f"step-{step}")
    store = dist.HashStore()
    for rank in range(2):
        with pytest.raises(CorruptFileError, match="is sound"):
            resume_point_by_rank_0(whole_plan(), options, store, rank)
    assert said_by_rank_0(dist.HashStore(), "key", 0, lambda: "word") == "word"


def expected_s(train_s: float, save_s: float, mtbf_s: float) -> float:
    """Time per second of work, restarts aside (Daly 2006, equation 20): failures come as a Poisson process."""
    return mtbf_s * math.expm1((train_s + save_s) / mtbf_s) / train_s


@pytest.mark.parametrize("mtbf_s", [600.0, 3600.0, 1e6])
@pytest.mark.parametrize("share", [1e-5, 1e-3, 1e-2, 0.1, 0.5])
def test_the_interval_is_the_best_there_is(mtbf_s: float, share: float) -> None:
    save_s = share * mtbf_s
    found = best_interval_s(save_s, mtbf_s)
    best = min(expected_s(mtbf_s * math.exp(number / 400), save_s, mtbf_s) for number in range(-4000, 800))
    assert expected_s(found, save_s, mtbf_s) <= best * (1 + 1e-3)
    young = math.sqrt(2 * save_s * mtbf_s)
    assert found == pytest.approx(young, rel=3 * math.sqrt(share))
    assert share < 0.1 or expected_s(found, save_s, mtbf_s) < expected_s(young, save_s, mtbf_s)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def run(
    times: SaveTimes, clock: Clock, until_s: float, step_s: float, save_s: float, slower_s: float = 0.0
) -> list[float]:
    """When a job saves whose saves cost ``save_s`` of standing still and ``slower_s`` in the step behind them."""
    saved: list[float] = []
    is_writing = False
    while clock.now_s < until_s:
        is_due = times.is_due
        took_s = step_s + (slower_s if is_writing else 0.0)
        clock.now_s += took_s
        times.stepped(took_s, beside_writing=is_writing)
        is_writing = is_due
        if is_due:
            saved.append(clock.now_s)
            with times.saving():
                clock.now_s += save_s
    return saved


def test_a_time_is_kept_to_half_a_step() -> None:
    clock = Clock()
    saved = run(SaveTimes("5min", clock=clock), clock, 3600.0, step_s=7.0, save_s=1.0)
    gaps = [later - before - 1.0 for before, later in zip([-1.0, *saved], saved, strict=False)]
    assert len(saved) == 11
    assert all(abs(gap - 300.0) <= 3.5 for gap in gaps)


def test_auto_saves_early_once_and_then_at_the_best_interval() -> None:
    clock = Clock()
    times = SaveTimes("auto", mtbf_s=6 * 3600.0, is_given=True, clock=clock)
    saved = run(times, clock, 6 * 3600.0, step_s=1.0, save_s=2.0, slower_s=0.5)
    assert saved[0] == pytest.approx(FIRST_S, abs=1.0)
    best = best_interval_s(2.5, 6 * 3600.0)
    assert times.interval_s == pytest.approx(best, rel=1e-6)
    assert saved[2] - saved[1] - 2.0 == pytest.approx(best, abs=2.0)
    saves = times.saves
    assert (saves.number, saves.stood_s) == (len(saved), pytest.approx(2.0 * len(saved)))
    assert saves.slower_s == pytest.approx(0.5 * len(saved), rel=0.05)
    assert best_interval_s(20.0, 10.0) == 10.0, "machines that fail faster than they save save once a failure"
    clock = Clock()
    times = SaveTimes("auto", mtbf_s=60.0, is_given=True, clock=clock)
    run(times, clock, 20_000.0, step_s=0.5, save_s=1.0)
    assert times.interval_s == pytest.approx(100.0, rel=0.01), "it costs 1 % at most"


def test_a_save_that_takes_long_to_write_is_not_overtaken() -> None:
    clock = Clock()
    times = SaveTimes("auto", mtbf_s=1e5, is_given=True, clock=clock)
    with times.saving():
        clock.now_s += 0.001
    for _ in range(500):
        clock.now_s += 1.0
        times.stepped(1.0, beside_writing=True)
    assert times.interval_s == pytest.approx(500.0)


def test_what_a_job_has_seen_of_failures_counts_unless_somebody_knows_better() -> None:
    intervals = []
    for failures, ran_s, given in ((0, 0.0, 0.0), (0, HOST_MTBF_S, 0.0), (9, 86400.0, 0.0), (9, 86400.0, HOST_MTBF_S)):
        clock = Clock()
        times = SaveTimes.of(RunOptions(checkpoint_every="auto", mtbf_s=given), 1, failures, ran_s)
        times.clock = clock
        times._start_s = times._last_s = 0.0
        run(times, clock, 100.0, step_s=1.0, save_s=0.01)
        intervals.append(times.interval_s)
    fresh, sound, failing, told = intervals
    assert sound / fresh == pytest.approx(math.sqrt(2), rel=0.01)
    assert failing / fresh == pytest.approx(math.sqrt(0.1), rel=0.01)
    assert told == pytest.approx(fresh, rel=1e-3)
    assert SaveTimes.of(RunOptions(checkpoint_every="auto"), 4, 0, 0.0).mtbf_s == HOST_MTBF_S / 4


def test_steps_are_counted_without_a_clock() -> None:
    clock = Clock()
    times = SaveTimes(3, clock=clock)
    clock.now_s = 1e9
    assert not times.is_due
    assert [step for step in range(1, 10) if times.is_due_after(step)] == [3, 6, 9]
    assert not any(map(SaveTimes(0, clock=clock).is_due_after, range(10)))


def waited(is_so: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + 10.0
    while not is_so() and time.monotonic() < end_s:
        time.sleep(0.001)
    return is_so()


def test_the_first_signal_is_noted_and_a_second_ctrl_c_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_times, "_TWICE_S", 60.0)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    end = EndRequest(30.0)
    with end.heard():
        assert end.why == ""
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)  # Slurm and torchrun both send it
        assert waited(lambda: end.why == "SIGTERM")
        assert (end.signal, end.exit_code, end.is_late()) == (signal.SIGTERM, 143, False)
        os.kill(os.getpid(), signal.SIGINT)  # sent with it
        assert waited(lambda: end.why == "SIGTERM")
        monkeypatch.setattr(save_times, "_TWICE_S", 0.0)  # some time later
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_other_threads_hear_no_signals_and_can_be_asked_all_the_same() -> None:
    end = EndRequest(0.0)

    def other() -> None:
        with end.heard(ends=True):
            end.ask("a device came back")

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert (end.why, end.signal) == ("a device came back", 0)
    assert waited(end.is_late)
    assert not end.is_late(60.0)


def test_a_process_whose_step_does_not_end_ends_by_itself_after_the_grace_time(tmp_path: Path) -> None:
    def stuck(rank: int) -> None:
        save_times._LATER_S = 0.05
        save_times._LOOK_S = 0.01
        sys.stderr = (tmp_path / "stderr").open("w")
        with EndRequest(0.1).heard(ends=True):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60.0)

    assert forked(1, stuck) == [None]  # ended by itself
    text = (tmp_path / "stderr").read_text()
    assert "SIGTERM came 0.1 s ago, and the step has not ended: the job ends without saving it" in text
