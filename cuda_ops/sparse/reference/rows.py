"""Rows and boxes that travel: packed into one buffer, and put back.

From voxels back to points.

Pooling over the neighbours that are there.

Reductions over runs of rows: samples of a batch, points of a voxel.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from cuda_ops.sparse.reference.conv import accumulator, offsets


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


def interpolate(x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """[P, C]: for every point the sum of rows index [P, E] of x [N, C] times weight [P, E]; -1 is an absent row."""
    sums = x.new_zeros((index.shape[0], x.shape[1]), dtype=accumulator(x.dtype))
    for corner, points, rows in offsets(index.T.contiguous()):
        sums.index_add_(0, points, x.index_select(0, rows) * _column(weight, corner, points, sums.dtype))
    return sums.to(x.dtype)


def interpolate_backward(dy: Tensor, index: Tensor, weight: Tensor, num_rows: int) -> Tensor:
    """[num_rows, C]: every row gets dy [P, C] of the points that read it, times their weight."""
    sums = dy.new_zeros((num_rows, dy.shape[1]), dtype=accumulator(dy.dtype))
    for corner, points, rows in offsets(index.T.contiguous()):
        add_rows(sums, rows, dy.index_select(0, points) * _column(weight, corner, points, sums.dtype))
    return sums.to(dy.dtype)


def interpolate_weight(x: Tensor, dy: Tensor, index: Tensor) -> Tensor:
    """[P, E]: the product of dy [P, C] and the row of x [N, C] that a point reads; 0 where it is absent."""
    wide = accumulator(x.dtype)
    products = x.new_zeros(index.shape, dtype=wide)
    for corner, points, rows in offsets(index.T.contiguous()):
        products[points, corner] = (x.index_select(0, rows).to(wide) * dy.index_select(0, points)).sum(1)
    return products.to(x.dtype)


def _column(weight: Tensor, corner: int, points: Tensor, dtype: torch.dtype) -> Tensor:
    return weight[:, corner].index_select(0, points).to(dtype)[:, None]


def sparse_max_pool(x: Tensor, neighbours: Tensor, reverse: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value [M, C] of the neighbours that are there and the input row int32 [M, C] that it came from.

    Ties go to the smallest k; without any neighbour 0 and -1; the first NaN wins.
    """
    outputs, channels = neighbours.shape[1], x.shape[1]
    largest = x.new_zeros((outputs, channels))
    argmax = neighbours.new_full((outputs, channels), -1)
    for _, to_rows, from_rows in offsets(neighbours):
        candidate, best = x.index_select(0, from_rows), largest.index_select(0, to_rows)
        best_row = argmax.index_select(0, to_rows)
        takes = (best_row < 0) | (candidate > best) | (candidate.isnan() & ~best.isnan())
        largest.index_copy_(0, to_rows, torch.where(takes, candidate, best))
        argmax.index_copy_(0, to_rows, torch.where(takes, from_rows[:, None], best_row))
    return largest, argmax


def sparse_max_pool_backward(dy: Tensor, argmax: Tensor, reverse: Tensor) -> Tensor:
    """[N, C]: every input row gets the gradients dy [M, C] of the outputs that took it."""
    sums = dy.new_zeros((reverse.shape[1], dy.shape[1]), dtype=accumulator(dy.dtype))
    for _, rows, from_rows in offsets(reverse):
        taken = argmax.index_select(0, from_rows) == rows[:, None]
        sums.index_add_(0, rows, torch.where(taken, dy.index_select(0, from_rows), 0).to(sums.dtype))
    return sums.to(dy.dtype)


def sparse_sum_pool(x: Tensor, neighbours: Tensor, reverse: Tensor) -> Tensor:
    """[M, C]: the sum of the neighbours that are there."""
    sums = x.new_zeros((neighbours.shape[1], x.shape[1]), dtype=accumulator(x.dtype))
    for _, to_rows, from_rows in offsets(neighbours):
        sums.index_add_(0, to_rows, x.index_select(0, from_rows).to(sums.dtype))
    return sums.to(x.dtype)


def segment_sum(x: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """[B, C]: sums of rows starts[b] .. starts[b] + lengths[b] of x [N, C]; 0 for an empty segment."""
    rows, segments = segment_rows(starts, lengths)
    sums = x.new_zeros((len(starts), x.shape[1]), dtype=accumulator(x.dtype))
    add_rows(sums, segments, x.index_select(0, rows))
    return sums.to(x.dtype)


def segment_max(x: Tensor, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value [B, C] of every segment and its row int32 [B, C]; 0 and -1 for an empty segment.

    Ties go to the smallest row; the first NaN wins.
    """
    rows, segments = segment_rows(starts, lengths)
    values, shape = x.index_select(0, rows), (len(starts), x.shape[1])
    spread = segments[:, None].expand(-1, shape[1])
    largest = torch.full(shape, -torch.inf, dtype=x.dtype, device=x.device).scatter_reduce_(0, spread, values, "amax")
    takes = (values == largest[segments]) | values.isnan()
    absent = x.shape[0]
    argmax = torch.full(shape, absent, dtype=torch.int64, device=x.device)
    argmax.scatter_reduce_(0, spread, torch.where(takes, rows[:, None], absent), "amin")
    there = argmax < absent
    return torch.where(there, largest, 0), torch.where(there, argmax, -1).to(torch.int32)


def segment_expand(y: Tensor, starts: Tensor, lengths: Tensor, num_rows: int) -> Tensor:
    """[num_rows, C]: every row gets its segment's row of y [B, C]; rows of no segment get 0."""
    rows, segments = segment_rows(starts, lengths)
    spread = torch.zeros((num_rows, y.shape[1]), dtype=y.dtype, device=y.device)
    return spread.index_copy_(0, rows, y.index_select(0, segments))


def segment_rows(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and their segments, int64, segment after segment."""
    segments = torch.repeat_interleave(lengths)
    firsts = starts - (lengths.cumsum(0) - lengths)
    return torch.arange(len(segments), device=starts.device) + firsts[segments], segments
