from __future__ import annotations

import pytest
import torch

from cuda_ops.sparse import operators
from cuda_ops.sparse.errors import SparseInputError
from tests.cuda_ops.sparse.clouds import random

pytestmark = pytest.mark.usefixtures("implementation")
STARTS, LENGTHS = torch.tensor([6, 3, 0, 4, 9]), torch.tensor([3, 0, 3, 2, 0])
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
    x, cells = random(ROWS, 3, grad=True), torch.arange(ROWS) * 2 % 3
    expected = torch.zeros(5, 3, 4, dtype=torch.float64)
    dy, gradient = random(5, 3, 4, seed=1), torch.zeros(ROWS, 3, dtype=torch.float64)
    for segment, run in enumerate(_runs()):
        for row in range(run.start, run.stop):
            expected[segment, :, cells[row]] += x[row].detach()
            gradient[row] = dy[segment, :, cells[row]]
    grid = operators.segment_grid(x, cells, STARTS, LENGTHS, 4)
    torch.testing.assert_close(grid, expected, rtol=1e-13, atol=1e-13)
    grid.backward(dy)
    torch.testing.assert_close(x.grad, gradient, rtol=1e-13, atol=1e-13)


def test_expanding_is_the_adjoint_of_summing() -> None:
    x, y = random(ROWS, 3), random(5, 3, seed=1)
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
def test_gradients_and_their_gradients_match_finite_differences(function) -> None:
    x = random(ROWS, 2, grad=True)
    assert torch.autograd.gradcheck(function, (x,))
    assert torch.autograd.gradgradcheck(function, (x,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes_sum_in_float32(dtype: torch.dtype) -> None:
    x = torch.ones(4096, 1, dtype=dtype)
    assert operators.segment_sum(x, torch.tensor([0]), torch.tensor([4096])).item() == 4096
    assert operators.segment_max(x, torch.tensor([0]), torch.tensor([4096]))[0].dtype == dtype


def test_no_rows_and_no_segments_give_zeros_and_nothing() -> None:
    none, two = torch.empty(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
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
