"""Adaptive pooling: the bins are those of the whole tensor, whichever rank makes them.

Output o of n pools inputs floor(o i / n) ... ceil((o + 1) i / n) - 1.  Where n divides i, bins are windows that follow
one another.  Else dims are pooled one after the other: an average as a product with a matrix, a maximum as that of rows
picked (of equal numbers the first, as torch does, whose gradient goes there).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from planner.ir.box import Interval
from runtime.spatial.empties import empty_like_done
from runtime.spatial.step import Step, gathered, global_places

_AVERAGES = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)
_MAXIMA = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)


def run(step: Step, op: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The bins of this rank's part."""
    found = gathered(step, arguments)
    if step.is_empty:
        return empty_like_done(step, found)
    bins, x = _bins(step), found["self"]
    if all(each.is_whole for each in bins):
        return op(**found)
    if "avg" in str(step.layer.attributes["op"]):
        return _averages(x, bins)
    values, places = _maxima(x, bins)
    return (values, places) if len(step.layer.outputs) > 1 else values


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
        first, i, n = self.available.start, self.inputs, self.outputs
        return [
            Interval(o * i // n - first, -(-(o + 1) * i // n) - first) for o in range(self.done.start, self.done.stop)
        ]


def _averages(x: Tensor, bins: Sequence[_Bins]) -> Tensor:
    widths = _widths(bins)
    if widths is not None:
        return _AVERAGES[len(bins) - 1](x, widths)
    for dim, each in enumerate(bins, x.ndim - len(bins)):
        weights = x.new_zeros((len(each.done), len(each.available)))
        for row, interval in zip(weights, each.intervals(), strict=True):
            row[interval.start : interval.stop] = 1 / len(interval)
        x = torch.tensordot(x, weights, ([dim], [1])).movedim(-1, dim)
    return x


def _maxima(x: Tensor, bins: Sequence[_Bins]) -> tuple[Tensor, Tensor]:
    extents, starts = [each.inputs for each in bins], [each.available.start for each in bins]
    widths = _widths(bins)
    if widths is not None:
        values, places = _MAXIMA[len(bins) - 1](x, widths, return_indices=True)
        return values, global_places(places, [len(each.available) for each in bins], starts, extents)
    rows: list[Tensor] = []
    for dim, each in reversed(list(enumerate(bins, x.ndim - len(bins)))):
        index = _picking(each, x.device)
        values = _spread(x, dim, index)
        own = index.view(*index.shape, *[1] * (x.ndim - dim - 1)).expand_as(values) + each.available.start
        x, which = values.max(dim + 1, keepdim=True)
        x, spread = x.squeeze(dim + 1), [own, *(_spread(row, dim, index) for row in rows)]
        rows = [row.gather(dim + 1, which).squeeze(dim + 1) for row in spread]
    flat = torch.zeros_like(rows[0])
    for row, extent in zip(rows, extents, strict=True):
        flat = flat * extent + row
    return x, flat


def _spread(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """``x`` with the rows of each bin in a dim behind ``dim``."""
    return torch.unflatten(x.index_select(dim, index.flatten()), dim, index.shape)


def _picking(bins: _Bins, device: torch.device) -> Tensor:
    """``[bin, row]``: the rows of each bin; shorter ones repeat their last."""
    intervals = bins.intervals()
    longest = max(len(interval) for interval in intervals)
    return torch.tensor(
        [[min(interval.start + row, interval.stop - 1) for row in range(longest)] for interval in intervals],
        device=device,
    )


def _widths(bins: Sequence[_Bins]) -> list[int] | None:
    widths = [each.width for each in bins]
    return None if None in widths else [width for width in widths if width is not None]


def _bins(step: Step) -> tuple[_Bins, ...]:
    if "bins" not in step.memo:
        name = str(step.layer.attributes["op"])
        space = int(name[name.index("pool") + 4])
        inputs, outputs = step.division.inputs[0].shape, step.layer.outputs[0].shape
        numbers = zip(
            inputs[-space:], outputs[-space:], step.done[-space:], step.exchange(0).wanted[-space:], strict=True
        )
        step.memo["bins"] = tuple(_Bins(*each) for each in numbers)
    bins: tuple[_Bins, ...] = step.memo["bins"]
    return bins
