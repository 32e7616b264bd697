"""Blocks of sites: their keys, and the work in each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.ir.errors import UsageError
from planner.sites.keys import BLOCK, HALF, block_keys, pack, unpack
from planner.sites.work import SiteLevel, SiteLoad, block_work

AXIS = st.integers(-HALF, HALF - 1)
BEYOND = st.integers(-2 * HALF, 2 * HALF)


@given(st.lists(st.tuples(st.integers(0, 511), AXIS, AXIS, AXIS), min_size=1, max_size=20))
def test_keys_unpack_to_what_was_packed_and_sort_as_rows_do(rows: list[tuple[int, int, int, int]]) -> None:
    sites = np.array(rows)
    keys = pack(sites[:, 0], sites[:, 1:])
    samples, coordinates = unpack(keys)
    np.testing.assert_array_equal(np.column_stack([samples, coordinates]), sites)
    by_key = [rows[place] for place in np.argsort(keys, kind="stable")]
    assert by_key == sorted(rows)
    assert keys.min() >= 0


@given(st.integers(0, 511), st.tuples(BEYOND, BEYOND, BEYOND), st.tuples(*[st.integers(1, 64)] * 3))
def test_a_coarse_site_lies_in_the_block_of_its_origin_and_beyond_the_range_in_the_outermost(
    sample: int, fine: tuple[int, int, int], strides: tuple[int, int, int]
) -> None:
    number = np.array([sample])
    for stride in (strides, strides[0]):
        coarse = np.array([fine]) // np.array(stride)
        expected = np.clip(coarse * np.array(stride) // BLOCK, -HALF // BLOCK, HALF // BLOCK - 1)
        samples, blocks = unpack(block_keys(number, coarse, stride))
        assert (samples.tolist(), blocks.tolist()) == ([sample], expected.tolist())


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("samples", "coordinates", "stride", "words"),
    [
        ([0], [[0, 0]], 1, "do not match"),
        ([0, 1], [[0, 0, 0]], 1, "do not match"),
        ([0], [[0.5, 0, 0]], 1, "coordinates are not integers"),
        ([0.0], [[0, 0, 0]], 1, "samples are not integers"),
        ([0], [[0, 0, 0]], 0, "not a stride"),
        ([0], [[0, 0, 0]], (2, 2), "not a stride"),
        ([512], [[0, 0, 0]], 1, "out of range"),
        ([-1], [[0, 0, 0]], 1, "samples -1 to -1, 512 at most"),
    ],
)
def test_what_is_no_site_is_refused(samples: object, coordinates: object, stride: object, words: str) -> None:
    with pytest.raises(UsageError) as error:
        block_keys(np.array(samples), np.array(coordinates), stride)  # type: ignore[arg-type]
    assert words in error.value.render()


def test_blocks_are_keyed_as_the_kernels_key_sites() -> None:
    torch = pytest.importorskip("torch")
    from cuda_ops.sparse import keys as sites

    rows = np.random.default_rng(0).integers(-HALF, HALF, size=(100, 4))
    rows[:, 0] = np.arange(100) * 5
    rows[:2, 1:] = [[-HALF] * 3, [HALF - 1] * 3]
    expected = sites.pack(torch.from_numpy(rows.astype(np.int32)))
    assert pack(rows[:, 0], rows[:, 1:]).tolist() == expected.tolist()


def cloud(seed: int, count: int, stride: int = 1) -> SiteLevel:
    random = np.random.default_rng(seed)
    return SiteLevel(random.integers(3, size=count), random.integers(-9, 9, size=(count, 3)), stride)


def test_work_is_pairs_and_sites_at_their_prices_whatever_the_level() -> None:
    levels = [cloud(0, 200), cloud(1, 60, 2), cloud(2, 20, 16), cloud(4, 5, 32)]  # nothing loads the last
    random = np.random.default_rng(3)
    pairs = [random.integers(0, 28, size=len(level.samples)) for level in levels]
    loads = [
        SiteLoad(0, pairs[0], 2.0),
        SiteLoad(0, pairs[0][::-1], 0.5),
        SiteLoad(1, pairs[1], 3.0, 7.0),
        SiteLoad(2, pairs[2], 0, 1),
    ]
    keys = [block_keys(level.samples, level.coordinates, level.stride).tolist() for level in levels]
    expected = {key: 0.0 for of_level in keys for key in of_level}
    for load in loads:
        for key, count in zip(keys[load.level], load.pairs.tolist(), strict=True):
            expected[key] += count * load.pair_s + load.site_s
    work = block_work(levels, loads)
    assert work.keys.tolist() == sorted(expected)
    np.testing.assert_allclose(work.work_s, [expected[key] for key in sorted(expected)], rtol=1e-14)


def test_the_order_of_sites_and_levels_changes_no_bit() -> None:
    levels = [cloud(0, 300), cloud(1, 40, 2)]
    pairs = np.random.default_rng(1).integers(0, 28, size=300)
    shuffled = np.random.default_rng(2).permutation(300)
    other = SiteLevel(levels[0].samples[shuffled], levels[0].coordinates[shuffled])
    few = np.full(40, 3)
    one = block_work(levels, [SiteLoad(0, pairs, 0.1, 0.3), SiteLoad(0, pairs, 1 / 3), SiteLoad(1, few, 0.7)])
    loads = [SiteLoad(1, pairs[shuffled], 0.1, 0.3), SiteLoad(1, pairs[shuffled], 1 / 3), SiteLoad(0, few, 0.7)]
    two = block_work([levels[1], other], loads)
    assert (one.keys.tobytes(), one.work_s.tobytes()) == (two.keys.tobytes(), two.work_s.tobytes())


@pytest.mark.parametrize("levels", [[], [SiteLevel(np.zeros(0, np.int64), np.zeros((0, 3), np.int32))]])
def test_no_sites_make_no_blocks(levels: list[SiteLevel]) -> None:
    work = block_work(levels, [SiteLoad(0, np.zeros(0, np.int64), 1.0, 1.0) for _ in levels])
    assert (len(work.keys), len(work.work_s)) == (0, 0)


@pytest.mark.every_case
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
