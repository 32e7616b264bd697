"""What every transport does alike: programs of each rank, all of which a job of each transport goes through."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections import defaultdict

import pytest
import torch

from planner.ir.errors import TransportError
from runtime.transport import ChannelTransport, GlooTransport, MessageKey
from runtime.transport.hosts import MixedTransport
from runtime.transport.mpi import PAIR_SUM_BYTES, SUM_BYTES
from runtime.transport.shared_memory import IN_PARTS_BYTES
from runtime.transport.small_allgather import RowGather
from tests.runtime.transport.conftest import MIXED, Program, deliver, key, specs_of

GROUPS = {2: [(0,), (1,)], 3: [(0,), (0, 2), (1, 2)], 4: [(0, 2)]}
WORLD = (0, 1, 2, 3)
PROGRAMS: dict[int, list[Program]] = defaultdict(list)
"""By the number of ranks."""
ARRIVED = multiprocessing.get_context("fork").Value("i", 0)


def ranks(world_size: int):
    def add(program: Program) -> Program:
        PROGRAMS[world_size].append(program)
        return program

    return add


@pytest.mark.cases(21)
@pytest.mark.parametrize("world_size", GROUPS)
def test_programs(run, world_size):
    """After each of which nothing is left behind; nor are threads after all."""
    before = threading.active_count()

    def work(transport):
        for program in PROGRAMS[world_size]:
            program(transport)
            transport.flush()
            transport.barrier()
            assert transport.num_buffers() == (0, 0), program.__name__
        return True

    assert run(world_size, work, GROUPS[world_size]) == [True] * world_size
    assert threading.active_count() == before


@ranks(2)
def tensors_of_any_dtype_and_shape_come_as_aligned_views_of_one_buffer(transport):
    received = deliver(transport, key(), MIXED)
    for sent, came in zip(MIXED, received, strict=True):
        assert (came.dtype, came.shape) == (sent.dtype, sent.shape)
        assert torch.equal(came, sent)
    if transport.rank == 1:
        assert len({tensor.untyped_storage().data_ptr() for tensor in received}) == 1
        assert not any(tensor.data_ptr() % 64 for tensor in received if tensor.numel())


@ranks(2)
def a_message_is_what_it_was_when_sent(transport):
    value = torch.ones(5, requires_grad=True)
    if transport.rank == 0:
        transport.send(key(), 1, [value])
        value.data.zero_()
        transport.barrier()
    else:
        transport.barrier()
        transport.post_receive(key(), 0, specs_of(value))
        (came,) = transport.receive(key(), 0)
        assert not came.requires_grad
        assert torch.equal(came, torch.ones(5))


@ranks(2)
def messages_are_matched_by_key_not_by_order(transport):
    if isinstance(transport, ChannelTransport):
        return
    names = [
        *(key(microbatch) for microbatch in range(4)),
        key(0, step=5),
        key(0, kind="B"),
        MessageKey(4, "F", 1, 0, 0),
    ]
    tensors = [torch.full((10 + 10 * number,), float(number)) for number in range(len(names))]  # later ones larger
    for announced_first in (True, False):
        if transport.rank == 0:
            transport.barrier() if announced_first else None
            for number in reversed(range(len(names))):
                transport.send(names[number], 1, [tensors[number]])
            transport.flush()
        else:
            for number in (2, 0, 1, 6, 5, 4, 3):
                transport.post_receive(names[number], 0, specs_of(tensors[number]))
            transport.barrier() if announced_first else None
            for name, tensor in zip(names, tensors, strict=True):
                assert torch.equal(transport.receive(name, 0)[0], tensor)


@ranks(2)
def messages_of_an_edge_keep_their_order_and_edges_overtake(transport):
    names = [*(key(microbatch) for microbatch in range(4)), key(0, step=5)]
    others = [MessageKey(4, "B", 0, 1, 0), MessageKey(4, "F", 1, 0, 0)]
    tensors = {name: torch.full((10 + 10 * number,), float(number)) for number, name in enumerate(names + others)}
    if transport.rank == 0:
        for name in [*others, *names]:
            transport.send(name, 1, [tensors[name]])
    else:
        for name in [*names, *reversed(others)]:
            transport.post_receive(name, 0, specs_of(tensors[name]))
        for name in [*reversed(others), *names]:
            assert torch.equal(transport.receive(name, 0)[0], tensors[name])


@ranks(2)
def large_tensors_come_beside_small_ones(transport):
    for sizes in ((1, 70_000), (70_000,), (70_000, 3, 100_000), (1_500_000,)):
        tensors = tuple(torch.arange(float(size)) + size for size in sizes)
        for microbatch in range(3):
            came = deliver(transport, key(microbatch), tensors)
            assert all(torch.equal(tensor, sent) for tensor, sent in zip(came, tensors, strict=True))
    strided = torch.arange(280_000.0).reshape(2, 140_000).t()
    (came,) = deliver(transport, key(), (strided,))
    assert torch.equal(came, strided)


@ranks(2)
def receiving_what_was_not_announced_or_announcing_twice_is_refused(transport):
    peer = 1 - transport.rank
    with pytest.raises(TransportError, match="was not announced"):
        transport.receive(key(), peer)
    transport.post_receive(key(), peer, [])
    with pytest.raises(TransportError, match="announced twice"):
        transport.post_receive(key(), peer, [])
    transport.send(key(), peer, [])
    assert transport.receive(key(), peer) == ()


@ranks(4)
def many_messages_are_in_flight_among_four_ranks(transport):
    others = [rank for rank in WORLD if rank != transport.rank]
    pairs = [(peer, microbatch) for microbatch in range(50) for peer in others]
    for peer, microbatch in pairs:
        transport.post_receive(MessageKey(0, "F", peer, transport.rank, microbatch), peer, [((3,), torch.int64)])
    for peer, microbatch in pairs:
        value = torch.tensor([transport.rank, peer, microbatch])
        transport.send(MessageKey(0, "F", transport.rank, peer, microbatch), peer, [value])
    for peer, microbatch in pairs:
        (came,) = transport.receive(MessageKey(0, "F", peer, transport.rank, microbatch), peer)
        assert came.tolist() == [peer, transport.rank, microbatch]


@ranks(3)
def large_messages_go_in_both_directions_at_once(transport):
    others = [rank for rank in range(3) if rank != transport.rank]
    for peer in others:
        transport.post_receive(MessageKey(0, "F", peer, transport.rank, 0), peer, [((1000, 50), torch.float32)])
    for peer in others:
        value = torch.full((1000, 50), 10.0 * transport.rank + peer)
        transport.send(MessageKey(0, "F", transport.rank, peer, 0), peer, [value])
    for peer in others:
        (came,) = transport.receive(MessageKey(0, "F", peer, transport.rank, 0), peer)
        assert came.unique().tolist() == [10.0 * peer + transport.rank]


@ranks(3)
def no_rank_passes_a_barrier_before_all_have_come(transport):
    transport.barrier()
    before = ARRIVED.value
    transport.barrier()
    for number in range(1, 4):
        time.sleep(0.02 * transport.rank)
        with ARRIVED.get_lock():
            ARRIVED.value += 1
        transport.barrier()
        assert ARRIVED.value == before + 3 * number
        transport.barrier()


@ranks(3)
def a_barrier_gives_all_ranks_the_largest_word(transport):
    assert transport.barrier((7, 200, 0)[transport.rank]) == 200
    assert transport.barrier(transport.rank) == 2
    assert transport.barrier() == 0


def whole(rank: int, size: int) -> torch.Tensor:
    """Of each rank, something else."""
    return torch.rand(size, generator=torch.Generator().manual_seed(rank)) * 7.0**rank


@ranks(3)
def sums_over_groups_of_one_two_and_three(transport):
    for group, total in {(0,): 1.0, (0, 2): 101.0, (1, 2): 110.0, (0, 1, 2): 111.0}.items():
        for size in (1, 100, 300_000):
            term = torch.full((size,), 10.0**transport.rank, dtype=torch.float64)
            if transport.rank in group:
                transport.all_reduce(term, group)
                assert term.unique().tolist() == [total]


@ranks(3)
def a_large_sum_of_what_is_not_in_one_piece_lands_where_it_lies(transport):
    matrix = torch.full((400, 200), float(transport.rank + 1))
    transport.all_reduce(matrix.t(), (0, 1, 2))
    assert matrix.unique().tolist() == [6.0]


@ranks(2)
def a_group_of_one_keeps_what_it_has(transport):
    group = (transport.rank,)
    flat = torch.arange(3.0)
    transport.start_sum(flat, group).wait()
    transport.reduce_scatter(flat, (3,), group)
    transport.all_gather(flat, (3,), group)
    transport.all_max(flat, group)
    assert flat.tolist() == [0.0, 1.0, 2.0]
    assert RowGather(transport, group)([flat], torch.float64).wait().tolist() == [[0.0, 1.0, 2.0]]


def same_bits(transport):
    """Of a sum, on all ranks, whoever comes last."""
    size = transport.world_size
    group = tuple(range(transport.world_size))
    first = whole(transport.rank, 1001)
    transport.all_reduce(first, group)
    for trial in range(4):
        term = whole(transport.rank, 1001)
        table = torch.zeros(size, 1001)
        time.sleep(0.02 * ((transport.rank + trial) % size))
        transport.all_reduce(term, group)
        table[transport.rank] = term
        transport.all_gather(table.view(-1), (1001,) * size, group)
        assert all(torch.equal(row, first) for row in table)


ranks(2)(same_bits)
ranks(3)(same_bits)


@ranks(2)
def sums_of_other_dtypes_of_a_transposed_tensor_and_of_a_parameter(transport):
    doubled = [[2, 2, 2]] * 5 + [[[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]], 2.0, [], [2.0, 2.0]]
    dtypes = (torch.int64, torch.int32, torch.float16, torch.bfloat16, torch.float64)
    for started in (False, True):
        terms = [torch.ones(3, dtype=dtype) for dtype in dtypes]
        terms += [torch.arange(6.0).reshape(2, 3).t(), torch.tensor(1.0), torch.empty(0)]
        terms.append(torch.nn.Parameter(torch.ones(2)))
        if started:
            for pending in [transport.start_sum(term, (0, 1)) for term in terms]:
                pending.wait()
        else:
            for term in terms:
                transport.all_reduce(term, (0, 1))
        assert [term.tolist() for term in terms] == doubled


@ranks(2)
def tensors_of_as_many_numbers_are_summed_whatever_their_shapes(transport):
    for shape in ((6,), (1, 6), (2, 3), (3, 2), (6, 1, 1), (6,)):
        term = torch.arange(6.0).reshape(shape) + 10 * transport.rank
        transport.all_reduce(term, (0, 1))
        assert (term.shape, term.flatten().tolist()) == (shape, [2.0 * number + 10 for number in range(6)])


@ranks(4)
def started_sums_end_as_sums_do_with_the_same_bits_on_all_ranks(transport):
    for size, group in ((1, (0, 2)), (1001, WORLD), (300_000, (0, 2))):
        if transport.rank not in group:
            continue
        terms = [whole(transport.rank + 10 * number, size) for number in range(4)]
        at_once = terms[0].clone()
        pending = [transport.start_sum(term, group) for term in terms]
        transport.all_reduce(at_once, group)
        for sum_ in reversed(pending):
            sum_.wait()
        assert torch.equal(at_once, terms[0])
        for number, term in enumerate(terms):
            total = sum(whole(rank + 10 * number, size).double() for rank in group)
            torch.testing.assert_close(term.double(), total, rtol=1e-6, atol=1e-5)
            largest = term.clone()
            least = -term
            transport.all_max(largest, group)
            transport.all_max(least, group)
            assert torch.equal(largest, -least)


@ranks(2)
def what_comes_again_in_every_step_never_meets_what_another_step_left(transport):
    """Receives that stand ready for sums, gathers and exchanges of one size are taken in the order they were posted.

    Those of the largest size do not all find room to stand ready.
    """
    rank = transport.rank
    for size, step in ((size, step) for size in (6, 30_000, 60_000) for step in range(5)):
        base = 100.0 * step
        terms = [torch.full((size,), base + 10.0 * number + rank) for number in range(4)]
        pending = [transport.start_sum(term, (0, 1)) for term in terms]
        flat = torch.full((2 * size,), base + rank)
        together = [transport.reduce_scatter, transport.all_gather]
        for act in reversed(together) if step % 2 else together:
            act(flat, [size, size], (0, 1))
        for sum_ in reversed(pending) if step % 3 else pending:
            sum_.wait()
        transport.barrier(step)
        now = torch.full((size,), base + rank)
        transport.all_reduce(now, (0, 1))
        wanted = [[2 * base + 20.0 * number + 1] for number in range(4)] + [[2 * base + 1]]
        assert [term.unique().tolist() for term in (*terms, now)] == wanted
        scattered = 2 * (base + rank) if step % 2 else 2 * base + 1
        assert flat.view(2, size)[rank].unique().tolist() == [scattered]


@ranks(2)
def started_sums_never_meet_other_sums_or_exchanges_whatever_comes_first_on_each_rank(transport):
    rank = transport.rank
    peer = 1 - transport.rank
    for size in (5, 200_000):
        started = torch.full((size,), 1.0 + rank)
        at_once = torch.full((size,), 10.0 * rank)
        sent = torch.full((size,), 100.0 + rank)
        came = torch.empty(size)
        if rank == 0:
            pending = [transport.start_exchange({peer: sent}, {peer: came}), transport.start_sum(started, (0, 1))]
            transport.all_reduce(at_once, (0, 1))
        else:
            transport.all_reduce(at_once, (0, 1))
            pending = [transport.start_sum(started, (0, 1)), transport.start_exchange({peer: sent}, {peer: came})]
        for one in pending:
            one.wait()
        assert [each.unique().tolist() for each in (started, at_once, came)] == [[3.0], [10.0], [100.0 + peer]]


@ranks(2)
def sums_go_on_while_nobody_waits(transport):
    term = torch.ones(300_000)
    pending = transport.start_sum(term, (0, 1))
    if transport.rank == 1:
        time.sleep(0.1)
    transport.barrier()
    pending.wait()
    assert term.unique().tolist() == [2.0]


def awkward(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Terms whose sum depends on the order of additions."""
    generator = torch.Generator().manual_seed(rank)
    scale = 10.0 ** torch.randint(-8, 8, (size,), generator=generator)
    return (torch.rand(size, generator=generator) * scale).to(dtype)


