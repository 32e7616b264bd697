"""One term of a convolution, computed: forward, and the gradients of its operands."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cuda_ops.dense.conv_kernels import NATIVE, ConvGradients, ConvKernel, Mask, kernel_for
from runtime.pipeline.routing import narrowed
from runtime.spatial.convolution.terms import Term

_pad = torch.constant_pad_nd


@dataclass(slots=True, eq=False)
class TermCall:
    """A term, and the kernel that runs it; the kernel is chosen by the first tensors.

    These are called for every piece of every layer, where a microsecond counts: hence loops in place of ``narrowed``.

    Attributes:
        shape: of the outputs.
    """

    term: Term
    shape: tuple[int, ...]
    kernel: ConvKernel | None = None

    def is_operator(self, x: Tensor, weight: Tensor) -> bool:
        """Whether it is torch's own convolution of the whole part, which torch differentiates faster than we do."""
        return self.term.is_whole and (self.kernel or self._choose(x, weight)) is NATIVE

    def cut(self, part: Tensor) -> Tensor:
        """What of a part is convolved."""
        term = self.term
        for cut in term.source:
            part = part.narrow(*cut)
        return _pad(part, term.pad) if term.pad else part

    def outputs(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """All outputs; ``x`` is cut."""
        term = self.term
        if term.place:
            y = x.new_zeros(self.shape) if bias is None else spread(bias, self.shape)
            self.add(y, x, weight)
            return y
        kernel = self.kernel or self._choose(x, weight)
        y = kernel.forward(x, weight, bias, term.options)
        return narrowed(y, term.rows).contiguous() if term.rows else y

    def add(self, y: Tensor, x: Tensor, weight: Tensor) -> None:
        """Adds the contribution to ``y``; ``x`` is cut."""
        term = self.term
        for cut in term.taps:
            weight = weight.narrow(*cut)
        kernel = self.kernel or self._choose(x, weight)
        contribution = kernel.forward(x, weight, None, term.options)
        for cut in term.rows:
            contribution = contribution.narrow(*cut)
        for cut in term.place:
            y = y.narrow(*cut)
        y.add_(contribution)

    def gradients(self, dy: Tensor, x: Tensor, weight: Tensor, mask: Mask) -> ConvGradients:
        """Gradients of the part, of the taps that touch it, and of the bias, from that of the outputs."""
        term = self.term
        dbias = None
        if mask[2] and term.place:  # outputs that this term does not reach have a bias too
            dbias = dy.sum([dim for dim in range(dy.ndim) if dim != 1])
            mask = (mask[0], mask[1], False)
        for cut in term.place:
            dy = dy.narrow(*cut)
        if term.rows_pad:
            dy = _pad(dy, term.rows_pad)
        for cut in term.taps:
            weight = weight.narrow(*cut)
        kernel = self.kernel or self._choose(x, weight)
        dx, dweight, own_dbias = kernel.backward(dy, x, weight, term.options, mask)
        if dx is not None and term.pad:
            dx = _pad(dx, [-number for number in term.pad])
        if dx is not None and term.source_pad:
            dx = _pad(dx, term.source_pad)
        return dx, dweight, own_dbias if dbias is None else dbias

    def _choose(self, x: Tensor, taps: Tensor) -> ConvKernel:
        self.kernel = kernel_for(x, taps, self.term.options)
        return self.kernel


def spread(bias: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``bias`` at every place of outputs of ``shape``."""
    return bias.view(-1, *[1] * (len(shape) - 2)).expand(shape).contiguous()
