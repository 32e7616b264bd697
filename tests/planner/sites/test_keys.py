from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.ir.errors import UsageError
from planner.sites.keys import BLOCK, HALF, block_keys, pack, unpack

AXIS = st.integers(-HALF, HALF - 1)
SITE = st.tuples(st.integers(0, 511), AXIS, AXIS, AXIS)


@given(st.lists(SITE, min_size=1, max_size=20))
def test_keys_unpack_to_what_was_packed_and_sort_as_rows_do(rows: list[tuple[int, int, int, int]]) -> None:
    sites = np.array(rows)
    keys = pack(sites[:, 0], sites[:, 1:])
    samples, coordinates = unpack(keys)
    np.testing.assert_array_equal(np.column_stack([samples, coordinates]), sites)
    by_key = [rows[place] for place in np.argsort(keys, kind="stable")]
    assert by_key == sorted(rows)
    assert keys.min() >= 0


def test_the_picture() -> None:
    fine = np.arange(-5, 6)
    origins = np.repeat([-6, -4, -2, 0, 2, 4], 2)[1:]
    np.testing.assert_array_equal(fine // 2 * 2, origins)
    for stride, expected in ((1, [-2, *[-1] * 4, *[0] * 4, 1, 1]), (2, [-2, *[-1] * 4, *[0] * 4, 1, 1])):
        sites = np.zeros((11, 3), np.int32)
        sites[:, 1] = fine // stride
        blocks = unpack(block_keys(np.zeros(11, np.int64), sites, stride))[1]
        assert blocks[:, 1].tolist() == expected


@given(SITE, st.integers(1, 64))
def test_a_coarse_site_lies_in_the_block_of_its_origin(site: tuple[int, int, int, int], stride: int) -> None:
    sample, *fine = site
    coarse = np.array([fine]) // stride
    origin = coarse * stride
    number = np.array([sample])
    if origin.min() >= -HALF:
        np.testing.assert_array_equal(block_keys(number, coarse, stride), block_keys(number, origin))
    low, high = -HALF // BLOCK, HALF // BLOCK - 1
    expected = np.clip(np.floor(origin / BLOCK), low, high)
    np.testing.assert_array_equal(unpack(block_keys(number, coarse, (stride,) * 3))[1], expected)


def test_a_stride_of_its_own_for_each_axis() -> None:
    found = unpack(block_keys(np.array([3]), np.array([[5, 5, -5]], np.int32), (1, 2, 4)))
    assert (found[0].tolist(), found[1].tolist()) == ([3], [[1, 2, -5]])


def test_beyond_the_range_the_outermost_block_counts() -> None:
    sites = np.array([[HALF, -HALF - 1, 0], [10 * HALF, 0, 0]])
    last, first = HALF // BLOCK - 1, -HALF // BLOCK
    assert unpack(block_keys(np.array([0, 0]), sites))[1].tolist() == [[last, first, 0], [last, 0, 0]]


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
