"""Convolution by interior and boundary, as Dryden et al. (IPDPS 2019, section 4.2) overlap it.

Outputs that read only what is held are computed while the halo travels; then the boundary outputs, each side from a
piece put together of held and received rows.  The runtime's own form (``runtime.spatial.convolution.overlapped``) is
compared with it; it is slower in all cases here, and no part of the runtime.

        . . . . . .
        . i i i i .          i: interior, one call       .: boundary, two calls along each dim that is cut
        . . . . . .
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from planner.ir.box import Box, Interval, intersect
from runtime.pipeline.routing import Cuts, cuts_of, narrowed
from runtime.spatial.convolution.layer import HaloSettings
from runtime.spatial.convolution.overlapped import ConvPart, Put
from runtime.spatial.convolution.terms import LEADING, ConvWindow, TermCall, main_term, reads
from runtime.spatial.exchange import Exchange


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Some of the outputs.

    Attributes:
        reads: of the input, inside the tensor.
        place: in the outputs.
        sources: by entry of ``receives``, what of the piece is read, and where it goes in ``reads``; the last entry is
            of what is held.
    """

    call: TermCall
    reads: Box
    place: Cuts
    sources: tuple[tuple[Cuts, Cuts] | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class InteriorConv:
    """A rank's part of a convolution.

    Attributes:
        regions: the interior first.
        places: by entry of ``exchange.sends``, where gradients that come are added.
    """

    exchange: Exchange
    shape: tuple[int, ...]
    regions: tuple[Region, ...]
    places: tuple[Cuts, ...]

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, put: Put | None = None) -> Tensor:
        """The outputs; differentiable."""
        convolve: Callable[[Tensor, Tensor, Tensor | None, InteriorConv], Tensor] = _InteriorConv.apply
        return convolve(x, weight, bias, self)


def interior_form(part: ConvPart, exchange: Exchange) -> InteriorConv | None:
    """As ``HaloSettings.instead`` asks for it: the form of a rank's part, None where there is none."""
    is_possible = all(map(len, part.outputs)) and part.is_of_whole_groups
    return interior_conv(part.local, part.outputs, exchange) if is_possible else None


INTERIOR = HaloSettings("blocking", instead=interior_form)
"""Convolutions by interior and boundary, blocking where that cannot be."""


def interior_conv(window: ConvWindow, outputs: Box, exchange: Exchange) -> InteriorConv | None:
    """The form for ``outputs``; None where no output reads only what is held, or channels or samples move."""
    held, wanted = exchange.held, exchange.wanted
    moved = [box for _, box in exchange.receives]
    if window.transposed or held[:LEADING] != wanted[:LEADING] or any(box[:2] != held[:2] for box in moved):
        return None
    inside = list(outputs)
    for dim in range(LEADING, len(outputs)):
        inside[dim] = _inside(window, dim - LEADING, outputs[dim], held[dim], wanted[dim])
    if not all(map(len, inside)):
        return None
    boxes = [tuple(inside), *_shell(outputs, tuple(inside))]
    regions = [_region(window, box, outputs, exchange) for box in boxes]
    if any(region is None for region in regions):
        return None
    return InteriorConv(
        exchange,
        tuple(map(len, outputs)),
        tuple(region for region in regions if region is not None),
        tuple(cuts_of(box, held) for _, box in exchange.sends),
    )


