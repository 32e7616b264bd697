"""Exchanges for modules of one's own: values, exact adjoints on random layouts, and what is refused."""

from __future__ import annotations

import os
import random
import runpy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from halopipe.primitives import (
    Partition,
    Ranks,
    Window,
    all_reduce,
    broadcast,
    halo_exchange,
    repartition,
    sum_reduce,
)
from planner.ir.box import whole
from planner.ir.errors import UsageError
from runtime.pipeline.routing import slices
from runtime.transport import InProcessTransport
from tests.forks import forked
from tests.halopipe.launch.test_torchrun import free_port
from tests.runtime.ranks import on_ranks
from tests.test_architecture import HOME

GRIDS = ((2,), (3,), (4,), (2, 2), (2, 3))


def drawn(rng: random.Random, shape: tuple[int, ...], grid: tuple[int, ...], *, copies: bool) -> Partition:
    """Uneven parts, some of them empty, along dims in any order."""
    axes = [*range(len(shape)), *(["copy"] if copies else [])]
    while len(axes) < len(grid):
        axes.append(f"copy {len(axes)}")
    cuts = {}
    for axis, parts in zip(rng.sample(axes, len(grid)), grid, strict=True):
        extent = shape[axis] if isinstance(axis, int) else parts
        cuts[axis] = (0, *sorted(rng.randint(0, extent) for _ in range(parts - 1)), extent)
    return Partition.of(shape, cuts)


def disjoint(rng: random.Random, shape: tuple[int, ...], size: int) -> Partition:
    """No element is on two ranks."""
    if rng.random() < 0.3:
        return Partition.at(shape, rng.randrange(size), size)
    dim = rng.choice([dim for dim, extent in enumerate(shape) if extent > 1])
    inner = sorted(rng.randint(0, shape[dim]) for _ in range(size - 1))
    return Partition.of(shape, {dim: (0, *inner, shape[dim])})


Map = Callable[[Tensor, Ranks], Tensor]


def on_both_sides(source: Partition, target: Partition, apply: Map) -> tuple[float, float]:
    """<F x, y> and <x, F* y>, where every rank has its own x and y."""

    def run(transport: InProcessTransport) -> tuple[float, float]:
        torch.set_num_threads(1)
        ranks = Ranks.over(transport, timeout_s=20.0)
        generator = torch.Generator().manual_seed(ranks.rank)
        x, y = (
            torch.randn(each.local_shape(ranks.rank), generator=generator, dtype=torch.float64)
            for each in (source, target)
        )
        x.requires_grad_()
        result = apply(x, ranks)
        assert result.shape == y.shape
        (back,) = torch.autograd.grad(result, x, y)
        return float((result * y).sum().detach()), float((x * back).sum().detach())

    pairs = on_ranks(len(source.boxes), run)
    there, here = (sum(side) for side in zip(*pairs, strict=True))
    return there, here


