"""Tensors to and from several ranks at once; ``run`` executes a program on each rank, over each transport."""

from __future__ import annotations

import pytest
import torch

from planner.ir.errors import DeadlineError, HalopipeError, TransportError
from runtime.transport.small_allgather import RowGather

pytestmark = pytest.mark.parametrize("run", ["inprocess", "gloo", "shared", "mixed", "channels", "mpi"], indirect=True)

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
        transport.start_exchange(sent, received).wait()
        return all(torch.equal(received[rank], of(rank, transport.rank, 0, size)) for rank in others)

    assert run(4, program) == [True] * 4


def test_one_way_and_nothing(run):
    def program(transport):
        sent = {1: of(0, 1, 0)} if transport.rank == 0 else {}
        received = {0: torch.empty(5, dtype=torch.float64)} if transport.rank == 1 else {}
        transport.start_exchange(sent, received).wait()
        return [tensor.tolist() for tensor in received.values()]

    assert run(3, program) == [[], [of(0, 1, 0).tolist()], []]


@pytest.mark.parametrize("view", [torch.conj, torch.Tensor._neg_view], ids=["conjugated", "negative"])
def test_values_are_sent_and_not_bytes_that_mean_others(run, view):
    """Views of torch that change values when they are read arrive as read, and are written so."""

    def program(transport):
        peer = 1 - transport.rank
        numbers = torch.complex(of(transport.rank, peer, 0), of(transport.rank, peer, 1))
        came = view(torch.zeros(5, dtype=torch.complex128))
        transport.start_exchange({peer: view(numbers)}, {peer: came}).wait()
        return torch.equal(came, view(torch.complex(of(peer, transport.rank, 0), of(peer, transport.rank, 1))))

    assert run(2, program) == [True, True]


@pytest.mark.parametrize("key", [None, 4])
@pytest.mark.parametrize("rows", [7, 70_000])
def test_what_is_cut_out_of_a_tensor_is_sent_as_it_lies(run, key, rows):
    """A column of a matrix, a halo's shape; small ones may be written to when the wait has returned."""

    def program(transport):
        peer, right = 1 - transport.rank, []
        for step in range(3):
            whole = torch.stack([of(transport.rank, peer, 10 * step + column, rows) for column in range(4)], 1)
            came = torch.empty(rows, 2, dtype=torch.float64)
            transport.start_exchange({peer: whole[:, 1:3]}, {peer: came}, key).wait()
            whole.zero_()
            wanted = torch.stack([of(peer, transport.rank, 10 * step + column, rows) for column in (1, 2)], 1)
            right.append(torch.equal(came, wanted))
        return right

    assert run(2, program) == [[True] * 3] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_halos_of_all_dims_are_packed_where_they_are_sent_from(run, dtype):
    """Slabs of one dim lie in equal stretches; corners, and what is turned, do not."""

    def program(transport):
        peer, wrong = 1 - transport.rank, []
        numbers = torch.arange(2 * 3 * 5 * 7).view(2, 3, 5, 7).to(dtype)
        mine, theirs = numbers + 10 * transport.rank, numbers + 10 * peer
        cuts = [lambda x, dim=dim: x.narrow(dim, 1, 1) for dim in range(4)]
        cuts += [lambda x, dim=dim: x.narrow(dim, 0, 2) for dim in range(1, 4)]
        cuts += [lambda x: x[:, 1:, 1:3, 2:4], lambda x: x.transpose(1, 3), lambda x: x[:, :, ::2, :1], lambda x: x[:0]]
        cuts += [lambda x: x[:1, :1, :1, :1].expand(2, 3, 5, 7), lambda x: x.to(memory_format=torch.channels_last)]
        for number, cut in enumerate(cuts):
            came = torch.empty(cut(mine).shape, dtype=dtype)
            transport.start_exchange({peer: cut(mine)}, {peer: came}, 2 * number).wait()
            if not torch.equal(came, cut(theirs)):
                wrong.append(number)
        return wrong

    assert run(2, program) == [[], []]


