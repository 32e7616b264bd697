"""When a run saves: the best interval beside one found by search, clocks without waiting, and signals."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from halopipe.run_spec.options import RunOptions
from halopipe.training import save_times
from halopipe.training.save_times import FIRST_S, HOST_MTBF_S, EndRequest, SaveTimes, best_interval_s
from tests.forks import forked


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
        is_due, took_s = times.is_due, step_s + (slower_s if is_writing else 0.0)
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
        save_times._LATER_S, save_times._LOOK_S = 0.05, 0.01
        sys.stderr = (tmp_path / "stderr").open("w")
        with EndRequest(0.1).heard(ends=True):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60.0)

    assert forked(1, stuck) == [None]  # ended by itself
    text = (tmp_path / "stderr").read_text()
    assert "SIGTERM came 0.1 s ago, and the step has not ended: the job ends without saving it" in text
