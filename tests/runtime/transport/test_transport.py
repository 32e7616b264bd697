"""What every transport does alike; ``run`` executes a program on each rank, over each transport."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from planner.ir.errors import DeadlineError, TransportError
from runtime.transport import Hub, Key, Transport
from runtime.transport.base import Spec

DEADLINE_S = 20.0
MIXED = (
    torch.arange(6, dtype=torch.float64).reshape(2, 3),
    torch.tensor([2**62 + 1, -5]),
    torch.tensor([True, False, True]),
    torch.empty(0, 4, dtype=torch.float16),
    torch.tensor(2.5, dtype=torch.bfloat16),
    torch.arange(12.0).reshape(3, 4).t(),
    torch.tensor([1 + 2j]),
)


def specs_of(*tensors: torch.Tensor) -> list[Spec]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def key(microbatch: int = 3, step: int = 4, kind: str = "F") -> Key:
    return Key(step, kind, 0, 1, microbatch)


def deliver(transport: Transport, name: Key, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """From rank 0 to rank 1."""
    if transport.rank == 0:
        transport.send(name, 1, tensors)
        transport.flush()
        return tensors
    transport.post_receive(name, 0, specs_of(*tensors))
    return transport.receive(name, 0)


def test_tensors_of_any_dtype_and_shape_make_the_round_trip(run):
    _, received = run(2, lambda transport: deliver(transport, key(), MIXED))
    for sent, came in zip(MIXED, received, strict=True):
        assert (came.dtype, came.shape) == (sent.dtype, sent.shape)
        assert torch.equal(came, sent)


def test_received_tensors_are_aligned_views_of_one_buffer(run):
    def program(transport):
        tensors = deliver(transport, key(), MIXED)
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}, [
            tensor.data_ptr() % 64 for tensor in tensors
        ]

    _, (storages, offsets) = run(2, program)
    assert len(storages) == 1
    assert [offset for offset, tensor in zip(offsets, MIXED, strict=True) if tensor.numel()] == [0] * 6


def test_a_message_is_what_it_was_when_sent(run):
    def program(transport):
        value = torch.ones(5, requires_grad=True)
        if transport.rank == 0:
            transport.send(key(), 1, [value])
            value.data.zero_()
            transport.barrier()
            return transport.flush()
        transport.barrier()
        transport.post_receive(key(), 0, specs_of(value))
        (came,) = transport.receive(key(), 0)
        assert not came.requires_grad
        return came

    assert torch.equal(run(2, program)[1], torch.ones(5))


@pytest.mark.parametrize("run", ["inprocess", "rendezvous", "gloo", "shared", "mixed", "mpi"], indirect=True)
@pytest.mark.parametrize("announced_first", [True, False])
def test_messages_are_matched_by_key_not_by_order(run, announced_first):
    names = [*(key(microbatch) for microbatch in range(4)), key(0, step=5), key(0, kind="B"), Key(4, "F", 1, 0, 0)]
    tensors = [torch.full((10 + 10 * number,), float(number)) for number in range(len(names))]  # later ones larger

    def program(transport):
        if transport.rank == 0:
            transport.barrier() if announced_first else None
            for number in reversed(range(len(names))):
                transport.send(names[number], 1, [tensors[number]])
            return transport.flush()
        for number in (2, 0, 1, 6, 5, 4, 3):
            transport.post_receive(names[number], 0, specs_of(tensors[number]))
        transport.barrier() if announced_first else None
        return [transport.receive(name, 0)[0] for name in names]

    _, received = run(2, program)
    assert all(torch.equal(came, sent) for came, sent in zip(received, tensors, strict=True))


def test_messages_of_an_edge_keep_their_order_and_edges_overtake(run):
    names = [*(key(microbatch) for microbatch in range(4)), key(0, step=5)]
    others = [Key(4, "B", 0, 1, 0), Key(4, "F", 1, 0, 0)]
    tensors = {name: torch.full((10 + 10 * number,), float(number)) for number, name in enumerate(names + others)}

    def program(transport):
        if transport.rank == 0:
            for name in [*others, *names]:
                transport.send(name, 1, [tensors[name]])
            return transport.flush()
        for name in [*names, *reversed(others)]:
            transport.post_receive(name, 0, specs_of(tensors[name]))
        came = {name: transport.receive(name, 0)[0] for name in [*reversed(others), *names]}
        transport.flush()
        return came

    _, received = run(2, program)
    assert all(torch.equal(received[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("sizes", [(1, 70_000), (70_000,), (70_000, 3, 100_000), (1_500_000,)])
def test_large_tensors_come_beside_small_ones(run, sizes):
    tensors = tuple(torch.arange(float(size)) + size for size in sizes)

    def program(transport):
        for microbatch in range(3):
            came = deliver(transport, key(microbatch), tensors)
            assert all(torch.equal(tensor, sent) for tensor, sent in zip(came, tensors, strict=True))
        strided = torch.arange(280_000.0).reshape(2, 140_000).t()
        (came,) = deliver(transport, key(), (strided,))
        assert torch.equal(came, strided)
        return transport.num_buffers()

    assert run(2, program) == [(0, 0), (0, 0)]


def test_many_messages_in_flight_among_four_ranks(run):
    def program(transport):
        others = [rank for rank in range(4) if rank != transport.rank]
        specs = [((3,), torch.int64)]
        for microbatch in range(50):
            for peer in others:
                transport.post_receive(Key(0, "F", peer, transport.rank, microbatch), peer, specs)
        for microbatch in range(50):
            for peer in others:
                value = torch.tensor([transport.rank, peer, microbatch])
                transport.send(Key(0, "F", transport.rank, peer, microbatch), peer, [value])
        for microbatch in range(50):
            for peer in others:
                (came,) = transport.receive(Key(0, "F", peer, transport.rank, microbatch), peer)
                assert came.tolist() == [peer, transport.rank, microbatch]
        transport.flush()
        return transport.num_buffers()

    assert run(4, program) == [(0, 0)] * 4


def test_both_directions_and_three_ranks_at_once(run):
    def program(transport):
        others = [rank for rank in range(3) if rank != transport.rank]
        for peer in others:
            transport.post_receive(Key(0, "F", peer, transport.rank, 0), peer, [((1000, 50), torch.float32)])
        for peer in others:
            value = torch.full((1000, 50), 10.0 * transport.rank + peer)
            transport.send(Key(0, "F", transport.rank, peer, 0), peer, [value])
        came = [transport.receive(Key(0, "F", peer, transport.rank, 0), peer)[0] for peer in others]
        transport.flush()
        return [(tensor.min().item(), tensor.max().item()) for tensor in came]

    assert run(3, program) == [[(10.0, 10.0), (20.0, 20.0)], [(1.0, 1.0), (21.0, 21.0)], [(2.0, 2.0), (12.0, 12.0)]]


def test_a_key_can_be_used_again_after_its_message_came(run):
    def program(transport):
        return [deliver(transport, key(), (torch.tensor(number),))[0].item() for number in range(3)]

    assert run(2, program)[1] == [0, 1, 2]


def test_a_late_message_is_a_deadline_error_that_names_key_and_peer(run, over):
    def program(transport):
        if transport.rank == 1:
            assert over.wait(DEADLINE_S)
            return None
        transport.deadline_s = 0.1
        transport.post_receive(key(), 1, specs_of(torch.ones(2)))
        with pytest.raises(DeadlineError) as caught:
            transport.receive(key(), 1)
        over.set()
        return str(caught.value)

    text, _ = run(2, program)
    assert "receive step 4 F 0->1 mb 3: rank 0 waited " in text
    assert "s for rank 1, deadline 0.1 s" in text


@pytest.mark.parametrize("run", ["rendezvous", "gloo", "shared", "mixed"], indirect=True)
def test_a_message_nobody_takes_is_a_deadline_error_of_flush(run, over):
    def program(transport):
        if transport.rank == 1:
            assert over.wait(DEADLINE_S)
            return None
        transport.deadline_s = 0.1
        transport.send(key(), 1, [torch.ones(2)])
        with pytest.raises(DeadlineError) as caught:
            transport.flush()
        over.set()
        return str(caught.value)

    assert "send step 4 F 0->1 mb 3: rank 0 waited " in run(2, program)[0]


@pytest.mark.parametrize("dies", ["before", "while waiting"])
def test_a_peer_that_leaves_is_named_at_once(run, dies):
    def program(transport):
        if transport.rank == 1:
            time.sleep(0.0 if dies == "before" else 0.2)
            return None
        time.sleep(0.2 if dies == "before" else 0.0)

        def announce_and_receive():
            transport.post_receive(key(), 1, specs_of(torch.ones(2)))
            transport.receive(key(), 1)

        with pytest.raises(TransportError) as caught:
            announce_and_receive()
        return str(caught.value)

    text, _ = run(2, program)
    assert "receive step 4 F 0->1 mb 3: rank 0 lost rank 1" in text


WRONG = {
    "key": ((torch.ones(2, 3),), "key: expected step 4 F 0->1 mb 3, came step 8 F 0->1 mb 3"),
    "dtype": ((torch.ones(2, 3, dtype=torch.float64),), "dtypes: expected float32, came float64"),
    "larger": ((torch.ones(3, 3),), "payload bytes: expected 24, came 36"),
    "smaller": ((torch.ones(1),), "payload bytes: expected 24, came 4"),
    "shape": ((torch.ones(3, 2),), "checksum of shapes and dtypes: expected"),
    "number": ((torch.ones(2, 3), torch.empty(0)), "number of tensors: expected 1, came 2"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_another_message_than_expected_names_both(run, fault):
    tensors, complaint = WRONG[fault]

    def program(transport):
        if transport.rank == 0:
            transport.send(key(step=8 if fault == "key" else 4), 1, tensors)  # steps 4 and 8 have the same tag
            return transport.flush()
        transport.post_receive(key(), 0, [((2, 3), torch.float32)])
        with pytest.raises(TransportError) as caught:
            receive_and_flush(transport)
        return str(caught.value)

    def receive_and_flush(transport):  # where nothing may stop a stream, headers are looked at by flush
        transport.receive(key(), 0)
        transport.flush()

    text = run(2, program)[1]
    assert "step 4 F 0->1 mb 3: rank 0 sent another message than expected" in text
    assert complaint in text


def test_receiving_what_was_not_announced_or_announcing_twice_is_refused(run):
    def program(transport):
        with pytest.raises(TransportError, match="was not announced"):
            transport.receive(key(), 1 - transport.rank)
        transport.post_receive(key(), 1 - transport.rank, [])
        with pytest.raises(TransportError, match="announced twice"):
            transport.post_receive(key(), 1 - transport.rank, [])
        transport.send(key(), 1 - transport.rank, [])
        assert transport.receive(key(), 1 - transport.rank) == ()
        transport.flush()

    run(2, program)


def test_sums_over_groups_of_one_two_and_three(run):
    def program(transport):
        sums = []
        for ranks in ((0,), (0, 2), (1, 2), (0, 1, 2)):
            for size in (1, 100, 300_000):
                term = torch.full((size,), 10.0**transport.rank, dtype=torch.float64)
                if transport.rank in ranks:
                    transport.all_reduce(term, ranks)
                    sums.append((ranks, sorted(set(term.tolist()))))
        return sums

    totals = {(0,): [1.0], (0, 2): [101.0], (1, 2): [110.0], (0, 1, 2): [111.0]}
    for rank, sums in enumerate(run(3, program, [(0,), (0, 2), (1, 2)])):
        assert sums == [(ranks, total) for ranks, total in totals.items() if rank in ranks for _ in range(3)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_sum_has_the_same_bits_on_all_ranks_whoever_comes_last(run, world_size):
    def program(transport):
        sums = []
        for trial in range(4):
            term = torch.rand(1001, generator=torch.Generator().manual_seed(transport.rank)) * 7.0**transport.rank
            time.sleep(0.02 * ((transport.rank + trial) % world_size))
            transport.all_reduce(term, tuple(range(world_size)))
            sums.append(term)
        return sums

    results = [term for sums in run(world_size, program) for term in sums]
    assert all(torch.equal(term, results[0]) for term in results)


def test_sums_of_other_dtypes_of_a_transposed_tensor_and_of_a_parameter(run):
    def program(transport):
        terms = [torch.ones(3, dtype=dtype) for dtype in (torch.int64, torch.int32, torch.float16, torch.bfloat16)]
        terms += [torch.arange(6.0).reshape(2, 3).t(), torch.tensor(1.0), torch.empty(0)]
        terms.append(torch.nn.Parameter(torch.ones(2)))
        for term in terms:
            transport.all_reduce(term, (0, 1))
        return [term.tolist() for term in terms]

    doubled = [[2, 2, 2]] * 4 + [[[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]], 2.0, [], [2.0, 2.0]]
    assert run(2, program) == [doubled] * 2


def test_a_sum_over_an_unknown_group_is_refused(run):
    def program(transport):
        for ranks in ((0, 1), (1, 0, 2)):
            with pytest.raises(TransportError, match="cannot sum over ranks"):
                transport.all_reduce(torch.ones(1), ranks)
        transport.barrier()

    run(3, program)


@pytest.mark.parametrize("groups", [[()], [(1, 0)], [(0, 0)], [(0, 2)], [(-1, 0)]])
def test_a_group_is_an_increasing_tuple_of_ranks(groups):
    with pytest.raises(TransportError, match="not an increasing tuple of ranks below 2"):
        Hub(2, groups)


@pytest.mark.parametrize(("world_size", "size"), [(2, 1), (2, 300_000), (3, 1)])
def test_a_sum_that_one_rank_does_not_join_is_an_error_for_the_others(run, over, world_size, size):
    ranks = tuple(range(world_size))

    def program(transport):
        if transport.rank == world_size - 1:
            assert over.wait(DEADLINE_S)
            return None
        transport.deadline_s = 0.1 if transport.rank == 0 else DEADLINE_S
        with pytest.raises((DeadlineError, TransportError)) as caught:
            transport.all_reduce(torch.ones(size), ranks)
        if transport.rank == 0:
            over.set()
        return str(caught.value)

    text = run(world_size, program)[0]
    assert f"error[H503] sum over ranks {ranks}, number 1: rank 0 waited " in text
    assert f"rank {world_size - 1}, deadline 0.1 s" in text


def test_no_rank_passes_a_barrier_before_all_have_come(run, tmp_path):
    marks = [tmp_path / str(rank) for rank in range(3)]

    def program(transport):
        for _ in range(2):
            time.sleep(0.05 * transport.rank)
            marks[transport.rank].touch()
            transport.barrier()
            assert all(mark.exists() for mark in marks)
            transport.barrier()
            marks[transport.rank].unlink()
            transport.barrier()
            assert not any(mark.exists() for mark in marks)
            transport.barrier()

    run(3, program)


def test_a_barrier_gives_all_ranks_the_largest_word(run):
    def program(transport):
        given = [
            transport.barrier((7, 200, 0)[transport.rank]),
            transport.barrier(transport.rank),
        ]
        return [*given, transport.barrier()]

    assert run(3, program) == [[200, 2, 0]] * 3


def test_a_barrier_names_the_rank_that_is_missing(run, over):
    def program(transport):
        if transport.rank == 2:
            assert over.wait(DEADLINE_S)
            return None
        transport.deadline_s = 0.1 if transport.rank == 0 else DEADLINE_S
        with pytest.raises((DeadlineError, TransportError)) as caught:
            transport.barrier()
        if transport.rank == 0:
            over.set()
        return str(caught.value)

    text = run(3, program)[0]
    assert "error[H503] barrier" in text
    assert "rank 0 waited " in text
    assert "for rank 2" in text


def test_nothing_is_left_behind(run):
    def program(transport):
        for step in range(5):
            deliver(transport, key(step=step), MIXED)
            transport.all_reduce(torch.ones(2), (0, 1))
        transport.barrier()
        return transport.num_buffers()

    assert run(2, program) == [(0, 0), (0, 0)]


def test_threads_do_not_outlive_a_run(run):
    before = threading.active_count()
    run(2, lambda transport: transport.barrier())
    assert threading.active_count() == before
