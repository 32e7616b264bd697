"""What only MPI's transport does: its own order of additions, tags as MPI allows them, leaving it in any state."""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planner.ir.errors import DeadlineError, TransportError
from runtime.transport import MessageKey, mpi_requests, open_mpi
from runtime.transport.mpi_requests import MpiWire, load_mpi, meet
from runtime.transport.mpi_requests import _leave as leave
from tests.forks import forked, places_in_mpi

over_mpi = pytest.mark.parametrize("run", ["mpi"], indirect=True)
DEADLINE_S = 20.0
KEY = MessageKey(4, "F", 0, 1, 3)


@over_mpi
@pytest.mark.parametrize("sent", [3, 5])
def test_a_tensor_of_another_size_than_expected_is_refused_by_its_receiver(run, sent):
    def program(transport):
        if transport.rank == 0:
            transport.start_exchange({1: torch.ones(sent)}, {})
            return transport.barrier()
        with pytest.raises(TransportError) as caught:
            transport.start_exchange({}, {0: torch.empty(4)}).wait()
        transport.barrier()
        return str(caught.value)

    text = run(2, program)[1]
    assert f"rank 0 sent {'12 bytes' if sent == 3 else 'more'}, rank 1 expected 16 bytes" in text
    assert "shape (4,) and torch.float32" in text


@over_mpi
def test_a_killed_process_is_named_when_the_deadline_is_over_where_mpiexec_does_not_end_the_others(run):
    def program(transport):
        if transport.rank == 1:
            os._exit(9)
        transport.deadline_s = 0.3
        transport.post_receive(KEY, 1, [((2,), torch.float32)])
        with pytest.raises(DeadlineError, match=r"receive step 4 F 0->1 mb 3: rank 0 waited \d+\.\d+ s for rank 1"):
            transport.receive(KEY, 1)

    run(2, program)


@over_mpi
def test_a_rank_leaves_at_once_with_messages_that_nobody_takes_and_none_that_come(run):
    def program(transport):
        large = torch.ones(4_000_000)
        transport.post_receive(KEY, 1 - transport.rank, [((2,), torch.float32)])
        transport.send(MessageKey(4, "F", 1, 0, 3), 1 - transport.rank, [large])
        start_s = time.monotonic()
        transport.close()
        del transport, large
        return time.monotonic() - start_s

    assert max(run(2, program)) < DEADLINE_S


@over_mpi
def test_ranks_are_numbered_as_they_ask_and_their_number_must_be_that_of_mpi(run):
    def program(transport):
        transport.close()
        turned = open_mpi(1 - transport.rank, timeout_s=DEADLINE_S)
        received = torch.empty(1)
        place = turned.rank, turned.world_size
        turned.start_exchange({transport.rank: torch.tensor([1.0 + turned.rank])}, {transport.rank: received}).wait()
        turned.barrier()
        turned.close()
        with pytest.raises(TransportError, match="MPI has 2 processes, the job 3"):
            open_mpi(0, 3)
        return (*place, received.item())

    assert run(2, program) == [(1, 2, 1.0), (0, 2, 2.0)]


def test_a_process_that_ends_well_waits_for_the_others_and_one_that_failed_does_not(monkeypatch):
    monkeypatch.setattr(mpi_requests, "_LEAVE_S", 0.1)
    monkeypatch.delattr(sys, "last_value", raising=False)  # of a test that failed before in this process

    def well(rank):
        loaded = load_mpi(DEADLINE_S)
        time.sleep(0.5 * rank)
        leave(loaded)
        return loaded.Is_finalized()

    def badly(rank):
        loaded = load_mpi(DEADLINE_S)
        meet(loaded.COMM_WORLD, DEADLINE_S)
        if rank == 0:
            time.sleep(0.5)  # and ends without a word
            return False
        leave(loaded, True)
        return loaded.Is_finalized()

    for work, ends in ((well, True), (badly, False)):
        with places_in_mpi(2) as places:
            assert forked(2, work, places) == [ends, ends]


class Tagged:
    """A communicator that notes under which tag something was sent."""

    rank = 0
    size = 2

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.copies = []
        self.tags = []

    def Get_attr(self, name: object) -> int:  # noqa: N802 - mpi4py's
        return self.largest

    def Dup(self) -> Tagged:  # noqa: N802 - mpi4py's
        self.copies.append(Tagged(self.largest))
        return self.copies[-1]

    def Isend(self, buffer: object, rank: int, tag: int) -> None:  # noqa: N802 - mpi4py's
        self.tags.append(tag)


def mpi(world: Tagged) -> Any:
    memory = SimpleNamespace(fromaddress=lambda address, count: address)
    return SimpleNamespace(
        COMM_WORLD=world,
        Status=object,
        TAG_UB=0,
        BYTE=0,
        buffer=memory,
        Get_library_version=lambda: "Small MPI 1.0\n2026",
    )


@pytest.mark.parametrize(("largest", "copies"), [(2**31 - 1, 2), (2**29 - 1, 8), (2**29 + 5, 8), (2**26, 64)])
def test_tags_that_mpi_does_not_allow_are_spread_over_communicators(largest, copies):
    world = Tagged(largest)
    wire = MpiWire(mpi(world), world)
    tags = (0, largest, 2**31 - 1, 2**31, 2**32 - 1)
    for tag in tags:
        wire.send([torch.zeros(1)], 1, tag)
    used = [(number, tag) for number, copy in enumerate(world.copies) for tag in copy.tags]
    assert len(world.copies) == copies
    assert len(set(used)) == len(set(tags))
    assert all(0 <= tag <= largest for _, tag in used)


def test_an_mpi_with_too_few_tags_is_named():
    with pytest.raises(TransportError, match="tags up to 1048575, expected 67108863 or more") as caught:
        MpiWire(mpi(Tagged(2**20 - 1)), Tagged(0))
    assert caught.value.details == ("Small MPI 1.0",)
