from __future__ import annotations

import pytest
import torch

from cuda_ops.sparse import operators
from cuda_ops.sparse.errors import SparseInputError
from tests.cuda_ops.sparse.clouds import random

pytestmark = pytest.mark.usefixtures("implementation")
INDEX = torch.tensor([4, 0, 4, 2, 4])
BOXES = [0, 2, 1, 3, 0, 4, 1, 1, 0, 5, 0, 4, 2, 3, 3, 5, 1, 4]
"""Of a tensor [3, 5, 4]: three boxes, the second without an element."""


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 2, 2)])
def test_packed_rows_are_those_named(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = random(*shape)
    assert torch.equal(operators.pack_rows(x, INDEX.to(dtype)), x[INDEX])


def test_rows_are_added_one_after_another() -> None:
    base, rows = torch.zeros(5, 1), torch.tensor([[1e8], [7.0], [1.0], [3.0], [-1e8]])
    summed = operators.unpack_add(base, INDEX, rows)
    assert summed.flatten().tolist() == [7, 0, 3, 0, 0]  # 1e8 + 1 - 1e8 in float32, in this order
    assert not base.any()


def test_adding_rows_is_the_adjoint_of_packing_them() -> None:
    x, rows = random(6, 3), random(5, 3, seed=1)
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


def test_gradients_and_their_gradients_match_finite_differences() -> None:
    x, rows, buffer = random(6, 2, grad=True), random(5, 2, seed=1, grad=True), random(5, seed=2, grad=True)
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
    x, none = random(6, 3), torch.empty(0, dtype=torch.int64)
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
