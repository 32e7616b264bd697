"""Rows and boxes that travel: packed into one buffer, and put back."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


def pack_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows index [R] of x [N, ...]."""
    return x.index_select(0, index)


def unpack_add(base: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """Base [N, ...] with rows [R, ...] added at index [R]; those of one row one after another."""
    sums = base.clone(memory_format=torch.contiguous_format)
    add_rows(sums, index, rows)
    return sums


def add_rows(sums: Tensor, index: Tensor, rows: Tensor) -> None:
    """Adds rows at index, in place and in order; on a GPU by sorting, since atomic additions come in any order."""
    if not len(index):
        return
    if sums.device.type == "cpu":
        sums.index_add_(0, index, rows.to(sums.dtype))
        return
    order = torch.sort(index, stable=True)
    targets, lengths = torch.unique_consecutive(order.values, return_counts=True)
    addends = torch.segment_reduce(rows[order.indices].to(sums.dtype).flatten(1), "sum", lengths=lengths)
    sums[targets] += addends.view(len(targets), *sums.shape[1:])


def pack_boxes(x: Tensor, boxes: Sequence[int]) -> Tensor:
    """The elements of boxes of x one box after another, 1-D; boxes are flat: start, stop a dim, box by box."""
    parts = [x[box].reshape(-1) for box in slices(boxes, x.ndim)]
    return torch.cat(parts) if parts else x.new_empty(0)


def unpack_boxes(buffer: Tensor, x: Tensor, boxes: Sequence[int], add: bool) -> Tensor:
    """A copy of x with the elements of buffer put into its boxes, or added to them."""
    filled, first = x.clone(memory_format=torch.contiguous_format), 0
    for box in slices(boxes, x.ndim):
        target = filled[box]
        part = buffer[first : first + target.numel()].view(target.shape)
        if add:
            target += part
        else:
            target.copy_(part)
        first += target.numel()
    return filled


def slices(boxes: Sequence[int], dims: int) -> list[tuple[slice, ...]]:
    """Boxes as indices."""
    bounds = list(zip(boxes[::2], boxes[1::2], strict=True))
    return [tuple(slice(*bound) for bound in bounds[i : i + dims]) for i in range(0, len(bounds), dims)]


def elements(boxes: Sequence[int], dims: int) -> int:
    """Of all boxes together."""
    return sum(prod(part.stop - part.start for part in box) for box in slices(boxes, dims))
