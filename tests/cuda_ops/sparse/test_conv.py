from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv3d, conv_transpose3d

from cuda_ops.sparse import operators, reference
from cuda_ops.sparse import reference as blocks_of
from tests.cuda_ops.sparse import clouds
from tests.cuda_ops.sparse.clouds import KERNELS, ONES, Triple, maps, random, sites

pytestmark = pytest.mark.usefixtures("implementation")
STRIDES = [(1, 1, 1), (2, 2, 2), (3, 3, 3), (1, 2, 3)]
DILATIONS = [(1, 1, 1), (2, 2, 2)]
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def _operands(keys: torch.Tensor, kernel: Triple) -> tuple[torch.Tensor, torch.Tensor]:
    volume = kernel[0] * kernel[1] * kernel[2]
    return random(len(keys), 2, grad=True), random(volume, 2, 3, seed=1, grad=True)


def _assert_same(sparse: torch.Tensor, expected: torch.Tensor, *leaves: torch.Tensor) -> None:
    """Values, and the gradients of all leaves."""
    torch.testing.assert_close(sparse, expected, **CLOSE)
    cotangent = random(*sparse.shape, seed=2)
    for mine, other in zip(
        torch.autograd.grad(sparse, leaves, cotangent), torch.autograd.grad(expected, leaves, cotangent), strict=True
    ):
        torch.testing.assert_close(mine, other, **CLOSE)


@pytest.mark.parametrize("dilation", DILATIONS)
@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_strided_convolution_is_the_dense_one_everywhere(kernel: Triple, stride: Triple, dilation: Triple) -> None:
    keys = sites()
    x, weight = _operands(keys, kernel)
    first, size, out_first = clouds.window(kernel, stride, dilation)
    whole = conv3d(
        clouds.dense(keys, x, first, size), clouds.dense_weight(weight, kernel), stride=stride, dilation=dilation
    )
    out_keys = operators.strided_sites(keys, kernel, stride, dilation)
    y = operators.sparse_conv(x, weight, *maps(keys, out_keys, kernel, stride, dilation))
    _assert_same(clouds.dense(out_keys, y, out_first, whole.shape[2:]), whole, x, weight)


@pytest.mark.parametrize("dilation", DILATIONS)
@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_generative_convolution_is_the_dense_transposed_one_everywhere(
    kernel: Triple, stride: Triple, dilation: Triple
) -> None:
    keys = sites()
    x, weight = _operands(keys, kernel)
    first = [-clouds.EXTENT] * 3
    whole = conv_transpose3d(
        clouds.dense(keys, x, first, [2 * clouds.EXTENT] * 3),
        clouds.dense_weight(weight, kernel).transpose(0, 1),
        stride=stride,
        dilation=dilation,
    )
    lowest = [clouds.axis_offsets(size, step)[0] for size, step in zip(kernel, dilation, strict=True)]
    out_first = [start * step + low for start, step, low in zip(first, stride, lowest, strict=True)]
    out_keys = operators.generated_sites(keys, kernel, stride, dilation)
    y = operators.sparse_conv(x, weight, *maps(keys, out_keys, kernel, stride, dilation, transposed=True))
    _assert_same(clouds.dense(out_keys, y, out_first, whole.shape[2:]), whole, x, weight)


@pytest.mark.parametrize("dilation", DILATIONS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_submanifold_convolution_is_the_dense_one_at_its_sites(kernel: Triple, dilation: Triple) -> None:
    keys = sites()
    x, weight = _operands(keys, kernel)
    first, size, out_first = clouds.window(kernel, ONES, dilation)
    whole = conv3d(clouds.dense(keys, x, first, size), clouds.dense_weight(weight, kernel), dilation=dilation)
    y = operators.sparse_conv(x, weight, *maps(keys, keys, kernel, dilation=dilation))
    _assert_same(y, clouds.at_sites(whole, keys, out_first), x, weight)


@pytest.mark.parametrize("kernel", [(2, 2, 2), (3, 3, 3), (2, 3, 4)])
def test_an_inverse_convolution_is_the_dense_transposed_one_at_the_finer_sites(kernel: Triple) -> None:
    fine = sites()
    stride = (2, 2, 2)
    coarse = operators.strided_sites(fine, kernel, stride, ONES)
    neighbours, reverse = maps(fine, coarse, kernel, stride)
    x, weight = _operands(coarse, kernel)
    first = [-2 * clouds.EXTENT] * 3
    whole = conv_transpose3d(
        clouds.dense(coarse, x, first, [4 * clouds.EXTENT] * 3),
        clouds.dense_weight(weight, kernel).transpose(0, 1),
        stride=stride,
    )
    out_first = [2 * start + clouds.axis_offsets(size, 1)[0] for start, size in zip(first, kernel, strict=True)]
    y = operators.sparse_conv(x, weight, reverse, neighbours)
    _assert_same(y, clouds.at_sites(whole, fine, out_first), x, weight)


def test_gradients_and_their_gradients_match_finite_differences() -> None:
    keys = sites(10, extent=2)
    out_keys = operators.strided_sites(keys, (2, 2, 2), (2, 2, 2), ONES)
    assert len(out_keys) < len(keys)  # else each output may read the input of its own row alone
    neighbours, reverse = maps(keys, out_keys, (2, 2, 2), (2, 2, 2))
    x = random(len(keys), 2, grad=True)
    weight = random(8, 2, 2, grad=True)
    dy = random(len(out_keys), 2, seed=3, grad=True)

    def convolution(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return operators.sparse_conv(x, weight, neighbours, reverse)

    def weight_gradient(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        return operators.sparse_conv_weight(x, dy, neighbours)

    assert torch.autograd.gradcheck(convolution, (x, weight))
    assert torch.autograd.gradgradcheck(convolution, (x, weight))
    assert torch.autograd.gradcheck(weight_gradient, (x, dy))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 2e-3), (torch.bfloat16, 1.6e-2), (torch.float32, 1e-5)])
