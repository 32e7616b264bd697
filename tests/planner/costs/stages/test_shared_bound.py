"""The least largest time of a group's members, and the least mean over samples, beside all shares."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from planner.costs.layers.cost_table import Array
from planner.costs.stages.shared_bound import GroupTimes, MemberTimes, Times

LAYERS = 3


class Chain:
    """Cuts before, between and behind layers."""

    def sums(self, by_layer: Array) -> Array:
        return np.concatenate(([0.0], np.cumsum(by_layer)))

    def largest(self, by_layer: Array) -> Array:
        raise NotImplementedError(by_layer)


def member(draw: np.random.Generator, most: int) -> MemberTimes:
    """Times that grow, sometimes by nothing."""
    more = draw.uniform(0, 1, (most, LAYERS)) * draw.choice([0, 1], (most, LAYERS))
    times = Times.of(np.cumsum(more, axis=0) + draw.uniform(0, 1, (1, LAYERS)), Chain())
    return MemberTimes(times, times, times, times, np.zeros(LAYERS + 1), 1.0)


def work(member: MemberTimes) -> Times:
    return member.work


def all_shares(size: int, count: int) -> Iterator[tuple[int, ...]]:
    return (shares for shares in product(range(1, size + 1), repeat=count) if sum(shares) == size)


@pytest.mark.parametrize("seed", range(60))
def test_no_shares_have_a_lesser_largest_time_nor_a_lesser_mean(seed: int) -> None:
    draw = np.random.default_rng(seed)
    counts = tuple(int(count) for count in draw.integers(1, 3, draw.integers(1, 4)))
    size = int(draw.integers(sum(counts), sum(counts) + 4))
    tops = [np.full((LAYERS + 1, LAYERS + 1), draw.integers(1, size + 1)) for _ in counts]
    group = GroupTimes(
        tuple(member(draw, size) for _ in counts),
        counts,
        size,
        tuple(top if draw.random() < 0.5 else None for top in tops),
    )
    first, last = (np.array(ends) for ends in zip(*((a, b) for b in range(LAYERS + 1) for a in range(b)), strict=True))
    seconds, level = group.levels(work, first, last)
    mean = group.mean(work, first, last)
    sorts = [sort for sort, count in enumerate(counts) for _ in range(count)]
    for place, (a, b) in enumerate(zip(first, last, strict=True)):

        def takes(sort: int, samples: int, a: int = int(a), b: int = int(b)) -> float:
            most = group.most[sort]
            if most is not None and samples > most[a, b]:
                return float("inf")
            sums = group.members[sort].work.sums
            return float(sums[samples - 1, b] - sums[samples - 1, a])

        every = [list(map(takes, sorts, shares)) for shares in all_shares(size, len(sorts))]
        least_s = min(map(max, every))
        assert seconds[place] == pytest.approx(least_s)
        for shares, own in zip(all_shares(size, len(sorts)), every, strict=True):
            assert sum(n * s for n, s in zip(shares, own, strict=True)) / size >= mean[place] - 1e-9
        if np.isfinite(least_s):
            shares = group.shares(level[:, place].tolist())
            assert sum(shares) == size
            assert max(map(takes, sorts, shares)) == pytest.approx(least_s)
