"""Waits on a device's streams, with stand-ins for what a backend as NCCL's gives, and of two transports in one."""

from __future__ import annotations

import pytest

from planner.ir.errors import DeadlineError, TransportError
from runtime.transport.base import Deadline
from runtime.transport.hosts import MixedTransport
from runtime.transport.works import StreamWorks, Works


class Work:
    """Done after it was asked ``polls`` times; then its wait raises ``error``."""

    def __init__(self, polls: int, error: str = "") -> None:
        self.polls, self.error, self.num_waits = polls, error, 0

    def is_completed(self) -> bool:
        self.polls -= 1
        return self.polls < 0

    def wait(self) -> None:
        self.num_waits += 1
        if self.error and self.polls < 0:
            raise RuntimeError(self.error)


def test_a_wait_of_a_stream_asks_nothing_and_settling_asks_until_all_is_done():
    works, some = StreamWorks(0), [Work(0), Work(3), Work(1)]
    for number, work in enumerate(some):
        works.wait(work, ("receive", number), ("rank", 1), Deadline(5.0))
    assert [(work.polls, work.num_waits) for work in some] == [(0, 1), (3, 1), (1, 1)]
    works.settle(Deadline(5.0))
    assert [work.polls for work in some] == [-1, -1, -1]
    works.settle(Deadline(0.0))  # nothing is left


def test_what_is_not_done_in_time_is_named_with_its_peer():
    works = StreamWorks(0)
    for number, work in enumerate((Work(0), Work(10**9), Work(10**9))):
        works.wait(work, ("receive", number), ("rank", 7), Deadline(0.05))
    with pytest.raises(DeadlineError, match=r"receive 1: rank 0 waited \d+\.\d+ s for rank 7, deadline 0\.05 s"):
        works.settle(Deadline(0.05))


def test_what_failed_on_the_device_is_an_error_that_names_the_peer():
    works = StreamWorks(2)
    works.wait(Work(1, "remote process exited"), ("receive", "x"), ("rank", 7), Deadline(5.0))
    with pytest.raises(TransportError, match="receive x: rank 2 lost rank 7") as caught:
        works.settle(Deadline(5.0))
    assert "remote process exited" in str(caught.value)


@pytest.mark.parametrize("works", [Works(3), StreamWorks(3)])
def test_what_cannot_be_started_has_lost_its_peer(works):
    def begin():
        raise RuntimeError("connection reset")

    with pytest.raises(TransportError, match="send y: rank 3 lost rank 4"):
        works.start(begin, ("send", "y"), ("rank", 4))


class Half:
    """One of the two transports of ranks of several hosts."""

    name, groups, rank, world_size, deadline_s = "", (), 0, 3, 5.0

    def flush(self, deadline: Deadline) -> None:
        self.deadline = deadline


def test_a_flush_within_hosts_and_between_them_waits_no_longer_than_one():
    shared, gloo = Half(), Half()
    MixedTransport(shared, gloo, frozenset([(0, 1)])).flush()
    assert gloo.deadline is shared.deadline
    assert shared.deadline.limit_s == 5.0
