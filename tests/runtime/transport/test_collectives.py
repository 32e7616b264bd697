"""What the ranks of a group do together; ``run`` executes a program on each rank, over each transport."""

from __future__ import annotations

import time

import pytest
import torch

from planner.ir.errors import DeadlineError, TransportError

pytestmark = pytest.mark.parametrize("run", ["inprocess", "gloo", "shared", "mixed", "channels", "mpi"], indirect=True)

DEADLINE_S = 20.0
WORLD = (0, 1, 2, 3)


def whole(rank: int, size: int) -> torch.Tensor:
    """Of each rank, something else."""
    return torch.rand(size, generator=torch.Generator().manual_seed(rank)) * 7.0**rank


@pytest.mark.parametrize("size", [1, 1001, 300_000])
def test_started_sums_end_as_sums_do_with_the_same_bits_on_all_ranks(run, size):
    def program(transport):
        ranks = WORLD if size == 1001 else (0, 2)
        if transport.rank not in ranks:
            return None
        terms = [whole(transport.rank + 10 * number, size) for number in range(4)]
        at_once = terms[0].clone()
        pending = [transport.start_sum(term, ranks) for term in terms]
        transport.all_reduce(at_once, ranks)
        for sum_ in reversed(pending):
            sum_.wait()
        assert torch.equal(at_once, terms[0])
        return terms

    results = [terms for terms in run(4, program, [(0, 2)]) if terms is not None]
    assert len(results) == (4 if size == 1001 else 2)
    for number in range(4):
        members = range(4) if size == 1001 else (0, 2)
        total = sum(whole(rank + 10 * number, size).double() for rank in members)
        torch.testing.assert_close(results[0][number].double(), total, rtol=1e-6, atol=1e-5)
        assert all(torch.equal(terms[number], results[0][number]) for terms in results)


@pytest.mark.parametrize("size", [6, 30_000, 60_000])
def test_what_comes_again_in_every_step_never_meets_what_another_step_left(run, size):
    """Receives that stand ready for sums, gathers and exchanges of one size are taken in the order they were posted.

    Those of the largest size do not all find room to stand ready.
    """

    def program(transport):
        rank, wrong = transport.rank, []
        for step in range(5):
            base = 100.0 * step
            terms = [torch.full((size,), base + 10.0 * number + rank) for number in range(4)]
            pending = [transport.start_sum(term, (0, 1)) for term in terms]
            flat = torch.full((2 * size,), base + rank)
            if step % 2:
                transport.all_gather(flat, [size, size], (0, 1))
                transport.reduce_scatter(flat, [size, size], (0, 1))
            else:
                transport.reduce_scatter(flat, [size, size], (0, 1))
                transport.all_gather(flat, [size, size], (0, 1))
            for sum_ in reversed(pending) if step % 3 else pending:
                sum_.wait()
            transport.barrier(step)
            now = torch.full((size,), base + rank)
            transport.all_reduce(now, (0, 1))
            found = [*(term.unique().tolist() for term in (*terms, now))]
            wanted = [[2 * base + 20.0 * number + 1] for number in range(4)] + [[2 * base + 1]]
            scattered = [2 * (base + place) for place in (0, 1)] if step % 2 else [2 * base + 1] * 2
            if found != wanted or flat.view(2, size)[rank].unique().tolist() != [scattered[rank]]:
                wrong.append((step, found, flat.unique().tolist()))
        return wrong

    assert run(2, program) == [[], []]


def test_tensors_of_as_many_numbers_are_summed_whatever_their_shapes(run):
    shapes = [(6,), (1, 6), (2, 3), (3, 2), (6, 1, 1), (6,)]

    def program(transport):
        terms = [torch.arange(6.0).reshape(shape) + 10 * transport.rank for shape in shapes]
        for term in terms:
            transport.all_reduce(term, (0, 1))
        return [(tuple(term.shape), term.flatten().tolist()) for term in terms]

    wanted = [2.0 * number + 10 for number in range(6)]
    assert run(2, program) == [[(shape, wanted) for shape in shapes]] * 2


def test_started_sums_never_meet_other_sums_whatever_comes_first_on_each_rank(run):
    def program(transport):
        found = []
        for size in (5, 200_000):
            started, at_once = torch.full((size,), 1.0 + transport.rank), torch.full((size,), 10.0 * transport.rank)
            if transport.rank == 0:
                pending = transport.start_sum(started, (0, 1))
                transport.all_reduce(at_once, (0, 1))
            else:
                transport.all_reduce(at_once, (0, 1))
                pending = transport.start_sum(started, (0, 1))
            pending.wait()
            found.append((started.unique().tolist(), at_once.unique().tolist()))
        return found

    assert run(2, program) == [[([3.0], [10.0])] * 2] * 2


def test_sums_go_on_while_nobody_waits(run):
    def program(transport):
        term = torch.ones(300_000)
        pending = transport.start_sum(term, (0, 1))
        if transport.rank == 1:
            time.sleep(0.2)
        transport.barrier()
        pending.wait()
        return term.unique().tolist()

    assert run(2, program) == [[2.0], [2.0]]


COUNTS = [(1, 1, 1, 1), (3, 0, 5, 2), (0, 0, 7, 0), (100_001, 1, 70_000, 0), (0, 0, 0, 0)]


