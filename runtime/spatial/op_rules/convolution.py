"""Op rules of windows over space: convolutions and pooling.

A rank makes its outputs from its own rows and a halo of its neighbours'.  Padding, divisors, bins and places are those
of the whole tensor; a mean over all of space is summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from planner.ir.box import Interval
from runtime.pipeline.routing import slices
from runtime.spatial.collectives import sum_dtype, summed
from runtime.spatial.convolution.layer import convolve
from runtime.spatial.empties import connected
from runtime.spatial.layer_shard import LayerShard, gathered, global_places, shape_of, worked_out_once
from runtime.spatial.op_rules.generic import on_operands

_AVERAGE_POOLS = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)
_MAX_POOLS = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
_FIRST_SPACE_DIM = 2
"""Of a global pool's input; dims from here on are space."""


def run_conv(shard: LayerShard, op: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The outputs that this rank does: halos are exchanged while what is held is convolved."""
    return convolve(shard, op, arguments, transposed=False)


def run_transposed_conv(shard: LayerShard, op: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The outputs that this rank does: as a convolution, with what inputs reach in place of what outputs read."""
    return convolve(shard, op, arguments, transposed=True)


@on_operands
def run_pool(shard: LayerShard, op: Callable[..., Any], operands: dict[str, Any]) -> Any:
    """The windows of this rank's part: padding lies at the tensor's own edges only, averages divide as one device does.

        kernel 3, stride 2, padding 1:      . 0 1 2 3 4 5 6 7 .
        output [0, 2) reads [-1, 4)         . 0 1 2 3               a row of padding before it
        output [2, 4) reads  [3, 8)                 3 4 5 6 7       none: 3 is a row of the neighbour

    What reaches outside is padding.  Where the operator can pad by itself, it does so on both sides, and results beyond
    the part are cut off; else padding is put in front.
    """
    call = shard.memo.get("call")
    if call is None:
        call = shard.memo["call"] = _PoolCall.of(shard, operands)
    return call.averages(op, operands) if "avg" in shard.operator else call.maxima(op, operands)


@dataclass(frozen=True, slots=True)
class _PoolWindow:
    """A pooling window along one dim, and the part that is done of it.

    Attributes:
        outputs: of this rank.
        extent, available: rows of the tensor, and those of them that this rank has.
    """

    kernel: int
    stride: int
    padding: int
    dilation: int
    outputs: Interval
    extent: int
    available: Interval

    @property
    def before(self) -> int:
        """Rows of padding that the first output reads."""
        return max(0, self.padding - self.outputs.start * self.stride)

    @property
    def after(self) -> int:
        """Rows of padding that the last output reads."""
        reach = (self.outputs.stop - 1) * self.stride - self.padding + self.dilation * (self.kernel - 1) + 1
        return max(0, reach - self.extent)

    def has_own_padding(self, rounds_up: bool) -> bool:
        """Whether the operator's own padding makes at least these outputs, its windows beginning at the same rows."""
        if self.before not in (0, self.padding) or len(self.available) < self.kernel:
            return False  # nor does torch pad in three dims what is smaller than the window
        return self.outputs_made(self.before, rounds_up) >= len(self.outputs)

    def outputs_made(self, padding: int, rounds_up: bool) -> int:
        """Outputs that the operator makes of the rows available."""
        rows = len(self.available) + 2 * padding - self.dilation * (self.kernel - 1) - 1
        made = (-(-rows // self.stride) if rounds_up else rows // self.stride) + 1
        if rounds_up and (made - 1) * self.stride >= len(self.available) + padding:
            made -= 1  # a window must not begin in the padding after the tensor
        return made

    def divisors(self, counts_padding: bool) -> list[int]:
        """Per output, how many rows one device counts (``at::native::avg_pool2d``)."""
        counts = []
        for output in range(self.outputs.start, self.outputs.stop):
            start = output * self.stride - self.padding
            stop = min(start + self.kernel, self.extent + self.padding)
            counts.append(stop - start if counts_padding else min(stop, self.extent) - max(start, 0))
        return counts


@dataclass(frozen=True, slots=True)
class _PoolCall:
    """How the operator is called.

    Attributes:
        settings: its arguments beside the tensor.
        front: rows to be put around the tensor beforehand, as ``functional.pad`` takes them; empty: it pads by itself.
        factor: by what averages over whole windows are multiplied; None: by 1.
    """

    windows: tuple[_PoolWindow, ...]
    settings: dict[str, Any]
    front: tuple[int, ...]
    factor: Tensor | None

    @classmethod
    def of(cls, shard: LayerShard, arguments: dict[str, Any]) -> _PoolCall:
        windows = _windows(shard)
        is_average = "avg" in shard.operator
        rounds_up = bool(arguments["ceil_mode"]) or any(window.after and not window.before for window in windows)
        rounds_up = rounds_up and not is_average
        settings: dict[str, Any] = {
            "kernel_size": [window.kernel for window in windows],
            "stride": [window.stride for window in windows],
            "ceil_mode": rounds_up,
        }
        front: tuple[int, ...] = ()
        if all(window.has_own_padding(rounds_up) for window in windows):
            settings["padding"] = [window.before for window in windows]
        else:
            front = tuple(rows for window in reversed(windows) for rows in (window.before, window.after))
            settings |= {"padding": [0] * len(windows), "ceil_mode": False}
        if not is_average:
            settings["dilation"] = [window.dilation for window in windows]
            return cls(windows, settings, front, None)
        settings["count_include_pad"] = True
        return cls(windows, settings, front, _average_factor(windows, arguments))

    def maxima(self, op: Callable[..., Any], operands: dict[str, Any]) -> Any:
        x = operands["self"]
        result = op(**{**operands, **self.settings, "self": self._padded(x, _lowest(x))})
        if isinstance(result, Tensor):
            return self._cut(result)
        values, places = result
        starts = [window.available.start for window in self.windows]
        if self.front:
            starts = [start - window.before for start, window in zip(starts, self.windows, strict=True)]
        local = [len(w.available) + (w.before + w.after if self.front else 0) for w in self.windows]
        extents = [window.extent for window in self.windows]
        return self._cut(values), global_places(self._cut(places), local, starts, extents)

    def averages(self, op: Callable[..., Any], operands: dict[str, Any]) -> Tensor:
        result = self._cut(op(**{**operands, **self.settings, "self": self._padded(operands["self"], 0)}))
        if self.factor is None:
            return result
        return result * self.factor.to(result)

    def _padded(self, x: Tensor, value: float) -> Tensor:
        return functional.pad(x, self.front, value=value) if any(self.front) else x

    def _cut(self, result: Tensor) -> Tensor:
        for dim, window in enumerate(self.windows, result.ndim - len(self.windows)):
            if result.shape[dim] != len(window.outputs):
                result = result.narrow(dim, 0, len(window.outputs))
        return result


def _windows(shard: LayerShard) -> tuple[_PoolWindow, ...]:
    attributes: Any = shard.layer.attributes
    numbers = [attributes[name] for name in ("kernel", "stride", "padding", "dilation")]
    count = len(numbers[0])
    shape = shard.division.inputs[0].shape
    available = shard.exchange(0).wanted
    return tuple(
        _PoolWindow(kernel, stride, padding, dilation, outputs, extent, rows)
        for kernel, stride, padding, dilation, outputs, extent, rows in zip(
            *numbers,
            shard.done[-count:],
            shape[-count:],
            available[-count:],
            strict=True,
        )
    )


def _average_factor(windows: tuple[_PoolWindow, ...], arguments: dict[str, Any]) -> Tensor | None:
    """What an average over whole windows, padding included, is short of."""
    if arguments.get("divisor_override"):
        return None
    full = prod(window.kernel for window in windows)
    divisors = [window.divisors(bool(arguments["count_include_pad"])) for window in windows]
    if all(count == window.kernel for window, counts in zip(windows, divisors, strict=True) for count in counts):
        return None
    vectors = [torch.tensor(counts, dtype=torch.float64) for counts in divisors]
    return full / reduce(lambda found, vector: found.unsqueeze(-1) * vector, vectors)


def _lowest(x: Tensor) -> float:
    """What loses against everything."""
    return float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min


@on_operands
def run_adaptive_pool(shard: LayerShard, op: Callable[..., Any], operands: dict[str, Any]) -> Any:
    """The bins of this rank's part: they are those of the whole tensor, whichever rank makes them.

    Output o of n pools inputs floor(o i / n) ... ceil((o + 1) i / n) - 1.  Where n divides i, bins are windows that
    follow one another.  Else dims are pooled one after the other: an average as a product with a matrix, a maximum as
    that of rows picked (of equal numbers the first, as torch does, whose gradient goes there).
    """
    bins = _bins(shard)
    x = operands["self"]
    if all(each.is_whole for each in bins):
        return op(**operands)
    if "avg" in shard.operator:
        return _bin_averages(x, bins)
    values, places = _bin_maxima(x, bins)
    return (values, places) if len(shard.layer.outputs) > 1 else values


@dataclass(frozen=True, slots=True)
class _Bins:
    """The bins along one dim.

    Attributes:
        inputs, outputs: extents of the whole tensors.
        done: the outputs wanted.
        available: the rows that this rank has, from the first to the last that its bins hold.
    """

    inputs: int
    outputs: int
    done: Interval
    available: Interval

    @property
    def is_whole(self) -> bool:
        return len(self.done) == self.outputs

    @property
    def width(self) -> int | None:
        """Of bins that are alike and do not overlap."""
        times, rest = divmod(self.inputs, self.outputs)
        return None if rest else times

    def intervals(self) -> list[Interval]:
        """Rows of each bin, counted from the first one available."""
        first = self.available.start
        i = self.inputs
        n = self.outputs
        return [
            Interval(o * i // n - first, -(-(o + 1) * i // n) - first) for o in range(self.done.start, self.done.stop)
        ]


def _bin_averages(x: Tensor, bins: Sequence[_Bins]) -> Tensor:
    widths = _bin_widths(bins)
    if widths is not None:
        return _AVERAGE_POOLS[len(bins) - 1](x, widths)
    for dim, each in enumerate(bins, x.ndim - len(bins)):
        weights = x.new_zeros((len(each.done), len(each.available)))
        for row, interval in zip(weights, each.intervals(), strict=True):
            row[interval.start : interval.stop] = 1 / len(interval)
        x = torch.tensordot(x, weights, ([dim], [1])).movedim(-1, dim)
    return x


def _bin_maxima(x: Tensor, bins: Sequence[_Bins]) -> tuple[Tensor, Tensor]:
    extents = [each.inputs for each in bins]
    starts = [each.available.start for each in bins]
    widths = _bin_widths(bins)
    if widths is not None:
        values, places = _MAX_POOLS[len(bins) - 1](x, widths, return_indices=True)
        return values, global_places(places, [len(each.available) for each in bins], starts, extents)
    rows: list[Tensor] = []
    for dim, each in reversed(list(enumerate(bins, x.ndim - len(bins)))):
        index = _row_numbers_by_bin(each, x.device)
        values = _rows_by_bin(x, dim, index)
        own = index.view(*index.shape, *[1] * (x.ndim - dim - 1)).expand_as(values) + each.available.start
        x, which = values.max(dim + 1, keepdim=True)
        x = x.squeeze(dim + 1)
        spread = [own, *(_rows_by_bin(row, dim, index) for row in rows)]
        rows = [row.gather(dim + 1, which).squeeze(dim + 1) for row in spread]
    flat = torch.zeros_like(rows[0])
    for row, extent in zip(rows, extents, strict=True):
        flat = flat * extent + row
    return x, flat


def _rows_by_bin(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """``x`` with the rows of each bin in a dim after ``dim``."""
    return torch.unflatten(x.index_select(dim, index.flatten()), dim, index.shape)


def _row_numbers_by_bin(bins: _Bins, device: torch.device) -> Tensor:
    """``[bin, row]``: the rows of each bin; shorter ones repeat their last."""
    intervals = bins.intervals()
    longest = max(len(interval) for interval in intervals)
    return torch.tensor(
        [[min(interval.start + row, interval.stop - 1) for row in range(longest)] for interval in intervals],
        device=device,
    )


def _bin_widths(bins: Sequence[_Bins]) -> list[int] | None:
    widths = [each.width for each in bins]
    return None if None in widths else [width for width in widths if width is not None]


@worked_out_once
def _bins(shard: LayerShard) -> tuple[_Bins, ...]:
    name = shard.operator
    space = int(name[name.index("pool") + 4])
    inputs = shard.division.inputs[0].shape
    outputs = shard.layer.outputs[0].shape
    numbers = zip(
        inputs[-space:], outputs[-space:], shard.done[-space:], shard.exchange(0).wanted[-space:], strict=True
    )
    return tuple(_Bins(*each) for each in numbers)


def run_global_pool(shard: LayerShard, op: Callable[..., Any], arguments: dict[str, Any]) -> Tensor:
    """The mean over all of space: each rank adds up its own part, and all get the sum of what they found."""
    x = gathered(shard, arguments)["self"]
    dtype = arguments.get("dtype") or x.dtype
    shape = shape_of(shard.division.owned[0][shard.position])
    if shard.is_first:
        own = x if shard.own == shard.done else x[slices(shard.own, shard.done)]
        total = own.sum(list(range(_FIRST_SPACE_DIM, x.ndim)), dtype=sum_dtype(dtype)).view(shape)
    else:
        total = connected(torch.zeros(shape, dtype=sum_dtype(dtype), device=x.device), x)
    return (summed(shard, total) / prod(shard.division.work.shape[_FIRST_SPACE_DIM:])).to(dtype)
