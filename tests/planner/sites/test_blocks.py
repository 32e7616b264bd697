from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from planner.ir.errors import UsageError
from planner.sites.keys import block_keys
from planner.sites.partition import SiteLevel, SiteLoad, block_work


def cloud(seed: int, count: int, stride: int = 1) -> SiteLevel:
    random = np.random.default_rng(seed)
    return SiteLevel(random.integers(3, size=count), random.integers(-9, 9, size=(count, 3)), stride)


def test_work_is_pairs_and_sites_at_their_prices_whatever_the_level() -> None:
    levels = [cloud(0, 200), cloud(1, 60, 2), cloud(2, 20, 16)]
    random = np.random.default_rng(3)
    pairs = [random.integers(0, 28, size=len(level.samples)) for level in levels]
    loads = [
        SiteLoad(0, pairs[0], 2.0),
        SiteLoad(0, pairs[0][::-1], 0.5),
        SiteLoad(1, pairs[1], 3.0, 7.0),
        SiteLoad(2, pairs[2], 0, 1),
    ]
    expected: dict[int, float] = {}
    for level in levels:
        for key in block_keys(level.samples, level.coordinates, level.stride).tolist():
            expected.setdefault(key, 0.0)
    for load in loads:
        level = levels[load.level]
        keys = block_keys(level.samples, level.coordinates, level.stride).tolist()
        for key, count in zip(keys, load.pairs.tolist(), strict=True):
            expected[key] += count * load.pair_s + load.site_s
    work = block_work(levels, loads)
    assert work.keys.tolist() == sorted(expected)
    np.testing.assert_allclose(work.work_s, [expected[key] for key in sorted(expected)], rtol=1e-14)


def test_the_order_of_sites_changes_no_bit() -> None:
    level, pairs = cloud(0, 300), np.random.default_rng(1).integers(0, 28, size=300)
    shuffled = np.random.default_rng(2).permutation(300)
    other = SiteLevel(level.samples[shuffled], level.coordinates[shuffled])
    prices = [(0.1, 0.3), (1 / 3, 0.0)]
    one = block_work([level], [SiteLoad(0, pairs, *price) for price in prices])
    two = block_work([other], [SiteLoad(0, pairs[shuffled], *price) for price in prices])
    assert one.keys.tobytes() == two.keys.tobytes()
    assert one.work_s.tobytes() == two.work_s.tobytes()


def test_blocks_without_any_load_are_there_and_cost_nothing() -> None:
    work = block_work([cloud(0, 50), cloud(1, 5, 16)], [])
    assert len(work.keys) > 5
    assert not work.work_s.any()


@pytest.mark.parametrize("levels", [[], [SiteLevel(np.zeros(0, np.int64), np.zeros((0, 3), np.int32))]])
def test_no_sites_make_no_blocks(levels: list[SiteLevel]) -> None:
    loads = [SiteLoad(0, np.zeros(0, np.int64), 1.0, 1.0) for _ in levels]
    work = block_work(levels, loads)
    assert (len(work.keys), len(work.work_s)) == (0, 0)


def test_levels_may_come_in_any_order() -> None:
    levels = [cloud(seed, 40, 2**seed) for seed in range(3)]
    works = [
        block_work(
            [levels[i] for i in order], [SiteLoad(place, np.full(40, 2**i), 1.0) for place, i in enumerate(order)]
        )
        for order in permutations(range(3))
    ]
    assert len({(work.keys.tobytes(), work.work_s.tobytes()) for work in works}) == 1


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (SiteLoad(1, np.ones(5, np.int64), 1.0), "level 1 of 1"),
        (SiteLoad(-1, np.ones(5, np.int64), 1.0), "level -1 of 1"),
        (SiteLoad(0, np.ones(4, np.int64), 1.0), "level 0: 5 sites, pairs of shape [4]"),
        (SiteLoad(0, np.ones(5, np.int64), -1.0), "-1.0 s a pair"),
        (SiteLoad(0, np.ones(5, np.int64), 1.0, float("nan")), "nan s a site"),
        (SiteLoad(0, np.array([1, 2, 3, 4, -1]), 1.0), "pairs are counts"),
    ],
)
def test_a_load_that_does_not_fit_is_refused(load: SiteLoad, words: str) -> None:
    with pytest.raises(UsageError) as error:
        block_work([cloud(0, 5)], [load])
    assert words in error.value.render()
