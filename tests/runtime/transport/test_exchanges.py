"""Tensors to and from several ranks at once; ``run`` executes a program on each rank, over each transport."""

from __future__ import annotations

import pytest
import torch

from planner.ir.errors import DeadlineError, HalopipeError, TransportError

pytestmark = pytest.mark.parametrize("run", ["inprocess", "gloo", "channels"], indirect=True)

DEADLINE_S = 20.0


def of(src, dst, number, size=5):
    """What ``src`` sends ``dst`` in exchange ``number``."""
    return torch.arange(size, dtype=torch.float64) + 1000 * src + 100 * dst + 10 * number


@pytest.mark.parametrize("size", [1, 100_000])
def test_every_rank_with_every_other(run, size):
    def program(transport):
        others = [rank for rank in range(4) if rank != transport.rank]
        sent = {rank: of(transport.rank, rank, 0, size) for rank in others}
        received = {rank: torch.empty(size, dtype=torch.float64) for rank in others}
        transport.start_exchange(sent, received, DEADLINE_S).wait()
        return all(torch.equal(received[rank], of(rank, transport.rank, 0, size)) for rank in others)

    assert run(4, program) == [True] * 4


def test_one_way_and_nothing(run):
    def program(transport):
        sent = {1: of(0, 1, 0)} if transport.rank == 0 else {}
        received = {0: torch.empty(5, dtype=torch.float64)} if transport.rank == 1 else {}
        transport.start_exchange(sent, received, DEADLINE_S).wait()
        return [tensor.tolist() for tensor in received.values()]

    assert run(3, program) == [[], [of(0, 1, 0).tolist()], []]


def test_exchanges_of_a_pair_are_matched_in_the_order_they_were_started(run):
    def program(transport):
        peer = 1 - transport.rank
        received = [torch.empty(5, dtype=torch.float64) for _ in range(4)]
        pending = [
            transport.start_exchange({peer: of(transport.rank, peer, number)}, {peer: received[number]}, DEADLINE_S)
            for number in range(4)
        ]
        for one in reversed(pending):
            one.wait()
        return all(torch.equal(tensor, of(peer, transport.rank, number)) for number, tensor in enumerate(received))

    assert run(2, program) == [True, True]


def test_they_never_meet_sums_of_the_same_size(run):
    def program(transport):
        peer = 1 - transport.rank
        term, came = torch.full((4,), 1.0 + transport.rank), torch.empty(4)
        sent = torch.full((4,), 10.0 + transport.rank)
        if transport.rank:
            summed = transport.start_sum(term, (0, 1), DEADLINE_S)
            exchanged = transport.start_exchange({peer: sent}, {peer: came}, DEADLINE_S)
        else:
            exchanged = transport.start_exchange({peer: sent}, {peer: came}, DEADLINE_S)
            summed = transport.start_sum(term, (0, 1), DEADLINE_S)
        summed.wait()
        exchanged.wait()
        return term.unique().tolist(), came.unique().tolist()

    assert run(2, program) == [([3.0], [11.0]), ([3.0], [10.0])]


def test_what_never_comes_is_an_error(run):
    def program(transport):
        if transport.rank == 0:
            try:
                transport.start_exchange({}, {1: torch.empty(3)}, 0.2).wait()
            except (DeadlineError, TransportError) as error:
                return str(error)
            return "nothing"
        try:
            transport.barrier(3.0)
        except HalopipeError:
            return "rank 0 has left"
        return ""

    text = run(2, program)[0]
    assert "exchange" in text
    assert "rank 1" in text
