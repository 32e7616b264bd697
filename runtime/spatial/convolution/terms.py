"""A convolution as a sum of terms, one for each part of its input.  Pure integers.

A convolution is linear in its input.  So the outputs of a rank are the sum of what the rows it holds contribute, as if
there were zeros around them, and of what each piece that comes from other ranks contributes:

    kernel 3, stride 1, padding 1               held rows        o o o o            received rows      o
    zeros beside what is held          main:  0 o o o o 0                    piece:                    o
    outputs                                    y y y y                       adds to   y  (one tap of the kernel)

This holds for any kernel, stride, padding, dilation, number of groups and dims of space, whatever the parts are: a
side, an edge or a corner, or rows of several ranks.  Coordinates are global; per dim of space, output ``o`` reads the
rows ``o stride - padding + dilation t`` for taps ``0 <= t < kernel``, and of a transposed convolution input ``i``
reaches the outputs ``i stride - padding + dilation t``.

Which filters of a rank belong to which groups of a convolution.  Pure integers.

A cut along the filters may run through a group.  Then the filters fall into up to three calls, each of whole groups or
of part of one:

    3 groups of 4 filters       0 0 0 0  1 1 1 1  2 2 2 2
    a rank's filters                [0 0][1 1 1 1][2]           part of group 0, group 1, part of group 2

One term of a convolution, computed: forward, and the gradients of its operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from cuda_ops.dense.conv_kernels import NATIVE, ConvKernel, Gradients, Mask, Options, kernel_for
from planner.ir.box import Box, Interval
from runtime.pipeline.routing import Cuts, narrowed


@dataclass(frozen=True, slots=True)
class FilterSegment:
    """Filters that one call of the operator makes.

    Attributes:
        outputs: the filters, as channels of the whole output.
        source, weight, bias: what of this rank's input, weight and bias goes in; everything where empty.
    """

    groups: int
    outputs: Interval
    source: Cuts = ()
    weight: Cuts = ()
    bias: Cuts = ()

    @property
    def is_whole(self) -> bool:
        """Whether the call takes all that the rank has."""
        return not (self.source or self.weight or self.bias)


def segments(
    window: ConvWindow, filters: Interval, read: Interval, channels: tuple[int, int]
) -> tuple[FilterSegment, ...]:
    """The calls that make ``filters``, in order.

    Args:
        filters: of this rank.  Its weight holds those of a convolution; of a transposed one in several groups it holds
            all that there are.
        read: the input channels that this rank reads.
        channels: of the whole input and of the whole output.
    """
    if window.groups == 1:
        return (FilterSegment(1, filters),)
    inputs_each = channels[0] // window.groups
    outputs_each = channels[1] // window.groups
    calls = []
    start = filters.start
    while start < filters.stop:
        group, offset = divmod(start, outputs_each)
        whole = 0 if offset else (filters.stop - start) // outputs_each
        stop = start + whole * outputs_each if whole else min(filters.stop, (group + 1) * outputs_each)
        number = max(1, whole)
        its = Interval(start, stop)
        source = (group * inputs_each - read.start, number * inputs_each)
        if window.transposed:
            rows = (group * inputs_each, number * inputs_each)
            columns = (0, outputs_each) if whole else (offset, len(its))
            weight = _cuts(((0, rows, channels[0]), (1, columns, outputs_each)))
            bias = _cuts(((0, (start, len(its)), channels[1]),))
        else:
            weight = bias = _cuts(((0, (start - filters.start, len(its)), len(filters)),))
        calls.append(FilterSegment(number, its, _cuts(((1, source, len(read)),)), weight, bias))
        start = stop
    return tuple(calls)


def _cuts(parts: tuple[tuple[int, tuple[int, int], int], ...]) -> Cuts:
    return tuple((dim, *part) for dim, part, extent in parts if part != (0, extent))


LEADING = 2
"""Dims before those of space: samples and channels."""


@dataclass(frozen=True, slots=True)
class ConvWindow:
    """What a convolution does along its dims of space.

    Attributes:
        padding: at the start of each dim; where outputs end says how much there is at the end.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Term:
    """What a part of the input contributes, as one call of a convolution.

    Attributes:
        source: of the part, what is read of it.
        pad: zeros around that, as ``constant_pad_nd`` takes them; what of it can be, is in ``options``.
        taps: of the kernel, those that touch the part.
        rows: of the result, what is wanted.
        place: where that lies in the outputs; empty if it is all of them.
        multiplications: per pair of channels.
    """

    options: Options
    source: Cuts = ()
    pad: tuple[int, ...] = ()
    taps: Cuts = ()
    rows: Cuts = ()
    place: Cuts = ()
    multiplications: int = 0
    source_pad: tuple[int, ...] = ()
    rows_pad: tuple[int, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether it reads all of the part with all taps, and its result is all of the outputs."""
        return not (self.source or self.pad or self.taps or self.rows or self.place)


@dataclass(frozen=True, slots=True)
class _Along:
    """A term along one dim of space: (start, length) of source, taps, rows and place; None where that is everything."""

    padding: int
    multiplications: int
    source: tuple[int, int] | None = None
    pad: tuple[int, int] = (0, 0)
    taps: tuple[int, int] | None = None
    rows: tuple[int, int] | None = None
    place: tuple[int, int] | None = None
    output_padding: int = 0
    source_pad: tuple[int, int] = (0, 0)
    rows_pad: tuple[int, int] = (0, 0)


def reads(window: ConvWindow, outputs: Box) -> tuple[Interval, ...]:
    """What ``outputs`` of a convolution, not a transposed one, read along each dim of space, outside the tensor too."""
    numbers = zip(outputs[LEADING:], window.kernel, window.stride, window.padding, window.dilation, strict=True)
    return tuple(
        Interval(part.start * stride - padding, (part.stop - 1) * stride - padding + dilation * (kernel - 1) + 1)
        for part, kernel, stride, padding, dilation in numbers
    )


def main_term(window: ConvWindow, part: Box, outputs: Box) -> Term | None:
    """What ``part`` contributes, with all taps and to all of ``outputs``; None if it reaches none of them.

    Args:
        part, outputs: boxes with samples, channels and dims of space, not empty.
    """
    return _term(window, part, outputs, is_main=True)


def piece_term(window: ConvWindow, piece: Box, outputs: Box) -> Term | None:
    """What a thin ``piece`` contributes to those of ``outputs`` that see it; None if it reaches none of them."""
    return _term(window, piece, outputs, is_main=False)


def _term(window: ConvWindow, part: Box, outputs: Box, is_main: bool) -> Term | None:
    along = _transposed_along if window.transposed else _along
    by_dim = []
    numbers = zip(window.kernel, window.stride, window.padding, window.dilation, strict=True)
    for source, wanted, each in zip(part[LEADING:], outputs[LEADING:], numbers, strict=True):
        one = along(source, wanted, each, is_main)
        if one is None:
            return None
        by_dim.append(one)
    options: Options = (
        window.stride,
        tuple(one.padding for one in by_dim),
        window.dilation,
        window.transposed,
        tuple(one.output_padding for one in by_dim),
        window.groups,
    )
    return Term(
        options,
        _cuts_of_space([one.source for one in by_dim]),
        _pads([one.pad for one in by_dim]),
        _cuts_of_space([one.taps for one in by_dim]),
        _cuts_of_space([one.rows for one in by_dim]),
        _cuts_of_space([one.place for one in by_dim]),
        prod(one.multiplications for one in by_dim),
        _pads([one.source_pad for one in by_dim]),
        _pads([one.rows_pad for one in by_dim]),
    )


def _along(part: Interval, outputs: Interval, numbers: tuple[int, int, int, int], is_main: bool) -> _Along | None:
    kernel, stride, padding, dilation = numbers
    first = outputs.start
    last = outputs.stop
    start = 0
    stop = kernel
    hits = _hits(part, outputs, *numbers)
    if not hits:
        return None
    if not is_main:
        start = hits[0][0]
        stop = hits[-1][0] + 1
        first = min(low for _, low, _ in hits)
        last = max(high for _, _, high in hits) + 1
    left = part.start - (first * stride - padding + dilation * start)  # rows that are read before the part
    right = (last - 1) * stride - padding + dilation * (stop - 1) + 1 - part.stop  # and behind it
    skip_left = max(0, -left)
    skip_right = -right if right <= -stride else 0
    left = max(0, left)
    right = right + skip_right
    margin = left
    pad = (0, 0)
    rows = None
    count = last - first
    computed = count
    if not right <= left < right + stride:  # equal zeros on both sides would not give these outputs
        if is_main:
            margin = left + stride * max(0, -((left - right) // stride))
            extent = len(part) - skip_left - skip_right
            computed = (extent + 2 * margin - dilation * (stop - start - 1) - 1) // stride + 1
            rows = ((margin - left) // stride, count)
        else:
            margin = min(left, max(0, right))
            pad = (left - margin, max(0, right) - margin)
    return _Along(
        margin,
        computed * (stop - start),
        _unless((skip_left, len(part) - skip_left - skip_right), len(part)),
        pad,
        _unless((start, stop - start), kernel),
        None if rows is None else _unless(rows, computed),
        _unless((first - outputs.start, count), len(outputs)),
        source_pad=(skip_left, skip_right),
        rows_pad=(0, 0) if rows is None else (rows[0], computed - rows[0] - count),
    )


def _hits(
    wide: Interval, narrow: Interval, kernel: int, stride: int, padding: int, dilation: int
) -> list[tuple[int, int, int]]:
    """(tap, first, last) of the taps that reach from ``narrow``, whose elements are a stride apart, into ``wide``."""
    hits = []
    for tap in range(kernel):
        shift = padding - dilation * tap
        low = max(narrow.start, -((-wide.start - shift) // stride))
        high = min(narrow.stop - 1, (wide.stop - 1 + shift) // stride)
        if low <= high:
            hits.append((tap, low, high))
    return hits


def _transposed_along(
    part: Interval, outputs: Interval, numbers: tuple[int, int, int, int], is_main: bool
) -> _Along | None:
    kernel, stride, padding, dilation = numbers
    hits = _hits(outputs, part, *numbers)
    if not hits:
        return None
    start, stop = (0, kernel) if is_main else (hits[0][0], hits[-1][0] + 1)
    first = min(low for _, low, _ in hits)
    last = max(high for _, _, high in hits) + 1
    made = Interval(
        first * stride - padding + dilation * start, (last - 1) * stride - padding + dilation * (stop - 1) + 1
    )
    left = max(0, outputs.start - made.start)  # too many before
    right = made.stop - outputs.stop  # and behind
    reached = Interval(made.start + left, min(made.stop, outputs.stop))
    more = left - right
    if 0 <= more < max(stride, dilation):
        margin = left
        reached = Interval(reached.start, outputs.stop)
    else:
        margin = min(left, max(0, right))
        more = 0
    computed = len(made) - 2 * margin + more
    rows = (left - margin, len(reached))
    return _Along(
        margin,
        (last - first) * (stop - start),
        _unless((first - part.start, last - first), len(part)),
        (0, 0),
        _unless((start, stop - start), kernel),
        _unless(rows, computed),
        _unless((reached.start - outputs.start, len(reached)), len(outputs)),
        more,
        (first - part.start, part.stop - last),
        (rows[0], computed - rows[0] - rows[1]),
    )


def _unless(part: tuple[int, int], extent: int) -> tuple[int, int] | None:
    return None if part == (0, extent) else part


def _cuts_of_space(parts: Sequence[tuple[int, int] | None]) -> Cuts:
    return tuple((LEADING + dim, *part) for dim, part in enumerate(parts) if part is not None)


def _pads(pads: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """In the order of ``constant_pad_nd``, the last dim first; empty if there are none."""
    return tuple(number for pair in reversed(pads) for number in pair) if any(map(any, pads)) else ()


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

    def gradients(self, dy: Tensor, x: Tensor, weight: Tensor, mask: Mask) -> Gradients:
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
