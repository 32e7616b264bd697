"""A convolution by the kernel that this house would choose, as one differentiable call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from cuda_ops.conv_kernels import NATIVE, ONEDNN, Options, kernel_for

Numbers = Sequence[int]


def runs_in_a_loop(
    x: Tensor, weight: Tensor, stride: Numbers, padding: Numbers, dilation: Numbers, groups: int
) -> bool:
    """Whether torch would convolve these tensors, which may be without memory, in a plain loop that oneDNN spares."""
    return kernel_for(x, weight, _options(stride, padding, dilation, groups)) is not NATIVE


def onednn_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Numbers,
    padding: Numbers,
    dilation: Numbers,
    groups: int,
) -> Tensor:
    """As ``aten::convolution`` of a batch, by oneDNN; differentiable."""
    y: Tensor = _Convolution.apply(x, weight, bias, _options(stride, padding, dilation, groups))
    return y


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None, options: Options) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = options
        return ONEDNN.forward(x, weight, bias, options)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return *ONEDNN.backward(dy, x, weight, ctx.options, (wanted[0], wanted[1], wanted[2])), None


def _options(stride: Numbers, padding: Numbers, dilation: Numbers, groups: int) -> Options:
    return tuple(stride), tuple(padding), tuple(dilation), False, (0,) * len(stride), groups
