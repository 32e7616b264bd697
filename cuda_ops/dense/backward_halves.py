"""The two halves of the backward of operators with weights, each by the kernels that torch's own backward calls.

        y = f(x, weight, bias)      dx = input_gradient(dy)      dweight, dbias = weight_gradients(dy)

All of them are linear in ``x`` and in the weight, so a half needs the other operand and ``dy`` and nothing else.

How each operator with weights names its arguments, and what one call of it comes to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from cuda_ops.calls import argument_names
from cuda_ops.dense.conv_kernels import NATIVE, ConvOptions

DimInts = list[int] | tuple[int, ...]
WeightGradients = tuple[Tensor | None, Tensor | None]
"""Of the weight and of the bias; None where it is not wanted."""


@dataclass(frozen=True, slots=True)
class ProductHalves:
    """``x @ weight + bias``, x (..., in), weight (in, out), or ``weight.T`` of (out, in); bias (out,) or (1,)."""

    transposed: bool

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.transposed:
            return functional.linear(x, weight, bias)
        return x.matmul(weight) if bias is None else torch.addmm(bias, x, weight)

    def input_gradient(self, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return _rows(dy).mm(weight if self.transposed else weight.t()).view(x.shape)

    def weight_gradients(self, dy: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]) -> WeightGradients:
        one, other = (_rows(dy), _rows(x)) if self.transposed else (_rows(x), _rows(dy))
        return one.t().mm(other) if wanted[0] else None, _rows(dy).sum(0) if wanted[1] else None


@dataclass(frozen=True, slots=True)
class ConvolutionHalves:
    """``aten::convolution`` with these options, of a batch."""

    options: ConvOptions

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return NATIVE.forward(x, weight, bias, self.options)

    def input_gradient(self, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        dx: Any = NATIVE.backward(dy, x, weight, self.options, (True, False, False))[0]
        return cast("Tensor", dx)

    def weight_gradients(self, dy: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]) -> WeightGradients:
        return NATIVE.backward(dy, x, weight, self.options, (False, *wanted))[1:]


@dataclass(frozen=True, slots=True)
class EmbeddingHalves:
    """Rows of the weight; x holds their indices and has no gradient."""

    padding_index: int
    scale_by_frequency: bool

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.embedding(weight, x, self.padding_index, self.scale_by_frequency, False)

    def input_gradient(self, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def weight_gradients(self, dy: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]) -> WeightGradients:
        table = torch.ops.aten.embedding_dense_backward.default(
            dy, x, weight.shape[0], self.padding_index, self.scale_by_frequency
        )
        return table, None


Halves = ProductHalves | ConvolutionHalves | EmbeddingHalves
"""An operator whose backward can be run in halves; ``wanted`` tells of weight and bias whether they are trained."""


def _rows(tensor: Tensor) -> Tensor:
    """All leading dims as one."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


_LINEAR = ProductHalves(True)
_PRODUCT = ProductHalves(False)


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One call of an operator.

    Attributes:
        halves: compute ``after(forward(before(x), weight, bias))``.
        autocasts: whether autocast runs it in its lower precision; None where that depends on the device.
        before, after: differentiable changes of shape.
    """

    halves: Halves
    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    autocasts: bool | None = True
    before: Callable[[Tensor], Tensor] | None = None
    after: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class CallReader:
    """How to read the calls of one operator.

    Attributes:
        read: takes the call's arguments; None where this call is not covered.
        weight, bias: names of these arguments in the operator's schema; no bias: "".
    """

    read: Callable[..., OperatorCall | None]
    weight: str = "weight"
    bias: str = "bias"

    def covers(self, target: object) -> bool:
        """Whether it reads the arguments of this overload of the operator."""
        return signature(self.read).parameters.keys() >= {*argument_names(target)}


def read_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> OperatorCall | None:
    """``aten::linear``."""
    return OperatorCall(_LINEAR, input, weight, bias) if weight.ndim == 2 else None


def read_matmul(self: Tensor, other: Tensor) -> OperatorCall | None:
    """``aten::matmul`` by a matrix."""
    return OperatorCall(_PRODUCT, self, other) if other.ndim == 2 else None


def read_mm(self: Tensor, mat2: Tensor) -> OperatorCall | None:
    """``aten::mm``."""
    return OperatorCall(_PRODUCT, self, mat2)


def read_addmm(self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> OperatorCall | None:
    """``aten::addmm`` of a bias."""
    return OperatorCall(_PRODUCT, mat1, mat2, self) if self.ndim == 1 and alpha == beta == 1 else None


def read_embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> OperatorCall | None:
    """``aten::embedding`` of a dense gradient."""
    return (
        None
        if sparse
        else OperatorCall(EmbeddingHalves(padding_idx, scale_grad_by_freq), indices, weight, autocasts=False)
    )


def read_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: DimInts,
    padding: DimInts,
    dilation: DimInts,
    transposed: bool,
    output_padding: DimInts,
    groups: int,
) -> OperatorCall | None:
    """``aten::convolution``."""
    each = [_each(value, weight) for value in (stride, padding, dilation, output_padding)]
    return OperatorCall(
        ConvolutionHalves((each[0], each[1], each[2], transposed, each[3], groups)), input, weight, bias, autocasts=None
    )


def read_conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> OperatorCall:
    """``aten::conv1d`` to ``conv3d``, also of a padding by name."""
    steps = _each(stride, weight)
    rates = _each(dilation, weight)
    none = _each(0, weight)
    margins = [0] * (weight.ndim - 2)
    if padding == "same":
        whole = [rate * (size - 1) for rate, size in zip(rates, weight.shape[2:], strict=True)]
        padding = [margin // 2 for margin in whole]
        margins = [margin % 2 for margin in whole]
    elif padding == "valid":
        padding = 0
    halves = ConvolutionHalves((steps, _each(padding, weight), rates, False, none, groups))
    extra = [margin for last in reversed(margins) for margin in (0, last)]  # an odd margin: one more at the end

    def before(x: Tensor) -> Tensor:
        return _batched(functional.pad(x, extra) if any(extra) else x, weight)

    return OperatorCall(halves, input, weight, bias, True, before, _after(input, weight))


def read_transposed_conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> OperatorCall:
    """``aten::conv_transpose1d`` to ``conv_transpose3d``."""
    steps = _each(stride, weight)
    margins = _each(padding, weight)
    more = _each(output_padding, weight)
    halves = ConvolutionHalves((steps, margins, _each(dilation, weight), True, more, groups))
    return OperatorCall(halves, input, weight, bias, True, lambda x: _batched(x, weight), _after(input, weight))


def _each(value: int | DimInts, weight: Tensor) -> tuple[int, ...]:
    """One number a dim of space, as operators read it: a single number stands for all."""
    numbers = tuple(value) if isinstance(value, (list, tuple)) else (int(value),)
    return numbers * (weight.ndim - 2) if len(numbers) == 1 else numbers


def _batched(x: Tensor, weight: Tensor) -> Tensor:
    return x.unsqueeze(0) if x.ndim < weight.ndim else x


def _after(x: Tensor, weight: Tensor) -> Callable[[Tensor], Tensor] | None:
    return (lambda y: y.squeeze(0)) if x.ndim < weight.ndim else None
