from __future__ import annotations

import json

import pytest

from planner.ir.errors import (
    DeadlineError,
    HalopipeError,
    NumericsError,
    StageFailedError,
    TransportError,
    WorkerDiedError,
    WorkerError,
)
from runtime.monitor.failure import also, cause, died, leave_result, left_by, read_error, write_error
from runtime.monitor.watch import LOOPBACK, host_store, join_store


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
    assert "test_failure.py" in "".join(found.details)


def test_a_death_tells_signal_last_words_and_stderr() -> None:
    error = died("rank 1 (n0/cpu1, stage 1)", -9, "rank 1 in 1F0", "a\n\nb\n" + "line\n" * 20)
    assert error.title == "rank 1 (n0/cpu1, stage 1) ended by signal SIGKILL without a word"
    assert error.details[0] == "last heard of: rank 1 in 1F0"
    assert error.details[1:] == ("stderr: line",) * 12
    assert "dmesg" in error.remedies[0]
    assert died("rank 0", 3, "", "").details == ("last heard of: nothing",)
    assert "with exit code 3" in died("rank 0", 3, "", "").title


def test_who_waits_in_vain_is_not_the_cause() -> None:
    failed, dead, late, lost = StageFailedError("f"), WorkerDiedError("w"), DeadlineError("d"), TransportError("t")
    assert cause({0: lost, 1: late, 2: dead, 3: failed}) is failed
    assert cause({0: lost, 1: late, 2: dead}) is dead
    assert cause({0: lost, 1: late}) is late
    assert cause({0: lost}) is lost


def test_more_details_leave_the_error_as_it_was() -> None:
    error = DeadlineError("d", ["a"], ["r"])
    more = also(error, ["b"])
    assert (type(more), more.details, error.details) == (DeadlineError, ("a", "b"), ("a",))


@pytest.mark.parametrize("length", [1, 9 << 20])
def test_a_result_of_any_length_is_left(length: int) -> None:
    """One value of the store takes 8 MiB: those of hundreds of thousands of steps are longer."""
    store = host_store()
    port = store.port
    assert left_by(store, 0) == ""
    leave_result(join_store(LOOPBACK, port), 0, "1" * length)
    store.wait(["result/0"])  # what another connection sets is there some time after its call has returned
    assert left_by(store, 0) == "1" * length
