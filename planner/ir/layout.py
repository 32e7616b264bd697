"""How a tensor is divided over the ranks of a stage: cut points per dim."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from planner.ir.box import Interval
from planner.ir.graph import SAMPLE, is_sites

Shares = tuple[int, ...]
"""Samples of each rank of a stage in a full micro-batch."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Cut points per dim, so that unequal shares for unequal devices are the ordinary case.

    ``Layout({"sample": (0, 3, 4)})`` gives 3 of 4 samples to the first rank and 1 to the second.  With several dims the
    ranks form a grid, the last dim running fastest.  A tensor that lacks a dim is whole (replicated) along that axis.
    Cut points are scaled to the tensor's extent, so that one layout serves micro-batches of different size.  A dim of
    extent 1, the samples' apart, is never cut: what is broadcast along it, or was summed over it, is whole everywhere.

    Sites lie along the samples' axis of the grid: who is given a third of the samples is given a third of the sites, in
    the order that their rows have.  ``{"sample": (0, 1, 2), "sites": (0, 700, 1000)}`` says which: of one micro-batch,
    where clouds differ.
    """

    cuts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def num_parts(self) -> int:
        """Number of ranks it needs."""
        return len(self.samples(0))

    def samples(self, samples: int) -> tuple[int, ...]:
        """Number of samples of each part, of ``samples`` in all."""
        counts = [samples]
        for dim, points in self.cuts.items():
            if dim == SAMPLE:
                counts = [stop - start for _ in counts for start, stop in pairwise(scaled_points(points, samples))]
            elif not is_sites(dim):
                counts = [count for count in counts for _ in points[1:]]
        return tuple(counts)


def scaled_intervals(points: tuple[int, ...], extent: int) -> tuple[Interval, ...]:
    """The intervals between ``points``, scaled."""
    return tuple(Interval(a, b) for a, b in pairwise(scaled_points(points, extent)))


def scaled_points(points: tuple[int, ...], extent: int) -> list[int]:
    """Scaled from ``points[-1]`` to ``extent`` and rounded half up."""
    total = points[-1]
    return [(2 * point * extent + total) // (2 * total) for point in points]


def cut_points(shares: Shares) -> tuple[int, ...]:
    """``(3, 1)`` samples -> cut points ``(0, 3, 4)``."""
    points = [0]
    for share in shares:
        points.append(points[-1] + share)
    return tuple(points)


def equal_shares(samples: int, num_ranks: int) -> tuple[int, ...]:
    """As equal as can be, the first ones larger."""
    each, more = divmod(samples, num_ranks)
    return (each + 1,) * more + (each,) * (num_ranks - more)


def samples_of(shares: Shares, size: int) -> tuple[int, ...]:
    """Samples of each rank in a micro-batch of ``size``, where ``shares`` are those of a full one."""
    return Layout({SAMPLE: cut_points(shares)} if len(shares) > 1 else {}).samples(size)


def parts_of(shares: Shares, size: int) -> tuple[float, ...]:
    """The same where ranks share the sites of a stage: fractions of samples (``costs.stages.placement.loads``)."""
    return tuple(size * share / sum(shares) for share in shares)