def test_a_scattered_sum_then_a_gather_is_a_sum(run):
    cases = [(counts, dtype) for counts in COUNTS for dtype in (torch.float32, torch.bfloat16, torch.int64)]

    def program(transport):
        return [scatter_and_gather(transport, counts, dtype) for counts, dtype in cases]

    def scatter_and_gather(transport, counts, dtype):
        flat = (whole(transport.rank, sum(counts)) * 10).to(dtype)
        before = flat.clone()
        transport.reduce_scatter(flat, counts, WORLD)
        start = sum(counts[: transport.rank])
        stop = start + counts[transport.rank]
        assert torch.equal(flat[:start], before[:start])
        assert torch.equal(flat[stop:], before[stop:])
        flat[:start], flat[stop:] = 0, 0
        transport.all_gather(flat, counts, WORLD)
        return flat

    results = run(4, program)
    for number, (counts, dtype) in enumerate(cases):
        terms = [(whole(rank, sum(counts)) * 10).to(dtype) for rank in WORLD]
        total = terms[0] + terms[1] + terms[2] + terms[3]  # in the order of ranks
        assert all(torch.equal(found[number], total) for found in results)


def test_a_group_of_one_keeps_what_it_has(run):
    def program(transport):
        ranks = (transport.rank,)
        flat = torch.arange(3.0)
        transport.start_sum(flat, ranks).wait()
        transport.reduce_scatter(flat, (3,), ranks)
        transport.all_gather(flat, (3,), ranks)
        transport.all_max(flat, ranks)
        return flat.tolist()

    assert run(2, program, [(0,), (1,)]) == [[0.0, 1.0, 2.0]] * 2


def test_the_largest_of_all_ranks_and_nan_above_all(run):
    def program(transport):
        numbers = torch.tensor([[float(transport.rank), 5.0 - transport.rank], [1.0, float("nan")]])
        numbers[1, 1] = float("nan") if transport.rank == 1 else 5.0
        transport.all_max(numbers, (0, 1, 2))
        scalar = torch.tensor(transport.rank)
        transport.all_max(scalar, (0, 1, 2))
        return [str(value) for value in (*numbers.flatten().tolist(), scalar.item())]

    assert run(3, program) == [["2.0", "5.0", "1.0", "nan", "2"]] * 3


def test_started_sums_of_other_dtypes_of_a_transposed_tensor_and_of_a_parameter(run):
    def program(transport):
        terms = [torch.ones(3, dtype=dtype) for dtype in (torch.int64, torch.float16, torch.bfloat16, torch.float64)]
        terms += [torch.arange(6.0).reshape(2, 3).t(), torch.tensor(1.0), torch.empty(0)]
        terms.append(torch.nn.Parameter(torch.ones(2)))
        for pending in [transport.start_sum(term, (0, 1)) for term in terms]:
            pending.wait()
        return [term.tolist() for term in terms]

    doubled = [[2, 2, 2]] * 4 + [[[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]], 2.0, [], [2.0, 2.0]]
    assert run(2, program) == [doubled] * 2


def _sum(transport, ranks):
    transport.start_sum(torch.ones(2), ranks).wait()


def _large_sum(transport, ranks):
    transport.start_sum(torch.ones(300_000), ranks).wait()


def _scatter(transport, ranks):
    transport.reduce_scatter(torch.ones(4), (2,) * 2, ranks)


def _gather(transport, ranks):
    transport.all_gather(torch.ones(4), (2,) * 2, ranks)


def _max(transport, ranks):
    transport.all_max(torch.ones(1), ranks)


WAYS = {"started sum": _sum, "large started sum": _large_sum, "reduce-scatter": _scatter, "all-gather": _gather}


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_does_not_join_is_named_when_the_deadline_is_over(run, over, way):
    def program(transport):
        if transport.rank == 1:
            assert over.wait(DEADLINE_S)
            return None
        transport.deadline_s = 0.1
        with pytest.raises(DeadlineError) as caught:
            WAYS[way](transport, (0, 1))
        over.set()
        return str(caught.value)

    text = run(2, program)[0]
    assert f"error[H503] {way.removeprefix('large ')} over ranks (0, 1), number 1: rank 0 waited " in text
    assert "rank 1, deadline 0.1 s" in text


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_left_is_named_at_once(run, way):
    def program(transport):
        if transport.rank == 1:
            return None
        time.sleep(0.2)
        with pytest.raises(TransportError) as caught:
            WAYS[way](transport, (0, 1))
        return str(caught.value)

    text = run(2, program)[0]
    assert f"{way.removeprefix('large ')} over ranks (0, 1), number 1: rank 0 lost" in text
    assert "rank 1" in text


@pytest.mark.parametrize("way", [*WAYS.values(), _max])
def test_a_group_that_was_not_declared_is_refused(run, way):
    def program(transport):
        for ranks in ((0, 1), (1, 2)):
            if transport.rank in ranks:
                with pytest.raises(TransportError, match="cannot sum over ranks"):
                    way(transport, ranks)
        transport.barrier()

    run(3, program)


@pytest.mark.parametrize(
    ("flat", "counts"),
    [(torch.ones(3), (1, 1)), (torch.ones(2, 1), (1, 1)), (torch.ones(4)[::2], (1, 1)), (torch.ones(2), (2,))],
)
def test_parts_that_do_not_make_up_the_whole_are_refused(run, flat, counts):
    def program(transport):
        for together in (transport.reduce_scatter, transport.all_gather):
            with pytest.raises(TransportError, match="do not make up a tensor"):
                together(flat, counts, (0, 1))
        transport.barrier()

    run(2, program)
