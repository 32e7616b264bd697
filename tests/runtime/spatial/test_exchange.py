"""One tensor inside a stage: every rank gets its box, the adjoint is exact, no byte moves that need not; work waits."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn

from planner.ir.box import Box, Interval, intersect, volume, whole
from planner.ir.graph import TensorSpec
from planner.ir.layout import Layout, cut_points
from planner.layers.division import moves_between
from runtime.pipeline.routing import slices
from runtime.spatial.deferred import DeferredGradients
from runtime.spatial.exchange import Exchange, PeerGroup, redistribute
from runtime.transport import InProcessTransport, SharedMemoryTransport
from runtime.transport.segments import SharedSegments
from tests.oracles.boxes import parts
from tests.runtime.ranks import on_ranks

torch.set_num_threads(1)
DIMS = ("sample", "channel", "height", "width")
T = TypeVar("T")


def random_case(rng: random.Random) -> tuple[tuple[int, ...], list[Box], list[Box], list[Box]]:
    shape = tuple(rng.randint(1, 7) for _ in DIMS)
    spec = TensorSpec(DIMS, shape, "float64")
    grid = rng.choice([(2,), (3,), (4,), (2, 2), (2, 3), (2, 2, 2), (6,)])
    owned = list(parts(_layout(rng, grid), spec, shape[0]))
    held = [_grown(box, shape, rng.choice([0, 0, 1])) if volume(box) else box for box in owned]
    wanted = [
        _grown(box, shape, rng.randint(0, 3)) if rng.random() < 0.8 and volume(box) else _anything(rng, shape)
        for box in parts(_layout(rng, grid), spec, shape[0])
    ]
    return shape, owned, held, wanted


def exchanged(
    case: tuple[tuple[int, ...], list[Box], list[Box], list[Box]], x: Tensor, gradients: list[Tensor]
) -> list[tuple[Tensor, Tensor, int]]:
    """By rank: what it got, the gradient of what it holds, bytes sent."""
    _, owned, held, wanted = case
    count = len(owned)

    def run(transport: InProcessTransport) -> tuple[Tensor, Tensor, int]:
        peers = PeerGroup(transport, tuple(range(count)))
        exchange = Exchange.of(peers, held, wanted, moves_between(owned, held, wanted))
        mine = x[slices(held[transport.rank], whole(tuple(x.shape)))].clone().requires_grad_()
        found = redistribute(mine, exchange)
        sent_bytes = peers.sent_bytes
        found.backward(gradients[transport.rank])
        assert mine.grad is not None
        return found.detach(), mine.grad, sent_bytes

    return on_ranks(count, run)


@pytest.mark.parametrize("seed", range(60))
def test_every_rank_gets_its_box_and_the_adjoint_is_exact(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    case = random_case(rng)
    shape, _, held, wanted = case
    x = torch.randn(shape, dtype=torch.float64)
    gradients = [torch.randn([len(i) for i in box], dtype=torch.float64) for box in wanted]
    found = exchanged(case, x, gradients)
    for (got, _, _), box in zip(found, wanted, strict=True):
        assert torch.equal(got, x[slices(box, whole(shape))])
    # <y, E x> = <E* y, x>, where x has a value of its own in every copy
    there = sum(float((got * y).sum()) for (got, _, _), y in zip(found, gradients, strict=True))
    here = sum(
        float((back * x[slices(box, whole(shape))]).sum()) for (_, back, _), box in zip(found, held, strict=True)
    )
    assert here == pytest.approx(there, rel=1e-13, abs=1e-13)


@pytest.mark.parametrize("seed", range(20))
def test_memory_that_ranks_share_is_used_again_for_the_next_tensor(seed: int) -> None:
    """Three micro-batches forward, then their backwards: what an exchange works out once is right each time."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    case = random_case(rng)
    shape, owned, held, wanted = case
    xs = [torch.randn(shape, dtype=torch.float64) for _ in range(3)]
    gradients = [[torch.randn([len(i) for i in box], dtype=torch.float64) for box in wanted] for _ in xs]

    def run(transport: SharedMemoryTransport) -> tuple[list[tuple[Tensor, Tensor]], int]:
        rank = transport.rank
        peers = PeerGroup(transport, tuple(range(len(owned))))
        exchange = Exchange.of(peers, held, wanted, moves_between(owned, held, wanted), 4)
        mine = [x[slices(held[rank], whole(shape))].clone().requires_grad_() for x in xs]
        found = [redistribute(each, exchange) for each in mine]
        sent_bytes = peers.sent_bytes
        for each, gradient in reversed(list(zip(found, gradients, strict=True))):
            each.backward(gradient[rank])
        return [(y.detach(), x.grad) for x, y in zip(mine, found, strict=True) if x.grad is not None], sent_bytes

    together = in_shared_memory(len(owned), run)
    for number, x in enumerate(xs):
        apart = exchanged(case, x, gradients[number])
        for (each, sent_bytes), (got, back, sent_once) in zip(together, apart, strict=True):
            assert torch.equal(each[number][0], got)
            torch.testing.assert_close(each[number][1], back, rtol=0, atol=1e-13)
            assert sent_bytes == 3 * sent_once


