"""Which convolution kernel runs a small part of a volume, and that it computes what torch's does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cuda_ops.dense.conv_kernels import NATIVE, ONEDNN, kernel_for, onednn_convolution, runs_in_a_loop

OPTIONS = [
    ((1, 1, 1), (1, 1, 1), (1, 1, 1), False, (0, 0, 0), 1),
    ((2, 1, 3), (0, 2, 1), (1, 2, 1), False, (0, 0, 0), 1),
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mask", [(True, True, True), (True, False, False), (False, True, False)])
def test_a_small_part_of_a_volume_is_computed_as_well_as_by_torch(options, mask):
    x = torch.randn(1, 8, 12, 17, 16)
    weight = torch.randn(8, 8, 3, 3, 3)
    bias = torch.randn(8)
    kernel = kernel_for(x, weight, options)
    assert kernel is ONEDNN  # else torch would run its plain loop
    y = kernel.forward(x, weight, bias, options)
    exact = NATIVE.forward(x.double(), weight.double(), bias.double(), options)
    assert torch.allclose(y.double(), exact, rtol=1e-5, atol=1e-5)
    dy = torch.randn_like(y)
    found = kernel.backward(dy, x, weight, options, mask)
    exact = NATIVE.backward(dy.double(), x.double(), weight.double(), options, mask)
    for ours, theirs, wanted in zip(found, exact, mask, strict=True):
        assert (ours is not None) == wanted
        if wanted:
            assert not ours.is_mkldnn
            assert torch.allclose(ours.double(), theirs, rtol=1e-4, atol=1e-4)


def test_torch_chooses_for_all_else():
    x = torch.randn(1, 8, 12, 17, 16)
    weight = torch.randn(8, 8, 3, 3, 3)
    transposed = (*OPTIONS[0][:3], True, *OPTIONS[0][4:])
    assert kernel_for(x.double(), weight.double(), OPTIONS[0]) is NATIVE  # float64 is exact by torch's kernels alone
    assert kernel_for(x, weight, transposed) is NATIVE
    assert kernel_for(x.expand(4, -1, -1, -1, -1), weight, OPTIONS[0]) is NATIVE  # several samples: oneDNN already
    assert kernel_for(x[:, :, :4, :4, :4], weight, OPTIONS[0]) is NATIVE  # too small to pay
    flat = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    assert kernel_for(x[:, :, 0], weight[:, :, 0], flat) is NATIVE


SMALL_OPTIONS = [
    ((1, 1, 1), (1, 1, 1), (1, 1, 1), 1),
    ((2, 1, 2), (0, 1, 1), (1, 1, 1), 1),
    ((1, 1, 1), (0, 2, 2), (1, 2, 2), 2),
]


@pytest.mark.parametrize("options", SMALL_OPTIONS, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_it_is_torchs_convolution(options: tuple[tuple[int, ...], ...], has_bias: bool) -> None:
    torch.manual_seed(0)
    stride, padding, dilation, groups = options
    x = torch.randn(1, 4, 6, 9, 9)
    weight = torch.randn(6, 4 // groups, 3, 3, 3)
    bias = torch.randn(6) if has_bias else None

    def gradients(is_native: bool) -> list[Tensor]:
        leaves = [each.clone().requires_grad_() for each in (x, weight, bias) if each is not None]
        operands = (*leaves, *([] if has_bias else [None]), stride, padding, dilation)
        if is_native:
            y = torch.ops.aten.convolution.default(*operands, False, (0, 0, 0), groups)
        else:
            y = onednn_convolution(*operands, groups)
        return [y.detach(), *torch.autograd.grad((y * torch.sin(y.detach())).sum(), leaves)]

    for found, expected in zip(gradients(False), gradients(True), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_torch_takes_a_loop_for_small_three_dimensional_tensors_alone() -> None:
    weight = torch.empty(16, 16, 3, 3, 3)
    ones = (1, 1, 1)
    small = torch.empty(1, 16, 16, 64, 64)
    large = torch.empty(2, 16, 64, 64, 64)
    assert runs_in_a_loop(small, weight, ones, ones, ones, 1)
    assert not runs_in_a_loop(large, weight, ones, ones, ones, 1)
    assert not runs_in_a_loop(small.double(), weight.double(), ones, ones, ones, 1)
    flat = torch.empty(1, 16, 64, 64), torch.empty(16, 16, 3, 3)
    assert not runs_in_a_loop(*flat, (1, 1), (1, 1), (1, 1), 1)
