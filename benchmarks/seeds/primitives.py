"""DistDL's primitives (Hewett and Grady, arXiv 2006.03108): |<F x, y> - <x, F* y>| / |x| |y| on random layouts.

Four ranks that are threads.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

from benchmarks.report import Row, at_most

ADJOINT = 1e-13


def rows(quick: bool) -> Iterator[Row]:
    """One row."""
    yield adjoints(20 if quick else 200)


def adjoints(count: int) -> Row:
    """The worst of random exchanges among four ranks."""
    import torch

    from halopipe.primitives import Partition, Ranks, repartition
    from runtime.transport import Hub, InProcessTransport

    torch.set_num_threads(1)
    rng, worst = random.Random(0), 0.0
    for _ in range(count):
        shape = tuple(rng.randint(2, 9) for _ in range(rng.randint(1, 3)))
        source, target = (Partition.of(shape, {dim: _cuts(rng, shape[dim])}) for dim in _dims(rng, shape))
        wanted = target.grown({0: (rng.randint(0, 3), rng.randint(0, 3))}, outside=True)
        hub, products = Hub(4, ()), [torch.zeros(4)] * 4

        def one(rank: int, hub: Hub = hub, found: list[torch.Tensor] = products) -> None:
            ranks = Ranks.over(InProcessTransport(hub, rank), timeout_s=60.0)
            generator = torch.Generator().manual_seed(rank)
            parts = (source.local_shape(rank), wanted.local_shape(rank))  # noqa: B023  # it ends within the turn
            x, y = (torch.randn(each, generator=generator, dtype=torch.float64) for each in parts)
            x.requires_grad_()
            made = repartition(x, source, wanted, ranks)  # noqa: B023
            (back,) = torch.autograd.grad(made, x, y)
            found[rank] = torch.stack([(made * y).sum(), (x * back).sum(), x.square().sum(), y.square().sum()]).detach()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        there, here, of_x, of_y = torch.stack(products).sum(0).tolist()
        worst = max(worst, abs(there - here) / max(1e-30, of_x * of_y) ** 0.5)
    return at_most(f"DistDL, {count} adjoints: largest error", worst, "relative", ADJOINT)


def _dims(rng: random.Random, shape: tuple[int, ...]) -> tuple[int, int]:
    return rng.randrange(len(shape)), rng.randrange(len(shape))


def _cuts(rng: random.Random, extent: int) -> tuple[int, ...]:
    return (0, *sorted(rng.randint(0, extent) for _ in range(3)), extent)