@pytest.mark.parametrize("seed", range(40))
def test_backward_is_the_adjoint_of_every_primitive(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randint(2, 7) for _ in range(rng.randint(1, 3)))
    grid = rng.choice(GRIDS)
    size = len(drawn(rng, shape, grid, copies=False).boxes)
    source = drawn(rng, shape, grid, copies=True)
    target = drawn(rng, shape, grid, copies=True)
    halos = {dim: (rng.randint(0, 9), rng.randint(0, 2)) for dim in range(len(shape))}  # wider than parts, too
    one = disjoint(rng, shape, size)
    maps: list[tuple[Partition, Partition, Map]] = [
        (source, target, lambda x, ranks: repartition(x, source, target, ranks)),
        (one, Partition.copies(shape, size), lambda x, ranks: broadcast(x, one, ranks)),
        (target, one, lambda x, ranks: sum_reduce(x, target, one, ranks)),
        (source, source, lambda x, ranks: all_reduce(x, ranks, source)),
        (source, source.grown(halos), lambda x, ranks: halo_exchange(x, source, halos, ranks)),
        (
            source,
            source.grown(halos, outside=True),
            lambda x, ranks: halo_exchange(x, source, halos, ranks, zeros=True),
        ),
    ]
    for before, after, apply in maps:
        there, here = on_both_sides(before, after, apply)
        assert here == pytest.approx(there, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_ranks_get_what_their_boxes_say(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randint(2, 6) for _ in range(rng.randint(1, 3)))
    grid = rng.choice(GRIDS)
    source = drawn(rng, shape, grid, copies=True)
    target = drawn(rng, shape, grid, copies=True)
    size = len(source.boxes)
    one = disjoint(rng, shape, size)
    x = torch.randn(shape, dtype=torch.float64)
    padded = torch.nn.functional.pad(x, (2, 2) * len(shape))
    terms = torch.randn(size, *shape, dtype=torch.float64)
    total = torch.zeros(shape, dtype=torch.float64)
    for rank, box in enumerate(target.boxes):
        total[slices(box, whole(shape))] += terms[rank][slices(box, whole(shape))]

    def run(transport: InProcessTransport) -> None:
        ranks = Ranks.over(transport, timeout_s=20.0)
        me = ranks.rank
        mine = x[source.slices(me)]
        assert torch.equal(repartition(mine, source, target, ranks), x[target.slices(me)])
        assert torch.equal(broadcast(x[one.slices(me)], one, ranks), x)
        halos = dict.fromkeys(range(len(shape)), (2, 2))
        rows = halo_exchange(mine, source, halos, ranks, zeros=True)
        if mine.numel():
            around = tuple(slice(each.start, each.stop + 4) for each in source.boxes[me])
            assert torch.equal(rows, padded[around])
        added = sum_reduce(terms[me][target.slices(me)], target, one, ranks)
        torch.testing.assert_close(added, total[one.slices(me)], rtol=0, atol=1e-13)
        everywhere = all_reduce(terms[me], ranks)
        torch.testing.assert_close(everywhere, terms.sum(0), rtol=0, atol=1e-13)
        gathered = all_reduce(everywhere / size, ranks)
        assert torch.equal(
            gathered, repartition(gathered, Partition.copies(shape, size), Partition.copies(shape, size), ranks)
        )

    on_ranks(size, run)


@pytest.mark.parametrize(
    "each", [Window(3, 1, 1), Window(3, 2, 1), Window(5, 3, 2, 2), Window(2, 2), Window(1, 2), Window(7, 1, 5)]
)
@pytest.mark.parametrize("points", [(0, 7, 13), (0, 1, 13), (0, 4, 5, 13), (0, 12, 13)])
def test_a_window_over_uneven_rows_makes_what_one_over_all_of_them_does(each: Window, points: tuple[int, ...]) -> None:
    x = torch.randn(2, 13, dtype=torch.float64)
    weight = torch.randn(1, 1, each.kernel, dtype=torch.float64)
    expected = torch.conv1d(x[:, None], weight, None, each.stride, each.padding, each.dilation)[:, 0]
    rows = Partition.of(x.shape, {1: points})
    made, read = rows.windowed({1: each})
    assert made.shape == tuple(expected.shape)
    assert sum(len(box[1]) for box in made.boxes) == expected.shape[1]

    def run(transport: InProcessTransport) -> None:
        ranks = Ranks.over(transport, timeout_s=20.0)
        part = repartition(x[rows.slices(ranks.rank)], rows, read, ranks)
        if part.numel():
            found = torch.conv1d(part[:, None], weight, None, each.stride, 0, each.dilation)[:, 0]
            torch.testing.assert_close(found, expected[made.slices(ranks.rank)], rtol=0, atol=1e-12)

    on_ranks(len(rows.boxes), run)


def test_a_rank_that_needs_no_gradient_takes_part_in_the_backward_of_those_that_do() -> None:
    source = Partition.at((4,), 0, 2)

    def run(transport: InProcessTransport) -> list[float]:
        ranks = Ranks.over(transport, timeout_s=20.0)
        weight = torch.ones(4 if ranks.rank == 0 else 0, requires_grad=ranks.rank == 0)
        copy = broadcast(weight, source, ranks)
        (copy * (ranks.rank + 2)).sum().backward()
        with torch.no_grad():
            assert not broadcast(weight, source, ranks).requires_grad
        return [] if weight.grad is None else weight.grad.tolist()

    assert on_ranks(2, run)[0] == [5.0] * 4


def test_what_cannot_be_meant_is_refused_with_both_numbers() -> None:
    halves = Partition.of((6, 2), {0: (0, 1, 2)})
    thirds = Partition.of((6, 2), {0: (0, 1, 2, 3)})
    holes = Partition((6, 2), (halves.boxes[0], halves.boxes[0]))
    across = Partition((6, 2), (halves.boxes[0], halves.grown({0: (1, 0)}).boxes[1]))
    other = Partition.of((6, 3), {0: (0, 1, 2)})

    def run(transport: InProcessTransport) -> list[str]:
        ranks = Ranks.over(transport, timeout_s=20.0)
        x = torch.zeros(3, 2)
        calls: list[Callable[[], object]] = [
            lambda: repartition(torch.zeros(4, 2), halves, halves, ranks),
            lambda: repartition(x, halves, thirds, ranks),
            lambda: repartition(x, halves, other, ranks),
            lambda: repartition(x, holes, halves, ranks),
            lambda: repartition(x, across, halves, ranks),
            lambda: sum_reduce(x, halves, Partition.copies((6, 2), 2), ranks),
        ]
        found = []
        for call in calls:
            with pytest.raises(UsageError) as error:
                call()
            found.append(error.value.title)
        return found

    assert on_ranks(2, run)[1] == [
        "rank 1 has a tensor of shape (4, 2), its part by source has (3, 2)",
        "a tensor is divided over 3 ranks, the group has 2",
        "a tensor of shape (6, 2) cannot become one of shape (6, 3)",
        "the ranks have 6 elements of a tensor of shape (6, 2), which has 12",
        "what ranks have overlaps",
        "a sum is to be on several ranks",
    ]
    with pytest.raises(UsageError, match=r"cut points of dim 0 are \(1, 2\)"):
        Partition.of((2,), {0: (1, 2)})
    with pytest.raises(UsageError, match="dim 1 is to be cut"):
        Partition.of((2,), {1: (0, 2)})
    with pytest.raises(UsageError, match="a scalar has no parts"):
        Partition.at((), 0, 2)
    with pytest.raises(UsageError, match="no process group"):
        Ranks()


@pytest.mark.parametrize("size", [2, 3])
def test_the_example_of_the_documents_trains_as_one_device(size: int) -> None:
    port = free_port()

    def work(rank: int) -> None:
        torch.set_num_threads(1)
        places = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in places.items()})
        runpy.run_path(str(HOME / "docs" / "examples" / "divided_convolution.py"), run_name="__main__")

    forked(size, work)


def test_a_group_of_some_ranks_exchanges_by_its_own_numbers() -> None:
    port = free_port()

    def work(rank: int) -> list[float] | None:
        torch.set_num_threads(1)
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=3)
        group = dist.new_group([0, 2])
        try:
            if rank == 1:
                return None
            ranks = Ranks(group, timeout_s=20.0)
            halves = Partition.of((4,), {0: (0, 1, 4)})
            x = torch.arange(4.0)[halves.slices(ranks.rank)].requires_grad_()
            whole_of = repartition(x, halves, Partition.copies((4,), 2), ranks)
            (whole_of * (ranks.rank + 1)).sum().backward()
            assert x.grad is not None
            assert x.grad.tolist() == [3.0] * len(x)
            return whole_of.tolist()
        finally:
            dist.barrier()
            dist.destroy_process_group()

    assert forked(3, work) == [[0.0, 1.0, 2.0, 3.0], None, [0.0, 1.0, 2.0, 3.0]]