def in_shared_memory(count: int, run: Callable[[SharedMemoryTransport], T]) -> list[T]:
    """What ``run`` gives on each rank, the ranks being threads of this process that share memory as processes do."""
    segments = [SharedSegments(rank, count) for rank in range(count)]
    for rank, other in itertools.permutations(range(count), 2):
        assert segments[rank].attach(other, segments[other].address("host")) == ""
    ends = [SharedMemoryTransport(each, count, spin_s=0.0) for each in segments]
    with ThreadPoolExecutor(count) as threads:
        found = list(threads.map(run, ends))
    for end in ends:
        end.close()
    return found


@pytest.mark.parametrize("seed", range(20))
def test_just_what_is_missing_is_sent(seed: int) -> None:
    case = random_case(random.Random(seed))
    shape, _, held, wanted = case
    x = torch.randn(shape, dtype=torch.float64)
    found = exchanged(case, x, [torch.zeros([len(i) for i in box], dtype=torch.float64) for box in wanted])
    missing = sum(volume(b) - (volume(s) if (s := intersect(a, b)) else 0) for a, b in zip(held, wanted, strict=True))
    assert sum(sent for _, _, sent in found) == 8 * missing


def test_a_tensor_that_stays_where_it_is_is_not_copied() -> None:
    boxes = [(Interval(0, 2),), (Interval(2, 4),)]

    def run(transport: InProcessTransport) -> bool:
        peers = PeerGroup(transport, (0, 1))
        exchange = Exchange.of(peers, boxes, boxes, ())
        x = torch.ones(2)
        return exchange.is_local and redistribute(x, exchange) is x and not peers.num_messages

    assert on_ranks(2, run) == [True, True]


def test_ranks_of_a_stage_need_not_be_the_first_ones() -> None:
    held = [(Interval(0, 2),), (Interval(2, 4),)]
    wanted = [(Interval(0, 3),), (Interval(1, 4),)]

    def run(transport: InProcessTransport) -> list[float]:
        if transport.rank == 0:
            return []
        peers = PeerGroup(transport, (2, 1))
        exchange = Exchange.of(peers, held, wanted, moves_between(held, held, wanted))
        x = torch.arange(4.0)[slices(held[peers.position], (Interval(0, 4),))]
        return redistribute(x, exchange).tolist()

    assert on_ranks(3, run) == [[], [1.0, 2.0, 3.0], [0.0, 1.0, 2.0]]


def _layout(rng: random.Random, grid: tuple[int, ...]) -> Layout:
    dims = rng.sample([*DIMS, "replica"], len(grid))
    return Layout(
        {
            dim: cut_points((*(rng.choice([0, 1, 1, 2, 3]) for _ in range(parts - 1)), 1))
            for dim, parts in zip(dims, grid, strict=True)
        }
    )


def _grown(box: Box, shape: tuple[int, ...], rows: int) -> Box:
    return tuple(
        Interval(max(0, i.start - rows), min(extent, i.stop + rows)) if k > 1 else i
        for k, (i, extent) in enumerate(zip(box, shape, strict=True))
    )


def _anything(rng: random.Random, shape: tuple[int, ...]) -> Box:
    ends = [sorted((rng.randint(0, extent), rng.randint(0, extent))) for extent in shape]
    box = tuple(Interval(a, b) for a, b in ends)
    return box if volume(box) else tuple(Interval(0, 0) for _ in shape)


def test_work_is_done_in_the_order_in_which_it_was_put_and_only_once() -> None:
    done: list[int] = []
    later = DeferredGradients(most_kept=5)
    for number in range(3):
        later.put(lambda number=number: done.append(number))
    assert not done
    later.run()
    later.run()
    assert done == [0, 1, 2]


def test_of_too_much_work_the_oldest_is_done_at_once() -> None:
    done: list[int] = []
    later = DeferredGradients(most_kept=2)
    for number in range(4):
        later.put(lambda number=number: done.append(number))
    assert (done, len(later)) == ([0, 1], 2)


def test_what_is_forgotten_is_not_done() -> None:
    later = DeferredGradients()
    later.put(lambda: 1 / 0)
    later.clear()
    later.run()


def test_gradients_are_added_and_told_of_when_they_are_there() -> None:
    told: list[Tensor] = []
    later = DeferredGradients(told.append)
    weight = nn.Parameter(torch.ones(2))
    bias = nn.Parameter(torch.ones(1))
    for _ in range(2):
        later.put_gradients((weight, bias, None), lambda: (2 * weight, None, torch.ones(1)))
        assert len(told) == (0 if weight.grad is None else 1)
        later.run()
    assert torch.equal(weight.grad, torch.full((2,), 4.0))
    assert bias.grad is None
    assert [each is weight for each in told] == [True, True]
    assert not weight.grad.requires_grad