class _InteriorConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, conv: InteriorConv) -> Tensor:
        arriving = conv.exchange.start(x)
        y = x.new_empty(conv.shape)
        interior, *boundary = conv.regions
        saved = [_read(interior, [*[None] * len(conv.exchange.receives), x])]
        narrowed(y, interior.place).copy_(interior.call.outputs(saved[0], weight, bias))
        pieces = [*(piece for _, piece in arriving.wait()), x]
        for region in boundary:
            saved.append(_read(region, pieces))
            narrowed(y, region.place).copy_(region.call.outputs(saved[-1], weight, bias))
        ctx.save_for_backward(weight, *saved)
        ctx.conv, ctx.held = conv, x.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        conv: InteriorConv = ctx.conv
        mask = ctx.needs_input_grad[:3]
        weight, *saved = ctx.saved_tensors
        gradients = [dy.new_zeros(tuple(map(len, box))) for _, box in conv.exchange.receives]
        gradients.append(dy.new_zeros(ctx.held))
        arriving = None
        totals: list[Tensor | None] = [None, None]
        order = list(zip(conv.regions, saved, strict=True))
        for region, source in (*order[1:], order[0]):  # the interior while messages travel
            if region is conv.regions[0] and mask[0]:
                arriving = conv.exchange.start_adjoint(gradients[:-1], dy)
            dx, *others = region.call.gradients(narrowed(dy, region.place), source, weight, mask)
            if dx is not None:
                _give(region, dx, gradients)
            for index, found in enumerate(others):
                total = totals[index]
                totals[index] = found if total is None or found is None else total.add_(found)
        if arriving is not None:
            for place, (_, piece) in zip(conv.places, arriving.wait(), strict=True):
                narrowed(gradients[-1], place).add_(piece)
        return gradients[-1] if mask[0] else None, *totals, None


def _read(region: Region, pieces: Sequence[Tensor | None]) -> Tensor:
    """The cut input of a region."""
    own = pieces[-1]
    if own is None:
        raise ValueError("what is held is always there")
    shape = tuple(map(len, region.reads))
    used = [(cuts, piece) for cuts, piece in zip(region.sources, pieces, strict=True) if cuts and piece is not None]
    if len(used) == 1 and not used[0][0][1]:
        return region.call.cut(narrowed(used[0][1], used[0][0][0]))
    source = own.new_empty(shape)
    for (of_piece, of_reads), piece in used:
        narrowed(source, of_reads).copy_(narrowed(piece, of_piece))
    return region.call.cut(source)


def _give(region: Region, gradient: Tensor, gradients: Sequence[Tensor]) -> None:
    """Adds the gradient of what a region reads to those of the pieces it was read from."""
    for cuts, total in zip(region.sources, gradients, strict=True):
        if cuts is not None:
            narrowed(total, cuts[0]).add_(narrowed(gradient, cuts[1]))


def _region(window: ConvWindow, outputs: Box, whole: Box, exchange: Exchange) -> Region | None:
    read = intersect((*exchange.wanted[:LEADING], *reads(window, outputs)), exchange.wanted)
    term = None if read is None else main_term(window, read, outputs)
    if read is None or term is None:
        return None
    sources: list[tuple[Cuts, Cuts] | None] = []
    for box in (*(box for _, box in exchange.receives), exchange.held):
        shared = intersect(box, read)
        sources.append(None if shared is None else (cuts_of(shared, box), cuts_of(shared, read)))
    return Region(TermCall(term, tuple(map(len, outputs))), read, cuts_of(outputs, whole), tuple(sources))


def _inside(window: ConvWindow, dim: int, outputs: Interval, held: Interval, wanted: Interval) -> Interval:
    """The outputs along one dim that read, of what is wanted, only what is held."""
    stride, padding = window.stride[dim], window.padding[dim]
    start, stop = outputs.start, outputs.stop
    if held.start > wanted.start:
        start = max(start, -(-(held.start + padding) // stride))
    if held.stop < wanted.stop:
        span = window.dilation[dim] * (window.kernel[dim] - 1) + 1
        stop = min(stop, (held.stop - span + padding) // stride + 1)
    return Interval(start, max(start, stop))


def _shell(outputs: Box, inside: Box) -> list[Box]:
    """Disjoint boxes around ``inside`` that make up ``outputs`` with it."""
    found, rest = [], list(outputs)
    for dim in range(len(outputs)):
        for side in (Interval(outputs[dim].start, inside[dim].start), Interval(inside[dim].stop, outputs[dim].stop)):
            if len(side):
                found.append((*rest[:dim], side, *rest[dim + 1 :]))
        rest[dim] = inside[dim]
    return found
