"""A convolution as a sum of terms, one for each part of its input.  Pure integers.

A convolution is linear in its input.  So the outputs of a rank are the sum of what the rows it holds contribute, as if
there were zeros around them, and of what each piece that comes from other ranks contributes:

    kernel 3, stride 1, padding 1               held rows        o o o o            received rows      o
    zeros around what is held          main:  0 o o o o 0                    piece:                    o
    outputs                                    y y y y                       adds to   y  (one tap of the kernel)

This holds for any kernel, stride, padding, dilation, number of groups and dims of space, whatever the parts are: a
side, an edge or a corner, or rows of several ranks.  Coordinates are global; per dim of space, output ``o`` reads the
rows ``o stride - padding + dilation t`` for taps ``0 <= t < kernel``, and of a transposed convolution input ``i``
reaches the outputs ``i stride - padding + dilation t``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from cuda_ops.dense.conv_kernels import ConvOptions
from planner.ir.box import Box, Interval
from runtime.pipeline.routing import DimCuts

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

    options: ConvOptions
    source: DimCuts = ()
    pad: tuple[int, ...] = ()
    taps: DimCuts = ()
    rows: DimCuts = ()
    place: DimCuts = ()
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
    options: ConvOptions = (
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
    hits = _hits(part, outputs, *numbers)
    if not hits:
        return None
    taps, made = (Interval(0, kernel), outputs) if is_main else _span(hits)
    before = part.start - (made.start * stride - padding + dilation * taps.start)  # rows that are read before the part
    after = (made.stop - 1) * stride - padding + dilation * (taps.stop - 1) + 1 - part.stop  # and after it
    skip_before = max(0, -before)
    skip_after = -after if after <= -stride else 0
    before = max(0, before)
    after = after + skip_after
    extent = len(part) - skip_before - skip_after
    margin = before
    pad = (0, 0)
    rows = None
    computed = len(made)
    if not after <= before < after + stride:  # equal zeros on both sides would not give these outputs
        if is_main:
            margin = before + stride * max(0, -((before - after) // stride))
            computed = (extent + 2 * margin - dilation * (len(taps) - 1) - 1) // stride + 1
            rows = ((margin - before) // stride, len(made))
        else:
            margin = min(before, max(0, after))
            pad = (before - margin, max(0, after) - margin)
    return _Along(
        margin,
        computed * len(taps),
        _unless((skip_before, extent), len(part)),
        pad,
        _unless((taps.start, len(taps)), kernel),
        None if rows is None else _unless(rows, computed),
        _unless((made.start - outputs.start, len(made)), len(outputs)),
        source_pad=(skip_before, skip_after),
        rows_pad=(0, 0) if rows is None else (rows[0], computed - rows[0] - len(made)),
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


def _span(hits: Sequence[tuple[int, int, int]]) -> tuple[Interval, Interval]:
    """All taps that reach into it, and all that they reach from."""
    first = min(low for _, low, _ in hits)
    last = max(high for _, _, high in hits)
    return Interval(hits[0][0], hits[-1][0] + 1), Interval(first, last + 1)


def _transposed_along(
    part: Interval, outputs: Interval, numbers: tuple[int, int, int, int], is_main: bool
) -> _Along | None:
    kernel, stride, padding, dilation = numbers
    hits = _hits(outputs, part, *numbers)
    if not hits:
        return None
    touching, read = _span(hits)
    taps = Interval(0, kernel) if is_main else touching
    made = Interval(
        read.start * stride - padding + dilation * taps.start,
        (read.stop - 1) * stride - padding + dilation * (taps.stop - 1) + 1,
    )
    before = max(0, outputs.start - made.start)  # too many before
    after = made.stop - outputs.stop  # and after
    reached = Interval(made.start + before, min(made.stop, outputs.stop))
    more = before - after
    if 0 <= more < max(stride, dilation):
        margin = before
        reached = Interval(reached.start, outputs.stop)
    else:
        margin = min(before, max(0, after))
        more = 0
    computed = len(made) - 2 * margin + more
    rows = (before - margin, len(reached))
    return _Along(
        margin,
        len(read) * len(taps),
        _unless((read.start - part.start, len(read)), len(part)),
        (0, 0),
        _unless((taps.start, len(taps)), kernel),
        _unless(rows, computed),
        _unless((reached.start - outputs.start, len(reached)), len(outputs)),
        more,
        (read.start - part.start, part.stop - read.stop),
        (rows[0], computed - rows[0] - rows[1]),
    )


def _unless(part: tuple[int, int], extent: int) -> tuple[int, int] | None:
    return None if part == (0, extent) else part


def _cuts_of_space(parts: Sequence[tuple[int, int] | None]) -> DimCuts:
    return tuple((LEADING + dim, *part) for dim, part in enumerate(parts) if part is not None)


def _pads(pads: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """In the order of ``constant_pad_nd``, the last dim first; empty if there are none."""
    return tuple(number for pair in reversed(pads) for number in pair) if any(map(any, pads)) else ()