def test_exchanges_of_a_pair_are_matched_in_the_order_they_were_started(run):
    def program(transport):
        peer = 1 - transport.rank
        received = [torch.empty(5, dtype=torch.float64) for _ in range(4)]
        pending = [
            transport.start_exchange({peer: of(transport.rank, peer, number)}, {peer: received[number]})
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
            summed = transport.start_sum(term, (0, 1))
            exchanged = transport.start_exchange({peer: sent}, {peer: came})
        else:
            exchanged = transport.start_exchange({peer: sent}, {peer: came})
            summed = transport.start_sum(term, (0, 1))
        summed.wait()
        exchanged.wait()
        return term.unique().tolist(), came.unique().tolist()

    assert run(2, program) == [([3.0], [11.0]), ([3.0], [10.0])]


def test_what_never_comes_is_an_error(run):
    def program(transport):
        if transport.rank == 0:
            try:
                transport.deadline_s = 0.2
                transport.start_exchange({}, {1: torch.empty(3)}).wait()
            except (DeadlineError, TransportError) as error:
                return str(error)
            return "nothing"
        try:
            transport.barrier()
        except HalopipeError:
            return "rank 0 has left"
        return ""

    text = run(2, program)[0]
    assert "exchange" in text
    assert "rank 1" in text


@pytest.mark.parametrize("size", [3, 400_000])
def test_keyed_exchanges_come_again_and_again_and_never_meet_others(run, size):
    def program(transport):
        peer = 1 - transport.rank
        wrong = 0
        for step in range(6):
            pending, received = [], []
            for key in (4, 5, None):
                came = torch.empty(size, dtype=torch.float64)
                sent = {peer: of(transport.rank, peer, 10 * step + (key or 0), size)}
                received.append((came, of(peer, transport.rank, 10 * step + (key or 0), size)))
                pending.append(transport.start_exchange(sent, {peer: came}, key))
            for one in pending if step % 2 else pending[::-1]:
                one.wait()
            wrong += sum(not torch.equal(came, expected) for came, expected in received)
        transport.flush()
        return wrong

    assert run(2, program) == [0, 0]


def test_exchanges_of_one_key_may_be_under_way_together_step_after_step(run):
    def program(transport):
        peer, values = 1 - transport.rank, []
        for step in range(4):
            received = [torch.zeros(3) for _ in range(2)]
            numbers = (10.0 * step, 10.0 * step + 1)
            pending = [
                transport.start_exchange({peer: torch.full((3,), number)}, {peer: came}, 2)
                for number, came in zip(numbers, received, strict=True)
            ]
            for one in pending if step % 2 else pending[::-1]:
                one.wait()
            values += [came.unique().item() for came in received]
        transport.flush()
        return values

    expected = [10.0 * step + number for step in range(4) for number in range(2)]
    assert run(2, program) == [expected, expected]


def test_what_was_received_is_not_overwritten_by_what_comes_next(run):
    def program(transport):
        peer, kept = 1 - transport.rank, []
        for step in range(4):
            came = torch.empty(5, dtype=torch.float64)
            transport.start_exchange({peer: of(transport.rank, peer, step)}, {peer: came}, 2).wait()
            kept.append(came)
        transport.barrier()
        return all(torch.equal(came, of(peer, transport.rank, step)) for step, came in enumerate(kept))

    assert run(2, program) == [True, True]


def test_one_way_exchanges_of_a_key(run):
    def program(transport):
        found = []
        for step in range(5):
            sent = {1: of(0, 1, step)} if transport.rank == 0 else {}
            received = {0: torch.empty(5, dtype=torch.float64)} if transport.rank == 1 else {}
            transport.start_exchange(sent, received, 8).wait()
            found += [tensor.tolist() for tensor in received.values()]
        transport.flush()
        return found

    assert run(2, program) == [[], [of(0, 1, step).tolist() for step in range(5)]]


def test_what_was_sent_may_be_written_after_the_wait(run):
    def program(transport):
        peer, sent, wrong = 1 - transport.rank, torch.empty(20_000, dtype=torch.float64), 0
        for step in range(50):
            sent.copy_(of(transport.rank, peer, step, len(sent)))
            came = torch.empty_like(sent)
            transport.start_exchange({peer: sent}, {peer: came}, 6).wait()
            sent.fill_(-1.0)
            wrong += not torch.equal(came, of(peer, transport.rank, step, len(sent)))
        transport.flush()
        return wrong

    assert run(2, program) == [0, 0]


def test_rows_of_one_key_may_be_of_several_kinds(run):
    """As a loss tells first how many places count, then its sum, in another dtype."""

    def program(transport):
        rows, found = RowGather(transport, (0, 1), key=12), []
        for step in range(3):
            for count, dtype in ((1, torch.float64), (1, torch.float32), (4, torch.float32), (1, torch.float64)):
                term = torch.full((count,), 10.0 * step + transport.rank + count, dtype=dtype)
                table = rows([term], dtype).wait()
                found.append(table.dtype == dtype and table[:, 0].tolist() == [10.0 * step + count + r for r in (0, 1)])
        transport.flush()
        return all(found)

    assert run(2, program) == [True, True]
