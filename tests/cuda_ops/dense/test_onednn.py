from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cuda_ops.dense.conv_kernels import onednn_convolution, runs_in_a_loop

OPTIONS = [
    ((1, 1, 1), (1, 1, 1), (1, 1, 1), 1),
    ((2, 1, 2), (0, 1, 1), (1, 1, 1), 1),
    ((1, 1, 1), (0, 2, 2), (1, 2, 2), 2),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_it_is_torchs_convolution(options: tuple[tuple[int, ...], ...], has_bias: bool) -> None:
    torch.manual_seed(0)
    stride, padding, dilation, groups = options
    x, weight = torch.randn(1, 4, 6, 9, 9), torch.randn(6, 4 // groups, 3, 3, 3)
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
    small, large = torch.empty(1, 16, 16, 64, 64), torch.empty(2, 16, 64, 64, 64)
    assert runs_in_a_loop(small, weight, ones, ones, ones, 1)
    assert not runs_in_a_loop(large, weight, ones, ones, ones, 1)
    assert not runs_in_a_loop(small.double(), weight.double(), ones, ones, ones, 1)
    flat = torch.empty(1, 16, 64, 64), torch.empty(16, 16, 3, 3)
    assert not runs_in_a_loop(*flat, (1, 1), (1, 1), (1, 1), 1)
