"""The two halves of the backward of operators with weights, each by the kernels that torch's own backward calls.

        y = f(x, weight, bias)      dx = input_gradient(dy)      dweight, dbias = weight_gradients(dy)

All of them are linear in ``x`` and in the weight, so a half needs the other operand and ``dy`` and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

Gradients = tuple[Tensor | None, Tensor | None]
"""Of the weight and of the bias; None where it is not wanted."""


class Operator(Protocol):
    """An operator whose backward can be run in halves; ``wanted`` tells of weight and bias whether they are trained."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The result."""

    def input_gradient(self, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The gradient of ``x``."""

    def weight_gradients(self, dy: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]) -> Gradients:
        """The gradients of weight and bias."""


@dataclass(frozen=True, slots=True)
class Linear:
    """``x @ weight.T + bias``; x (..., in), weight (out, in), bias (out,)."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias)

    def input_gradient(self, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return _rows(dy).mm(weight).view(x.shape)

    def weight_gradients(self, dy: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]) -> Gradients:
        rows = _rows(dy)
        return rows.t().mm(_rows(x)) if wanted[0] else None, rows.sum(0) if wanted[1] else None


@dataclass(frozen=True, slots=True)
class Product:
    """``x @ weight + bias``; x (..., in), weight (in, out), bias (out,) or (1,)."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return x.matmul(weight) if bias is None else torch.addmm(bias, x, weight)

    def input_gradient(self, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return _rows(dy).mm(weight.t()).view(x.shape)

    def weight_gradients(self, dy: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]) -> Gradients:
        rows = _rows(dy)
        return _rows(x).t().mm(rows) if wanted[0] else None, rows.sum(0) if wanted[1] else None


@dataclass(frozen=True, slots=True)
class Convolution:
    """``aten::convolution`` with these options, of a batch."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.aten.convolution.default(x, weight, bias, *self._options())

    def input_gradient(self, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        dx: Tensor = self._backward(dy, x, weight, (True, False, False))[0]
        return dx

    def weight_gradients(self, dy: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]) -> Gradients:
        found = self._backward(dy, x, weight, (False, *wanted))
        return found[1], found[2]

    def _backward(self, dy: Tensor, x: Tensor, weight: Tensor, mask: tuple[bool, ...]) -> tuple[Tensor, ...]:
        channels = [dy.shape[1]] if mask[2] else None
        found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward.default(
            dy, x, weight, channels, *self._options(), mask
        )
        return found

    def _options(self) -> tuple[object, ...]:
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows of the weight; x holds their indices and has no gradient."""

    padding_index: int
    scale_by_frequency: bool

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.aten.embedding.default(weight, x, self.padding_index, self.scale_by_frequency, False)

    def input_gradient(self, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def weight_gradients(self, dy: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]) -> Gradients:
        count = weight.shape[0]
        return torch.ops.aten.embedding_dense_backward.default(
            dy, x, count, self.padding_index, self.scale_by_frequency
        ), None


def _rows(tensor: Tensor) -> Tensor:
    """All leading dims as one."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