@ranks(3)
def sums_of_any_size_add_in_the_order_of_ranks_also_while_one_waits_for_something_else(transport):
    if isinstance(transport, ChannelTransport | GlooTransport | MixedTransport):  # large ones go around a ring there
        return
    sizes = (SUM_BYTES // 4, SUM_BYTES // 4 + 1, IN_PARTS_BYTES // 2 + 7, PAIR_SUM_BYTES // 4 + 1)
    for size, dtype in ((size, dtype) for size in sizes for dtype in (torch.float32, torch.bfloat16)):
        total = awkward(0, size, dtype)
        total += awkward(1, size, dtype)
        total += awkward(2, size, dtype)
        now, started = (awkward(transport.rank, size, dtype) for _ in range(2))
        transport.all_reduce(now, (0, 1, 2))
        pending = transport.start_sum(started, (0, 1, 2))
        if transport.rank == 1:  # it adds its part while it waits for this message, which comes after the sum
            transport.post_receive(key(), 0, [((3,), torch.float32)])
            transport.receive(key(), 0)
        pending.wait()
        if transport.rank == 0:
            transport.send(key(), 1, [torch.ones(3)])
            transport.flush()
        assert torch.equal(now, total)
        assert torch.equal(started, total)


@ranks(4)
def a_scattered_sum_then_a_gather_is_a_sum(transport):
    for counts in ((1, 1, 1, 1), (3, 0, 5, 2), (0, 0, 7, 0), (100_001, 1, 70_000, 0), (0, 0, 0, 0)):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            terms = [(whole(rank, sum(counts)) * 10).to(dtype) for rank in WORLD]
            flat = terms[transport.rank].clone()
            transport.reduce_scatter(flat, counts, WORLD)
            start = sum(counts[: transport.rank])
            stop = start + counts[transport.rank]
            assert torch.equal(flat[:start], terms[transport.rank][:start])
            assert torch.equal(flat[stop:], terms[transport.rank][stop:])
            flat[:start] = 0
            flat[stop:] = 0
            transport.all_gather(flat, counts, WORLD)
            assert torch.equal(flat, terms[0] + terms[1] + terms[2] + terms[3])  # in the order of ranks


@ranks(3)
def the_largest_of_all_ranks_and_nan_above_all(transport):
    numbers = torch.tensor([float(transport.rank), 5.0 - transport.rank, 1.0, 5.0])
    numbers[3] = float("nan") if transport.rank == 1 else 5.0
    numbers = numbers.view(2, 2)
    scalar = torch.tensor(transport.rank)
    transport.all_max(numbers, (0, 1, 2))
    transport.all_max(scalar, (0, 1, 2))
    assert [str(value) for value in (*numbers.flatten().tolist(), scalar.item())] == ["2.0", "5.0", "1.0", "nan", "2"]


@ranks(3)
def a_group_that_was_not_declared_is_refused(transport):
    for group in ((0, 1), (1, 0, 2)):
        ways = [
            lambda group=group: transport.all_reduce(torch.ones(1), group),
            lambda group=group: transport.start_sum(torch.ones(2), group).wait(),
            lambda group=group: transport.reduce_scatter(torch.ones(len(group)), (1,) * len(group), group),
            lambda group=group: transport.all_gather(torch.ones(len(group)), (1,) * len(group), group),
            lambda group=group: transport.all_max(torch.ones(1), group),
        ]
        for way in ways if transport.rank in group else ():
            with pytest.raises(TransportError, match="cannot sum over ranks"):
                way()


@ranks(2)
def parts_that_do_not_make_up_the_whole_are_refused(transport):
    wrong = [(torch.ones(3), (1, 1)), (torch.ones(2, 1), (1, 1)), (torch.ones(4)[::2], (1, 1)), (torch.ones(2), (2,))]
    for flat, counts in wrong:
        for together in (transport.reduce_scatter, transport.all_gather):
            with pytest.raises(TransportError, match="do not make up a tensor"):
                together(flat, counts, (0, 1))


def of(src, dst, number, size=5):
    """What ``src`` sends ``dst`` in exchange ``number``."""
    return torch.arange(size, dtype=torch.float64) + 1000 * src + 100 * dst + 10 * number


@ranks(4)
def every_rank_exchanges_with_every_other(transport):
    others = [rank for rank in WORLD if rank != transport.rank]
    for size in (1, 100_000):
        sent = {rank: of(transport.rank, rank, 0, size) for rank in others}
        received = {rank: torch.empty(size, dtype=torch.float64) for rank in others}
        transport.start_exchange(sent, received).wait()
        assert all(torch.equal(received[rank], of(rank, transport.rank, 0, size)) for rank in others)


@ranks(3)
def exchanges_go_one_way_and_may_be_of_nothing(transport):
    for exchange_key in (None, 8, 8, 8):
        sent = {1: of(0, 1, exchange_key or 0)} if transport.rank == 0 else {}
        received = {0: torch.empty(5, dtype=torch.float64)} if transport.rank == 1 else {}
        transport.start_exchange(sent, received, exchange_key).wait()
        assert all(torch.equal(tensor, of(0, 1, exchange_key or 0)) for tensor in received.values())


@ranks(2)
def values_are_sent_and_not_bytes_that_mean_others(transport):
    """Views of torch that change values when they are read arrive as read, and are written so."""
    peer = 1 - transport.rank
    for view in (torch.conj, torch.Tensor._neg_view):
        numbers = torch.complex(of(transport.rank, peer, 0), of(transport.rank, peer, 1))
        came = view(torch.zeros(5, dtype=torch.complex128))
        transport.start_exchange({peer: view(numbers)}, {peer: came}).wait()
        assert torch.equal(came, view(torch.complex(of(peer, transport.rank, 0), of(peer, transport.rank, 1))))


@ranks(2)
def what_is_cut_out_of_a_tensor_is_sent_as_it_lies_and_may_be_written_after_the_wait(transport):
    """A column of a matrix, a halo's shape."""
    rank = transport.rank
    peer = 1 - transport.rank
    for rows, is_keyed in ((rows, is_keyed) for rows in (7, 10_000, 70_000) for is_keyed in (False, True)):
        for step in range(10):
            matrix = torch.stack([of(rank, peer, 10 * step + column, rows) for column in range(4)], 1)
            came = torch.empty(rows, 2, dtype=torch.float64)
            transport.start_exchange({peer: matrix[:, 1:3]}, {peer: came}, rows if is_keyed else None).wait()
            matrix.zero_()
            assert torch.equal(came, torch.stack([of(peer, rank, 10 * step + column, rows) for column in (1, 2)], 1))


@ranks(2)
def halos_of_all_dims_are_packed_where_they_are_sent_from(transport):
    """Slabs of one dim lie in equal stretches; corners, and what is turned, do not."""
    peer = 1 - transport.rank
    cuts = [lambda x, dim=dim: x.narrow(dim, 1, 1) for dim in range(4)]
    cuts += [lambda x, dim=dim: x.narrow(dim, 0, 2) for dim in range(1, 4)]
    cuts += [lambda x: x[:, 1:, 1:3, 2:4], lambda x: x.transpose(1, 3), lambda x: x[:, :, ::2, :1], lambda x: x[:0]]
    cuts += [lambda x: x[:1, :1, :1, :1].expand(2, 3, 5, 7), lambda x: x.to(memory_format=torch.channels_last)]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        numbers = torch.arange(2 * 3 * 5 * 7).view(2, 3, 5, 7).to(dtype)
        for number, cut in enumerate(cuts):
            theirs = cut(numbers + 10 * peer)
            came = torch.empty(theirs.shape, dtype=dtype)
            sent = {peer: cut(numbers + 10 * transport.rank)}
            transport.start_exchange(sent, {peer: came}, 100 * dtype.itemsize + 2 * number).wait()
            assert torch.equal(came, theirs), number


@ranks(2)
def exchanges_of_a_pair_and_key_are_matched_in_the_order_they_were_started(transport):
    """Step after step, whichever is waited for first; nor is what was received overwritten by what comes next."""
    rank = transport.rank
    peer = 1 - transport.rank
    kept = []
    for size, step in ((size, step) for size in (3, 400_000) for step in range(4)):
        pending = []
        for number, exchange_key in enumerate((size + 1, size + 2, None, size + 2, None)):
            number += 10 * step
            came = torch.empty(size, dtype=torch.float64)
            pending.append(transport.start_exchange({peer: of(rank, peer, number, size)}, {peer: came}, exchange_key))
            kept.append((came, of(peer, rank, number, size)))
        for one in pending if step % 2 else pending[::-1]:
            one.wait()
    transport.flush()
    assert all(torch.equal(came, expected) for came, expected in kept)


@ranks(2)
def rows_of_one_key_may_be_of_several_kinds(transport):
    """As a loss tells first how many places count, then its sum, in another dtype."""
    rows = RowGather(transport, (0, 1), key=12)
    for step in range(3):
        for count, dtype in ((1, torch.float64), (1, torch.float32), (4, torch.float32), (1, torch.float64)):
            table = rows([torch.full((count,), 10.0 * step + transport.rank + count, dtype=dtype)], dtype).wait()
            assert table.dtype == dtype
            assert table[:, 0].tolist() == [10.0 * step + count + rank for rank in (0, 1)]


@ranks(4)
def all_ranks_of_a_group_get_the_rows_of_all_in_order_and_groups_do_not_meet(transport):
    def row(rank, number):
        return [torch.tensor([float(rank)]), torch.full((3,), 10.0 * number + rank)]

    groups = [group for group in ((0, 1), (0, 1, 2), (1, 3), WORLD) if transport.rank in group]
    gathers = [RowGather(transport, group) for group in groups]
    for number in range(3):
        pending = [rows(row(transport.rank, number), torch.float64) for rows in gathers]
        for group, table in zip(groups, pending, strict=True):
            assert torch.equal(table.wait(), torch.stack([torch.cat(row(rank, number)) for rank in group]).double())
