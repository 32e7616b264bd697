from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.quantize import sparse_quantize


def _as_torchsparse(points: np.ndarray, size: float | tuple[float, ...]) -> tuple[np.ndarray, ...]:
    """Unique rows of the floor, in the order of x, then y, then z, with the first point of each."""
    return np.unique(np.floor(points / np.array(size)).astype(np.int32), axis=0, return_index=True, return_inverse=True)


@pytest.mark.parametrize("size", [1, 0.25, (0.5, 1.0, 2.0)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64])
def test_voxels_indices_and_inverses_are_those_of_unique_rows(dtype: type, size: float) -> None:
    points = (np.random.default_rng(0).normal(size=(300, 3)) * 3).astype(dtype)
    voxels, index, inverse = sparse_quantize(points, size, return_index=True, return_inverse=True)
    expected = _as_torchsparse(points, size)
    assert (voxels.dtype, index.dtype) == (np.int32, np.int64)
    np.testing.assert_array_equal(voxels, expected[0])
    np.testing.assert_array_equal(index, expected[1])
    np.testing.assert_array_equal(inverse, expected[2].ravel())


def test_torch_gives_torch_and_the_same() -> None:
    points = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    found = sparse_quantize(torch.from_numpy(points), 0.5, return_index=True, return_inverse=True)
    for one, other in zip(found, sparse_quantize(points, 0.5, return_index=True, return_inverse=True), strict=True):
        assert isinstance(one, torch.Tensor)
        np.testing.assert_array_equal(one.numpy(), other)


def test_only_what_is_asked_for_is_returned() -> None:
    points = np.zeros((4, 3))
    assert isinstance(sparse_quantize(points), np.ndarray)
    assert [len(each) for each in sparse_quantize(points, return_index=True)] == [1, 1]
    assert [len(each) for each in sparse_quantize(points, return_inverse=True)] == [1, 4]


def test_negative_points_go_down() -> None:
    assert sparse_quantize(np.array([[-0.1, -1.0, -1.1]])).tolist() == [[-1, -1, -2]]


@given(st.lists(st.tuples(*[st.integers(-3, 3)] * 3), max_size=30))
def test_voxels_of_the_first_points_are_the_voxels_and_the_inverse_leads_back(rows: list[tuple[int, ...]]) -> None:
    points = np.array(rows, dtype=np.int32).reshape(-1, 3)
    voxels, index, inverse = sparse_quantize(points, return_index=True, return_inverse=True)
    np.testing.assert_array_equal(points[index], voxels)
    np.testing.assert_array_equal(voxels[inverse], points)
    assert len(voxels) == len(set(rows))


def test_an_empty_cloud_has_no_voxels() -> None:
    voxels, index = sparse_quantize(np.empty((0, 3)), return_index=True)
    assert voxels.shape == (0, 3)
    assert index.shape == (0,)


def test_points_given_are_not_changed_and_need_not_be_contiguous() -> None:
    points = np.random.default_rng(0).normal(size=(3, 20)).T
    before = points.copy()
    np.testing.assert_array_equal(sparse_quantize(points), sparse_quantize(before))
    np.testing.assert_array_equal(points, before)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_points_that_are_not_finite_are_counted_and_the_first_named(bad: float) -> None:
    points = np.zeros((6, 3))
    points[2, 1] = points[5, 0] = bad
    with pytest.raises(SparseInputError, match=r"NaN or infinite, the first in row 2: .*found 2 of 6 rows, expected 0"):
        sparse_quantize(points)


@pytest.mark.parametrize("far", [131072.0, -131072.5, 3e9, 1e300])
def test_points_out_of_range_are_counted_and_the_first_named(far: float) -> None:
    points = np.zeros((6, 3))
    points[4, 2] = far
    with pytest.raises(SparseInputError, match=r"1 points out of range, the first in row 4: .*-131072\.\.131071"):
        sparse_quantize(points)


def test_points_at_the_limits_stay() -> None:
    points = np.array([[-131072.0, 131071.9, 0.0]])
    assert sparse_quantize(points).tolist() == [[-131072, 131071, 0]]


@pytest.mark.parametrize("size", [0, -1.0, np.nan, np.inf, (1, 2), (1, 2, 0)])
def test_voxel_sizes_that_are_none_are_refused(size: object) -> None:
    with pytest.raises(SparseInputError, match="voxel size"):
        sparse_quantize(np.zeros((2, 3)), size)


def test_points_of_another_shape_or_kind_are_refused() -> None:
    with pytest.raises(SparseInputError, match=r"shape of points: found \[2, 4\], expected \[N, 3\]"):
        sparse_quantize(np.zeros((2, 4)))
    with pytest.raises(SparseInputError, match="dtype of points"):
        sparse_quantize(torch.zeros(2, 3, dtype=torch.complex64))
