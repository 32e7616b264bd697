"""The kernel that runs one term of a convolution, forward and backward.

torch chooses by the size of the tensor.  In 3-D a shard of one sample soon falls below its threshold and runs in a
plain loop, some ten times slower than oneDNN's kernel (one core, 16 -> 16 channels at 16 x 64 x 64: 103 ms against 9 ms
forward, 233 ms against 34 ms backward); dilated ones fare alike.  Then oneDNN's is called by its name, but for the
smallest, which calling it would not pay for.

A convolution by the kernel that this house would choose, as one differentiable call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cuda_ops._torch import conv_backend


def runs_in_a_loop(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> bool:
    """Whether torch would convolve these tensors, which may be without memory, in a plain loop that oneDNN spares."""
    return kernel_for(x, weight, _options(stride, padding, dilation, groups)) is not NATIVE


def onednn_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """As ``aten::convolution`` of a batch, by oneDNN; differentiable."""
    apply: Callable[..., Tensor] = _Convolution.apply
    return apply(x, weight, bias, _options(stride, padding, dilation, groups))


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, options: ConvOptions) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = options
        return ONEDNN.forward(x, weight, bias, options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return *ONEDNN.backward(dy, x, weight, ctx.options, (wanted[0], wanted[1], wanted[2])), None


def _options(stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int) -> ConvOptions:
    return tuple(stride), tuple(padding), tuple(dilation), False, (0,) * len(stride), groups


_BACKWARD = torch.ops.aten.convolution_backward.default
_ONEDNN_FORWARD = torch.ops.aten.mkldnn_convolution.default

_SLOW = frozenset({"Slow3d", "SlowDilated2d", "SlowDilated3d"})
"""Of torch's choices; ``Slow2d`` is not: for what it is chosen for it is as fast."""
_FEWEST_MULTIPLICATIONS = 2**19

ConvOptions = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool, tuple[int, ...], int]
"""As ``aten::convolution`` takes them: stride, padding, dilation, transposed, output padding, groups."""

Mask = tuple[bool, bool, bool]
"""Whether the gradients of input, weight and bias are wanted."""
ConvGradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Native:
    """torch's own choice; gradients that are not wanted are None."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, options: ConvOptions) -> Tensor:
        return torch.convolution(x, weight, bias, *options)

    def backward(self, dy: Tensor, x: Tensor, weight: Tensor, options: ConvOptions, mask: Mask) -> ConvGradients:
        gradients: ConvGradients = _BACKWARD(dy, x, weight, [dy.shape[1]], *options, mask)
        return gradients


class OneDnn:
    """oneDNN, where torch would choose another."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, options: ConvOptions) -> Tensor:
        stride, padding, dilation, _, _, groups = options
        y: Tensor = _ONEDNN_FORWARD(x, weight, bias, padding, stride, dilation, groups)
        return y

    def backward(self, dy: Tensor, x: Tensor, weight: Tensor, options: ConvOptions, mask: Mask) -> ConvGradients:
        # Tensors in oneDNN's layout leave torch no choice; the sum of the bias is the same either way.
        packed = dy.contiguous().to_mkldnn(), x.contiguous().to_mkldnn()
        packed_gradients = _BACKWARD(*packed, weight.contiguous(), None, *options, (mask[0], mask[1], False))[:2]
        dx, dweight = (each.to_dense() if each is not None and each.is_mkldnn else each for each in packed_gradients)
        dbias = dy.sum([dim for dim in range(dy.ndim) if dim != 1]) if mask[2] else None
        return dx, dweight, dbias


ConvKernel = Native | OneDnn
NATIVE = Native()
ONEDNN = OneDnn()


def kernel_for(x: Tensor, weight: Tensor, options: ConvOptions) -> ConvKernel:
    """The faster kernel for tensors of this shape, dtype and device."""
    stride, padding, dilation, transposed, output_padding, groups = options
    is_plain = x.device.type == "cpu" and x.dtype == torch.float32 and not transposed
    if not is_plain or not torch.backends.mkldnn.enabled or torch.compiler.is_compiling():  # which cannot look into it
        return NATIVE
    if x.numel() // x.shape[1] * weight.numel() // prod(stride) < _FEWEST_MULTIPLICATIONS:
        return NATIVE
    chosen = conv_backend(x, weight, stride, padding, dilation, transposed, output_padding, groups)
    return ONEDNN if chosen in _SLOW else NATIVE
