"""Convolution of all that it reads, fetched first: no overlap, but for any division, channels and samples too.

This is the plain form that the overlapped ones are tested against, and the one that serves where those do not pay.

Convolution whose input channels are shared by several ranks: each makes partial sums of the filters of its block.

The input is fetched first; partial sums travel while a rank convolves for the filters that it keeps
(:mod:`runtime.spatial.contraction`).

A cut along the filters may run through a group.  Then the filters fall into up to three calls, each of whole groups or
of part of one:

    3 groups of 4 filters       0 0 0 0  1 1 1 1  2 2 2 2
    a rank's filters                [0 0][1 1 1 1][2]           part of group 0, group 1, part of group 2
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from planner.ir.box import Box, Interval
from runtime.pipeline.routing import DimCuts, narrowed
from runtime.spatial.contraction import contract, sharing_of
from runtime.spatial.convolution.overlapped import LocalConv, PutGradients, halo_conv
from runtime.spatial.convolution.term_call import TermCall, spread
from runtime.spatial.convolution.terms import ConvWindow, main_term
from runtime.spatial.empties import connected
from runtime.spatial.exchange import Exchange, redistribute
from runtime.spatial.layer_shard import LayerShard


@dataclass(frozen=True, slots=True, eq=False)
class GatheredConv:
    """A rank's part of a convolution, input first.

    Attributes:
        box: of the input that is put together, with rows outside the tensor where zeros are.
        shape: of the outputs.
        filters: where those of the outputs are in this rank's bias.
        parts: the groups of channels, and the convolution of each; none where no output has a row to read.
    """

    exchange: Exchange
    box: Box
    shape: tuple[int, ...]
    filters: DimCuts
    parts: tuple[tuple[FilterSegment, LocalConv], ...]

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, put: PutGradients | None = None) -> Tensor:
        """The outputs; differentiable."""
        x = redistribute(x, self.exchange, self.box)
        if not self.parts:
            return self._without_input(x, weight, bias)
        if len(self.parts) == 1 and self.parts[0][0].is_whole:
            local = self.parts[0][1]
            if put is None and local.main.is_operator(x, weight):
                return torch.convolution(x, weight, bias, *local.main.term.options)
            return halo_conv(x, weight, bias, local, put)
        outputs = []
        for segment, local in self.parts:
            mine = None if bias is None else narrowed(bias, segment.bias)
            outputs.append(halo_conv(narrowed(x, segment.source), narrowed(weight, segment.weight), mine, local))
        return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]

    def _without_input(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = x.new_zeros(self.shape)
        if bias is None:
            return connected(y, x, weight)
        if not y.numel():
            return connected(y, x, weight, bias)
        return connected(spread(narrowed(bias, self.filters), self.shape), x, weight)


def gathered_conv(
    window: ConvWindow, outputs: Box, needed: Box, exchange: Exchange, channels: tuple[int, int]
) -> GatheredConv:
    """The form for ``outputs``, which may be empty.

    Args:
        needed: of the input; may reach outside the tensor.
        channels: of the whole input and of the whole output.
    """
    shape = tuple(map(len, outputs))
    wanted = exchange.wanted
    if not all(shape):
        return GatheredConv(exchange, wanted, shape, (), ())
    box = wanted if window.transposed else box_with_zeros(window, outputs, needed, exchange)
    parts = []
    for segment in segments(window, outputs[1], box[1], channels):
        of_part = ConvWindow(*_numbers(window), segment.groups, window.transposed)
        its_outputs = (outputs[0], segment.outputs, *outputs[2:])
        term = main_term(of_part, box, its_outputs)
        if term is not None and all(map(len, box)):
            parts.append((segment, LocalConv(TermCall(term, tuple(map(len, its_outputs))))))
    has_all = window.transposed and window.groups > 1 and shape[1] < channels[1]
    filters = ((0, outputs[1].start, shape[1]),) if has_all else ()
    return GatheredConv(exchange, box, shape, filters, tuple(parts))


def box_with_zeros(window: ConvWindow, outputs: Box, needed: Box, exchange: Exchange) -> Box:
    """What is wanted, and along dims where equal zeros on both sides would not do, the zeros that are read."""
    wanted = exchange.wanted
    if not all(map(len, wanted)):
        return needed
    if exchange.is_local and exchange.held == wanted:
        return wanted
    box: list[Interval] = list(wanted)
    for dim in range(2, len(box)):
        kernel, stride, padding, dilation = ((numbers[dim - 2],) for numbers in _numbers(window))
        alone = ConvWindow(kernel, stride, padding, dilation)
        term = main_term(alone, (*wanted[:2], wanted[dim]), (*outputs[:2], outputs[dim]))
        if term is None or not term.is_whole:
            box[dim] = needed[dim]
    return tuple(box)


def _numbers(window: ConvWindow) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    return window.kernel, window.stride, window.padding, window.dilation


@dataclass(frozen=True, slots=True, eq=False)
class SharedConv:
    """A rank's part of such a convolution.

    Attributes:
        outputs: of which it makes partial sums.
        box: of the input that is put together.
    """

    window: ConvWindow
    exchange: Exchange
    outputs: Box
    box: Box
    locals: dict[int, LocalConv | None] = field(default_factory=dict)

    def __call__(
        self, shard: LayerShard, x: Tensor, weight: Tensor, bias: Tensor | None, put: PutGradients | None = None
    ) -> Tensor:
        """The outputs that this rank keeps; differentiable."""
        y = contract(shard, redistribute(x, self.exchange, self.box), weight, self._partial_sums)
        return y if bias is None else y + bias.view(-1, *[1] * (y.ndim - 2))

    def _partial_sums(self, x: Tensor, weight: Tensor) -> Tensor:
        filters = weight.shape[1 if self.window.transposed else 0]
        if filters not in self.locals:
            self.locals[filters] = self._local(filters)
        local = self.locals[filters]
        if local is None:  # no input reaches these outputs
            shape = (len(self.outputs[0]), filters, *map(len, self.outputs[2:]))
            return connected(x.new_zeros(shape), x, weight)
        return halo_conv(x, weight, None, local)

    def _local(self, filters: int) -> LocalConv | None:
        outputs = (self.outputs[0], Interval(0, filters), *self.outputs[2:])
        term = main_term(self.window, self.box, outputs) if all(map(len, self.box)) else None
        return None if term is None else LocalConv(TermCall(term, tuple(map(len, outputs))))


def shared_conv(shard: LayerShard, window: ConvWindow) -> partial[Tensor]:
    """The form of a step with ``ways`` above 1."""
    exchange = shard.exchange(0)
    outputs = sharing_of(shard).block
    is_made = all(map(len, outputs)) and not window.transposed
    box = box_with_zeros(window, outputs, shard.needed(0), exchange) if is_made else exchange.wanted
    return partial(SharedConv(window, exchange, outputs, box), shard)


@dataclass(frozen=True, slots=True)
class FilterSegment:
    """Filters that one call of the operator makes.

    Attributes:
        outputs: the filters, as channels of the whole output.
        source, weight, bias: what of this rank's input, weight and bias goes in; everything where empty.
    """

    groups: int
    outputs: Interval
    source: DimCuts = ()
    weight: DimCuts = ()
    bias: DimCuts = ()

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


def _cuts(parts: tuple[tuple[int, tuple[int, int], int], ...]) -> DimCuts:
    return tuple((dim, *part) for dim, part, extent in parts if part != (0, extent))
