"""Pools over maps, sums and maxima over segments, features at points and rows of halos, of each implementation."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv3d, max_pool3d

from cuda_ops.sparse import operators
from cuda_ops.sparse.errors import SparseInputError
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
    neighbours = torch.full((8, 2), -1, dtype=torch.int32)
    reverse = torch.full((8, 3), -1, dtype=torch.int32)
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


STARTS = torch.tensor([6, 3, 0, 4, 9])
LENGTHS = torch.tensor([3, 0, 3, 2, 0])
"""Neither ascending nor without gaps: row 3 and rows 9.. are in no segment."""
ROWS = 11


def _runs() -> list[slice]:
    return [slice(start, start + length) for start, length in zip(STARTS.tolist(), LENGTHS.tolist(), strict=True)]


def test_sums_are_those_of_the_rows() -> None:
    x = random(ROWS, 3)
    expected = torch.stack([x[run].sum(0) for run in _runs()])
    torch.testing.assert_close(operators.segment_sum(x, STARTS, LENGTHS), expected, rtol=1e-13, atol=1e-13)


def test_the_largest_names_its_row_and_an_empty_segment_none() -> None:
    x = random(ROWS, 3) - 5
    largest, rows = operators.segment_max(x, STARTS, LENGTHS)
    for segment, run in enumerate(_runs()):
        if x[run].numel():
            assert torch.equal(largest[segment], x[run].max(0).values)
            assert torch.equal(rows[segment], (x[run].max(0).indices + run.start).int())
        else:
            assert largest[segment].tolist() == [0, 0, 0]
            assert rows[segment].tolist() == [-1, -1, -1]


def test_of_equals_the_first_row_wins_and_nan_before_all() -> None:
    x = torch.tensor([[1.0, 2.0], [1.0, torch.nan], [0.0, torch.nan], [-torch.inf, -torch.inf]])
    largest, rows = operators.segment_max(x, torch.tensor([0, 3]), torch.tensor([3, 1]))
    assert rows.tolist() == [[0, 1], [3, 3]]
    assert largest[0, 1].isnan()
    assert largest[1].tolist() == [-torch.inf, -torch.inf]


def test_rows_get_their_segment_and_those_of_none_zero() -> None:
    y = random(5, 2)
    expected = torch.zeros(ROWS, 2, dtype=torch.float64)
    for segment, run in enumerate(_runs()):
        expected[run] = y[segment]
    assert torch.equal(operators.segment_expand(y, STARTS, LENGTHS, ROWS), expected)


def test_a_cell_has_the_sum_of_its_rows_and_a_row_of_no_segment_no_gradient() -> None:
    x = random(ROWS, 3, grad=True)
    cells = torch.arange(ROWS) * 2 % 3
    expected = torch.zeros(5, 3, 4, dtype=torch.float64)
    dy = random(5, 3, 4, seed=1)
    gradient = torch.zeros(ROWS, 3, dtype=torch.float64)
    for segment, run in enumerate(_runs()):
        for row in range(run.start, run.stop):
            expected[segment, :, cells[row]] += x[row].detach()
            gradient[row] = dy[segment, :, cells[row]]
    grid = operators.segment_grid(x, cells, STARTS, LENGTHS, 4)
    torch.testing.assert_close(grid, expected, rtol=1e-13, atol=1e-13)
    grid.backward(dy)
    torch.testing.assert_close(x.grad, gradient, rtol=1e-13, atol=1e-13)


def test_expanding_is_the_adjoint_of_summing() -> None:
    x = random(ROWS, 3)
    y = random(5, 3, seed=1)
    one = (operators.segment_sum(x, STARTS, LENGTHS) * y).sum()
    other = (x * operators.segment_expand(y, STARTS, LENGTHS, ROWS)).sum()
    torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: operators.segment_sum(x, STARTS, LENGTHS),
        lambda x: operators.segment_max(x, STARTS, LENGTHS)[0],
        lambda x: operators.segment_expand(x[:5], STARTS, LENGTHS, ROWS),
    ],
    ids=["sum", "max", "expand"],
)
def test_gradients_of_segments_and_theirs_match_finite_differences(function) -> None:
    x = random(ROWS, 2, grad=True)
    assert torch.autograd.gradcheck(function, (x,))
    assert torch.autograd.gradgradcheck(function, (x,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes_sum_in_float32(dtype: torch.dtype) -> None:
    x = torch.ones(4096, 1, dtype=dtype)
    assert operators.segment_sum(x, torch.tensor([0]), torch.tensor([4096])).item() == 4096
    assert operators.segment_max(x, torch.tensor([0]), torch.tensor([4096]))[0].dtype == dtype


def test_no_rows_and_no_segments_give_zeros_and_nothing() -> None:
    none = torch.empty(0, dtype=torch.int64)
    two = torch.zeros(2, dtype=torch.int64)
    x = random(0, 3, grad=True)
    for y in (operators.segment_sum(x, two, two), operators.segment_max(x, two, two)[0]):
        assert y.tolist() == [[0, 0, 0]] * 2
        y.sum().backward()
    assert operators.segment_sum(random(4, 3), none, none).shape == (0, 3)
    assert operators.segment_max(random(4, 3), none, none)[1].shape == (0, 3)
    assert not operators.segment_expand(random(0, 3), none, none, 4).any()
    assert operators.segment_expand(random(2, 3), two, two, 0).shape == (0, 3)


def test_unequal_starts_and_lengths_are_refused() -> None:
    with pytest.raises(SparseInputError, match="starts and lengths: found 5, expected 4"):
        operators.segment_sum(random(ROWS, 3), STARTS, LENGTHS[:4])


OPS = torch.ops.halopipe


def _reads(points: int = 9, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows read by points, some absent, and their weights."""
    index = torch.randint(-1, rows, (points, 8), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    index[1] = -1
    return index, random(points, 8, seed=1)


def test_points_get_the_weighted_sum_of_the_rows_that_are_there() -> None:
    x = random(5, 3)
    index, weight = _reads()
    expected = torch.zeros(9, 3, dtype=torch.float64)
    for point, row in enumerate(index.tolist()):
        for corner, source in enumerate(row):
            if source >= 0:
                expected[point] += weight[point, corner] * x[source]
    torch.testing.assert_close(operators.interpolate(x, index, weight), expected, rtol=1e-13, atol=1e-13)
    assert not operators.interpolate(x, index, weight)[1].any()


def test_the_gradient_is_the_adjoint() -> None:
    x = random(5, 3)
    y = random(9, 3, seed=2)
    index, weight = _reads()
    one = (operators.interpolate(x, index, weight) * y).sum()
    other = (x * OPS.interpolate_backward(y, index, weight, 5)).sum()
    torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def test_gradients_of_points_and_theirs_match_finite_differences() -> None:
    index, weight = _reads(4)
    x = random(5, 2, grad=True)
    dy = random(4, 2, seed=3, grad=True)
    weight = weight.requires_grad_()
    for function, inputs in (
        (lambda x, weight: operators.interpolate(x, index, weight), (x, weight)),
        (lambda dy, weight: OPS.interpolate_backward(dy, index, weight, 5), (dy, weight)),
        (lambda x, dy: OPS.interpolate_weight(x, dy, index), (x, dy)),
    ):
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes_keep_their_dtype(dtype: torch.dtype) -> None:
    index, weight = _reads()
    x = random(5, 3, dtype=dtype)
    weight = weight.to(dtype)
    y = operators.interpolate(x, index, weight)
    assert y.dtype == dtype
    torch.testing.assert_close(
        y, operators.interpolate(x.double(), index, weight.double()).to(dtype), rtol=1e-2, atol=1e-3
    )


def test_no_points_and_no_rows_give_nothing_and_zeros() -> None:
    index, weight = _reads()
    x = random(5, 3, grad=True)
    operators.interpolate(x, index[:0], weight[:0]).sum().backward()
    assert not x.grad.any()
    assert not operators.interpolate(random(0, 3), torch.full_like(index, -1), weight).any()


def test_weights_of_another_shape_are_refused() -> None:
    index, weight = _reads()
    with pytest.raises(SparseInputError, match=r"shape of the weights: found \[9, 7\], expected \[9, 8\]"):
        operators.interpolate(random(5, 3), index, weight[:, :7])


INDEX = torch.tensor([4, 0, 4, 2, 4])
BOXES = [0, 2, 1, 3, 0, 4, 1, 1, 0, 5, 0, 4, 2, 3, 3, 5, 1, 4]
"""Of a tensor [3, 5, 4]: three boxes, the second without an element."""


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 2, 2)])
def test_packed_rows_are_those_named(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = random(*shape)
    assert torch.equal(operators.pack_rows(x, INDEX.to(dtype)), x[INDEX])


def test_rows_are_added_one_after_another() -> None:
    base = torch.zeros(5, 1)
    rows = torch.tensor([[1e8], [7.0], [1.0], [3.0], [-1e8]])
    summed = operators.unpack_add(base, INDEX, rows)
    assert summed.flatten().tolist() == [7, 0, 3, 0, 0]  # 1e8 + 1 - 1e8 in float32, in this order
    assert not base.any()


def test_adding_rows_is_the_adjoint_of_packing_them() -> None:
    x = random(6, 3)
    rows = random(5, 3, seed=1)
    one = (operators.pack_rows(x, INDEX) * rows).sum()
    other = (x * operators.unpack_add(torch.zeros_like(x), INDEX, rows)).sum()
    torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def test_boxes_are_packed_one_after_another_and_put_back() -> None:
    x = random(3, 5, 4)
    buffer = operators.pack_boxes(x, BOXES)
    assert torch.equal(buffer, torch.cat([x[0:2, 1:3, 0:4].flatten(), x[2:3, 3:5, 1:4].flatten()]))
    filled = operators.unpack_boxes(buffer, torch.zeros_like(x), BOXES)
    assert torch.equal(filled[0:2, 1:3], x[0:2, 1:3])
    assert torch.equal(filled[2, 3:5, 1:4], x[2, 3:5, 1:4])
    assert (filled != 0).sum() == len(buffer)
    assert torch.equal(operators.unpack_boxes(buffer, x, BOXES, add=True), x + filled)


def test_boxes_of_tensors_in_another_order_of_memory_are_the_same() -> None:
    x = random(4, 5, 3).permute(2, 1, 0)
    buffer = operators.pack_boxes(x, BOXES)
    assert torch.equal(buffer, operators.pack_boxes(x.contiguous(), BOXES))
    assert torch.equal(operators.unpack_boxes(buffer, x, BOXES), x)


def test_overlapping_boxes_are_added_both() -> None:
    x = operators.unpack_boxes(torch.tensor([1.0, 2.0, 10.0, 20.0]), torch.zeros(3), [0, 2, 1, 3], add=True)
    assert x.tolist() == [1, 12, 20]


def test_unpacking_boxes_is_the_adjoint_of_packing_them() -> None:
    boxes = [*BOXES, 0, 3, 0, 3, 0, 3]  # overlapping too
    x = random(3, 5, 4)
    buffer = random(len(operators.pack_boxes(x, boxes)), seed=1)
    one = (operators.pack_boxes(x, boxes) * buffer).sum()
    other = (x * operators.unpack_boxes(buffer, torch.zeros_like(x), boxes, add=True)).sum()
    torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def test_gradients_of_rows_and_theirs_match_finite_differences() -> None:
    x = random(6, 2, grad=True)
    rows = random(5, 2, seed=1, grad=True)
    buffer = random(5, seed=2, grad=True)
    boxes = [0, 2, 1, 2, 3, 6, 0, 1]
    for function, inputs in (
        (lambda x: operators.pack_rows(x, INDEX), (x,)),
        (lambda x, rows: operators.unpack_add(x, INDEX, rows), (x, rows)),
        (lambda x: operators.pack_boxes(x, boxes), (x,)),
        (lambda buffer, x: operators.unpack_boxes(buffer, x, boxes, False), (buffer, x)),
        (lambda buffer, x: operators.unpack_boxes(buffer, x, boxes, True), (buffer, x)),
    ):
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_other_dtypes_pass_unchanged(dtype: torch.dtype) -> None:
    x = random(6, 3, dtype=dtype)
    assert torch.equal(operators.pack_rows(x, INDEX), x[INDEX])
    assert torch.equal(operators.unpack_add(torch.zeros_like(x), torch.arange(6), x), x)
    assert torch.equal(operators.pack_boxes(x, [0, 6, 0, 3]), x.flatten())


def test_nothing_is_packed_and_put_back() -> None:
    x = random(6, 3)
    none = torch.empty(0, dtype=torch.int64)
    assert operators.pack_rows(x, none).shape == (0, 3)
    back = operators.unpack_add(x, none, x[:0])
    assert torch.equal(back, x)
    assert back.data_ptr() != x.data_ptr()
    assert operators.pack_boxes(x, []).shape == (0,)
    assert torch.equal(operators.unpack_boxes(x.new_empty(0), x, []), x)


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([0, 2, 0], r"numbers of boxes: found 3, expected a multiple of 4"),
        ([0, 2, 0, 3, 1, 7, 0, 1], r"box 1 along dimension 0: found 1\.\.7, expected within 0\.\.6"),
        ([2, 1, 0, 3], r"box 0 along dimension 0: found 2\.\.1"),
    ],
)
def test_boxes_that_do_not_fit_are_refused(boxes: list[int], message: str) -> None:
    with pytest.raises(SparseInputError, match=message):
        operators.pack_boxes(random(6, 3), boxes)


def test_buffers_and_rows_of_another_length_are_refused() -> None:
    with pytest.raises(SparseInputError, match=r"shape of the buffer: found \[4\], expected \[6\]"):
        operators.unpack_boxes(random(4), random(6, 3), [0, 2, 0, 3])
    with pytest.raises(SparseInputError, match=r"shape of the rows: found \[4, 3\], expected \[5, 3\]"):
        operators.unpack_add(random(6, 3), INDEX, random(4, 3))


def test_boxes_that_overlap_are_refused_where_one_would_win() -> None:
    with pytest.raises(SparseInputError, match="boxes 0 and 1 overlap"):
        operators.unpack_boxes(torch.ones(4), torch.zeros(3), [0, 2, 1, 3])
