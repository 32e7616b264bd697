"""What ranks say of themselves while they work, and how one failed."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch.distributed as dist

from planner.ir.errors import (
    DeadlineError,
    HalopipeError,
    NumericsError,
    StageFailedError,
    TransportError,
    WorkerDiedError,
    WorkerError,
)
from runtime.monitor.activity import (
    Activity,
    Beat,
    BoardSilentError,
    Heartbeat,
    StatusStore,
    fresh_board,
    read_board,
)
from runtime.monitor.failure import cause, died, leave_result, left_by, read_error, write_error
from runtime.monitor.watch import LOOPBACK, host_store, join_store


def beat(rank: int, what: str, step: int = 4) -> Beat:
    return Beat(rank, 1, what, step, 0.25, 2.0, 0, None, 0.0)


def test_a_heartbeat_publishes_at_start_at_times_and_at_the_end() -> None:
    store = dist.HashStore()
    activity = Activity()
    heartbeat = Heartbeat(store, 1, activity, interval_s=0.01)
    activity.begin("thinking")
    with heartbeat:
        first = read_board(store, range(3))
        assert list(first) == [1]
        assert first[1].what == "thinking"
        later = fresh_board(store, 3, patience_s=10.0)
        assert later[1].number > first[1].number
        activity.step = 2
        activity.loss = 0.5
        activity.num_done = 2
        activity.begin("1F0")
    last = read_board(store, range(3))[1]
    assert (last.what, last.step, last.loss, last.num_done) == ("1F0", 2, 0.5, 2)
    assert 0.0 <= last.for_s < 60.0


def test_a_rank_that_is_silent_is_not_waited_for_long() -> None:
    store = dist.HashStore()
    Heartbeat(store, 0, Activity()).publish()
    found = fresh_board(store, 2, patience_s=0.05)
    assert list(found) == [0]
    assert found[0].silent_s >= 0.05


def test_silence_is_told_and_counts_to_what_lasts() -> None:
    aged = beat(1, "1F0").aged(3.0)
    assert aged.is_silent
    assert str(aged) == "rank 1 in 1F0 (step 4, 3.2 s, silent for 3.0 s or more)"
    assert not beat(1, "1F0").aged(0.5).is_silent


def test_a_board_behind_a_link_that_is_cut_is_waited_for_once_and_is_there_again_when_the_link_is() -> None:
    link = threading.Event()
    store = dist.HashStore()
    store.set("a", "b")
    board = StatusStore(store, patience_s=0.05)
    with Heartbeat(board, 0, Activity(), interval_s=0.01):
        with pytest.raises(BoardSilentError, match="does not answer"):
            board.ask(lambda own: link.wait())
        asked: list[object] = []
        assert (board.is_silent, board.answer(asked.append, "nothing")) == (True, "nothing")
        assert asked == [], "nobody waits again"
        link.set()
        while board.is_silent:
            time.sleep(0.001)
        assert board.get("a") == b"b"
        before = read_board(board, [0])[0].number
        assert fresh_board(board, 1, patience_s=10.0)[0].number > before, "the heart beats on"


def test_of_a_store_that_is_gone_nothing_is_learnt_at_once() -> None:
    with pytest.raises(RuntimeError, match="connection reset"):
        StatusStore(Gone()).get("a")
    assert StatusStore(Gone()).answer(lambda own: own.get("a"), 0) == 0


class Gone:
    def set(self, *arguments: object) -> None:
        raise RuntimeError("connection reset")

    check = get = set


def test_a_board_that_is_gone_is_no_error() -> None:
    with Heartbeat(Gone(), 0, Activity(), interval_s=0.01):
        end_s = time.monotonic() + 10
        while any(thread.name == "heartbeat" for thread in threading.enumerate()) and time.monotonic() < end_s:
            time.sleep(0.01)
        assert not any(thread.name == "heartbeat" for thread in threading.enumerate())
    assert read_board(Gone(), range(2)) == {}


@pytest.mark.parametrize("cls", [StageFailedError, NumericsError, HalopipeError])
def test_an_error_comes_through_text_whole(cls: type[HalopipeError]) -> None:
    found = read_error(write_error(cls("what", ["where", "two\nlines"], ["this"])))
    assert type(found) is cls
    assert (found.title, found.details, found.remedies) == ("what", ("where", "two\nlines"), ("this",))


@pytest.mark.parametrize("kind", ["ErrorOfALaterRelease", "annotations", "ClassVar"])
def test_a_kind_of_error_that_is_not_known_is_a_worker_error(kind: str) -> None:
    found = read_error(json.dumps({"type": kind, "title": "what", "details": [], "remedies": []}))
    assert (type(found), found.title) == (WorkerError, "what")


def test_a_foreign_error_keeps_its_text_and_place() -> None:
    try:
        [][1]
    except IndexError as error:
        found = read_error(write_error(error))
    assert type(found) is WorkerError
    assert "IndexError: list index out of range" in found.title
    assert "test_activity.py" in "".join(found.details)


def test_a_death_tells_signal_last_words_and_stderr() -> None:
    error = died("rank 1 (n0/cpu1, stage 1)", -9, "rank 1 in 1F0", "a\n\nb\n" + "line\n" * 20)
    assert error.title == "rank 1 (n0/cpu1, stage 1) ended by signal SIGKILL without a word"
    assert error.details[0] == "last heard of: rank 1 in 1F0"
    assert error.details[1:] == ("stderr: line",) * 12
    assert "dmesg" in error.remedies[0]
    assert died("rank 0", 3, "", "").details == ("last heard of: nothing",)
    assert "with exit code 3" in died("rank 0", 3, "", "").title


def test_who_waits_in_vain_is_not_the_cause() -> None:
    failed = StageFailedError("f")
    dead = WorkerDiedError("w")
    late = DeadlineError("d")
    lost = TransportError("t")
    assert cause({0: lost, 1: late, 2: dead, 3: failed}) is failed
    assert cause({0: lost, 1: late, 2: dead}) is dead
    assert cause({0: lost, 1: late}) is late
    assert cause({0: lost}) is lost


@pytest.mark.parametrize("length", [1, 9 << 20])
def test_a_result_of_any_length_is_left(length: int) -> None:
    """One value of the store takes 8 MiB: those of hundreds of thousands of steps are longer."""
    store = host_store()
    port = store.port
    assert left_by(store, 0) == ""
    leave_result(join_store(LOOPBACK, port), 0, "1" * length)
    store.wait(["result/0"])  # what another connection sets is there some time after its call has returned
    assert left_by(store, 0) == "1" * length
