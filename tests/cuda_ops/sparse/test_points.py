from __future__ import annotations

import pytest
import torch

from cuda_ops.sparse import operators
from cuda_ops.sparse.errors import SparseInputError
from tests.cuda_ops.sparse.clouds import random

pytestmark = pytest.mark.usefixtures("implementation")
OPS = torch.ops.halopipe


def _reads(points: int = 9, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows read by points, some absent, and their weights."""
    index = torch.randint(-1, rows, (points, 8), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    index[1] = -1
    return index, random(points, 8, seed=1)


def test_points_get_the_weighted_sum_of_the_rows_that_are_there() -> None:
    x, (index, weight) = random(5, 3), _reads()
    expected = torch.zeros(9, 3, dtype=torch.float64)
    for point, row in enumerate(index.tolist()):
        for corner, source in enumerate(row):
            if source >= 0:
                expected[point] += weight[point, corner] * x[source]
    torch.testing.assert_close(operators.interpolate(x, index, weight), expected, rtol=1e-13, atol=1e-13)
    assert not operators.interpolate(x, index, weight)[1].any()


def test_the_gradient_is_the_adjoint() -> None:
    x, y, (index, weight) = random(5, 3), random(9, 3, seed=2), _reads()
    one = (operators.interpolate(x, index, weight) * y).sum()
    other = (x * OPS.interpolate_backward(y, index, weight, 5)).sum()
    torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def test_gradients_and_their_gradients_match_finite_differences() -> None:
    index, weight = _reads(4)
    x, dy, weight = random(5, 2, grad=True), random(4, 2, seed=3, grad=True), weight.requires_grad_()
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
    x, weight = random(5, 3, dtype=dtype), weight.to(dtype)
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
