"""From voxels back to points."""

from __future__ import annotations

import torch
from torch import Tensor

from cuda_ops.sparse.reference.conv import accumulator, offsets
from cuda_ops.sparse.reference.halo import add_rows


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
