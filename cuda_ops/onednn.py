"""oneDNN's convolution, called by its name where torch would take a plain loop.

torch chooses by the size of the tensor: in 3-D, one sample's shard soon falls below its threshold, and the loop takes
some ten times as long (one core, 16 -> 16 channels at 16 x 64 x 64: 103 ms against 9 ms forward).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

Numbers = Sequence[int]


def runs_in_a_loop(
    x: Tensor, weight: Tensor, stride: Numbers, padding: Numbers, dilation: Numbers, groups: int
) -> bool:
    """Whether torch would convolve these tensors, which may be without memory, in a plain loop that oneDNN spares."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or not torch.backends.mkldnn.enabled:
        return False
    options = list(stride), list(padding), list(dilation), False, [0] * len(stride), groups
    return torch._C._select_conv_backend(x, weight, None, *options) == torch._C._ConvBackend.Slow3d


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
    y: Tensor = _Convolution.apply(x, weight, bias, tuple(stride), tuple(padding), tuple(dilation), groups)
    return y


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: tuple[int, ...],
        padding: tuple[int, ...],
        dilation: tuple[int, ...],
        groups: int,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = stride, padding, dilation, False, (0,) * len(stride), groups
        y: Tensor = torch.ops.aten.mkldnn_convolution.default(x, weight, bias, padding, stride, dilation, groups)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        # Tensors in oneDNN's layout leave torch no choice; the sum of the bias is the same either way.
        packed = dy.contiguous().to_mkldnn(), x.contiguous().to_mkldnn()
        mask = [*ctx.needs_input_grad[:2], False]
        dx, dweight, _ = torch.ops.aten.convolution_backward.default(
            *packed, weight.contiguous(), None, *ctx.options, mask
        )
        dbias = dy.sum([dim for dim in range(dy.ndim) if dim != 1]) if ctx.needs_input_grad[2] else None
        return _dense(dx), _dense(dweight), dbias, None, None, None, None


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_mkldnn else gradient