def test_narrow_dtypes_sum_in_float32(dtype: torch.dtype, bound: float) -> None:
    keys = sites(400, extent=4)
    neighbours, reverse = maps(keys, keys, (3, 3, 3))
    x = random(len(keys), 16, dtype=dtype)
    weight = random(27, 16, 8, dtype=dtype)
    dy = random(len(keys), 8, dtype=dtype)
    for narrow, wide in (
        (
            operators.sparse_conv(x, weight, neighbours, reverse),
            reference.sparse_conv(x.double(), weight.double(), neighbours, reverse),
        ),
        (
            operators.sparse_conv_weight(x, dy, neighbours),
            reference.sparse_conv_weight(x.double(), dy.double(), neighbours),
        ),
    ):
        assert narrow.dtype == dtype
        assert (narrow.double() - wide).abs().max() <= bound * wide.abs().max()


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = sites(1500, extent=6)
    neighbours, reverse = maps(keys, keys, (3, 3, 3))
    x = random(len(keys), 3)
    weight = random(27, 3, 4)
    whole = reference.sparse_conv(x, weight, neighbours, reverse), reference.sparse_conv_weight(x, x, neighbours)
    monkeypatch.setattr(blocks_of, "BLOCK_BYTES", 1)
    assert len(list(blocks_of.blocks(len(keys), weight.shape[1:], x))) > 1
    parts = reference.sparse_conv(x, weight, neighbours, reverse), reference.sparse_conv_weight(x, x, neighbours)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_as_many_outputs_as_inputs_need_not_be_the_same_sites() -> None:
    keys = sites()
    moved = keys + 1  # every site one further along z
    neighbours, reverse = maps(keys, moved, (3, 3, 3))
    x, weight = _operands(keys, (3, 3, 3))
    expected = torch.zeros(len(keys), 3, dtype=torch.float64)
    for row, rows in zip(weight, neighbours.long(), strict=True):
        expected = expected + torch.where(rows[:, None] >= 0, x[rows.clamp(min=0)] @ row, 0)
    _assert_same(operators.sparse_conv(x, weight, neighbours, reverse), expected, x, weight)


def products_are_alike(x: torch.Tensor) -> bool:
    """Whether torch multiplies as a gradient of weights does, with a long sum, alike on one thread and on several."""
    found = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        found.append(x.t() @ x[:, :32])
    return all(torch.equal(each, found[0]) for each in found)


def test_one_thread_and_several_give_the_same_bits(implementation: str) -> None:
    keys = sites(6000, extent=10)
    neighbours, reverse = maps(keys, keys, (3, 3, 3))
    x = random(len(keys), 48, dtype=torch.float32)
    weight = random(27, 48, 32, dtype=torch.float32)
    if implementation == "torch" and not products_are_alike(x):
        pytest.skip("here torch's own matrix products depend on the number of threads")
    found = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        y = operators.sparse_conv(x, weight, neighbours, reverse)
        found.append((y, operators.sparse_conv_weight(x, y, neighbours)))
    for y, dw in found[1:]:
        assert torch.equal(y, found[0][0])
        assert torch.equal(dw, found[0][1])


def test_no_sites_give_no_rows_and_weight_gradients_of_zero() -> None:
    keys = torch.empty(0, dtype=torch.int64)
    neighbours, reverse = maps(keys, keys, (3, 3, 3))
    x = random(0, 2, grad=True)
    weight = random(27, 2, 3, grad=True)
    y = operators.sparse_conv(x, weight, neighbours, reverse)
    y.sum().backward()
    assert y.shape == (0, 3)
    assert not weight.grad.any()


def test_outputs_without_any_neighbour_are_zero() -> None:
    neighbours = torch.full((8, 5), -1, dtype=torch.int32)
    reverse = torch.full((8, 3), -1, dtype=torch.int32)
    assert not operators.sparse_conv(random(3, 2), random(8, 2, 4), neighbours, reverse).any()


def test_autocast_convolves_in_its_own_dtype() -> None:
    keys = sites()
    neighbours, reverse = maps(keys, keys, (3, 3, 3))
    x = random(len(keys), 4, dtype=torch.bfloat16)
    weight = random(27, 4, 4, dtype=torch.float32, grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = operators.sparse_conv(x, weight, neighbours, reverse)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert weight.grad.dtype == torch.float32
