"""Shared memory within a host, gloo between: what the two of them share."""

from __future__ import annotations

from runtime.transport.base import Deadline
from runtime.transport.hosts import MixedTransport


class Half:
    """One of the two, whose last message is taken after a wait that ends with ``deadline``."""

    name, groups, rank, world_size, deadline_s = "", (), 0, 3, 5.0

    def __init__(self) -> None:
        self.deadlines: list[Deadline] = []

    def flush(self, deadline: Deadline) -> None:
        self.deadlines.append(deadline)


def test_a_flush_of_both_waits_no_longer_than_one() -> None:
    shared, gloo = Half(), Half()
    MixedTransport(shared, gloo, frozenset([(0, 1)])).flush()
    (deadline,) = shared.deadlines
    assert gloo.deadlines == [deadline]
    assert gloo.deadlines[0] is deadline
    assert deadline.limit_s == 5.0
