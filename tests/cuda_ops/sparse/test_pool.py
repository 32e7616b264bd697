from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv3d, max_pool3d

from cuda_ops.sparse import operators
from tests.cuda_ops.sparse import clouds
from tests.cuda_ops.sparse.clouds import KERNELS, ONES, Triple, maps, random, sites

pytestmark = pytest.mark.usefixtures("implementation")
STRIDES = [(1, 1, 1), (2, 2, 2), (3, 3, 3)]
DILATIONS = [(1, 1, 1), (2, 2, 2)]


def _pooled(kernel: Triple, stride: Triple, dilation: Triple) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple]:
    keys = sites()
    out_keys = operators.strided_sites(keys, kernel, stride, dilation)
    neighbours, reverse = maps(keys, out_keys, kernel, stride, dilation)
    return keys, out_keys, random(len(keys), 3, grad=True), (neighbours, reverse)


@pytest.mark.parametrize("dilation", DILATIONS)
@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_largest_and_its_gradient_are_those_of_the_dense_pooling(
    kernel: Triple, stride: Triple, dilation: Triple
) -> None:
    keys, out_keys, x, found = _pooled(kernel, stride, dilation)
    first, size, out_first = clouds.window(kernel, stride, dilation)
    grid = clouds.dense(keys, x, first, size, fill=-torch.inf)
    whole = max_pool3d(grid, kernel, stride, dilation=dilation)
    assert (whole > -torch.inf)[:, 0].sum() == len(out_keys)
    expected = clouds.at_sites(whole, out_keys, out_first)
    largest, rows = operators.sparse_max_pool(x, *found)
    assert torch.equal(largest, expected)
    assert torch.equal(largest, x.gather(0, rows.long()))
    dy = random(*largest.shape, seed=1)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, dy)[0] for y in (largest, expected)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dilation", DILATIONS)
@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_mean_of_those_there_is_that_of_a_dense_grid_with_a_mask(
    kernel: Triple, stride: Triple, dilation: Triple
) -> None:
    keys, out_keys, x, (neighbours, reverse) = _pooled(kernel, stride, dilation)
    first, size, out_first = clouds.window(kernel, stride, dilation)
    ones = x.new_ones(1, 1, *kernel)
    sums = conv3d(
        clouds.dense(keys, x, first, size), ones.expand(3, 1, *kernel), stride=stride, dilation=dilation, groups=3
    )
    mask = clouds.dense(keys, x.new_ones(len(keys), 1), first, size)
    expected = clouds.at_sites(sums / conv3d(mask, ones, stride=stride, dilation=dilation), out_keys, out_first)
    mean = operators.sparse_sum_pool(x, neighbours, reverse) / (neighbours >= 0).sum(0)[:, None]
    torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-12)
    dy = random(*mean.shape, seed=1)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, dy)[0] for y in (mean, expected)), rtol=1e-12, atol=1e-12)


def test_gradients_and_their_gradients_match_finite_differences() -> None:
    keys = sites(9, extent=1)
    neighbours, reverse = maps(keys, keys, (3, 3, 3))
    neighbours = torch.nn.functional.pad(neighbours, (0, 1), value=-1)  # one more output, which has none
    x = random(len(keys), 2, grad=True)
    for pool in (
        lambda x: operators.sparse_max_pool(x, neighbours, reverse)[0],
        lambda x: operators.sparse_sum_pool(x, neighbours, reverse),
    ):
        assert torch.autograd.gradcheck(pool, (x,))
        assert torch.autograd.gradgradcheck(pool, (x,))


def test_of_equals_the_smallest_offset_wins() -> None:
    neighbours = torch.tensor([[-1, 2], [1, 1], [0, 0]], dtype=torch.int32)
    reverse = operators.reversed_map(neighbours, 3)
    x = torch.tensor([[5.0], [5.0], [5.0]], dtype=torch.float64)
    assert operators.sparse_max_pool(x, neighbours, reverse)[1].tolist() == [[1], [2]]


def test_nan_spreads_and_is_named() -> None:
    neighbours = torch.tensor([[0], [1], [2]], dtype=torch.int32)
    x = torch.tensor([[1.0], [torch.nan], [3.0]])
    largest, rows = operators.sparse_max_pool(x, neighbours, operators.reversed_map(neighbours, 3))
    assert largest.isnan().all()
    assert rows.tolist() == [[1]]
    x[2] = torch.nan  # of several the first
    assert operators.sparse_max_pool(x, neighbours, operators.reversed_map(neighbours, 3))[1].tolist() == [[1]]


def test_outputs_without_neighbours_are_zero_and_name_none() -> None:
    neighbours, reverse = torch.full((8, 2), -1, dtype=torch.int32), torch.full((8, 3), -1, dtype=torch.int32)
    x = random(3, 4, grad=True)
    largest, rows = operators.sparse_max_pool(x - 9, neighbours, reverse)
    assert not largest.any()
    assert rows.unique().tolist() == [-1]
    (largest.sum() + operators.sparse_sum_pool(x, neighbours, reverse).sum()).backward()
    assert not x.grad.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_dtypes_keep_their_dtype_and_sum_in_float32(dtype: torch.dtype) -> None:
    keys = sites(400, extent=4)
    found = maps(keys, keys, (3, 3, 3))
    x = random(len(keys), 4, dtype=dtype)
    assert torch.equal(
        operators.sparse_max_pool(x, *found)[0], operators.sparse_max_pool(x.double(), *found)[0].to(dtype)
    )
    sums = operators.sparse_sum_pool(x, *found)
    assert sums.dtype == dtype
    torch.testing.assert_close(sums, operators.sparse_sum_pool(x.double(), *found).to(dtype), rtol=1e-2, atol=1e-3)


def test_empty_sets_pool_to_nothing() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    found = maps(empty, empty, (2, 2, 2), (2, 2, 2), ONES)
    x = random(0, 3, grad=True)
    largest, _ = operators.sparse_max_pool(x, *found)
    (largest.sum() + operators.sparse_sum_pool(x, *found).sum()).backward()
    assert largest.shape == x.grad.shape == (0, 3)
