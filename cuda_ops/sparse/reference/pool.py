"""Pooling over the neighbours that are there."""

from __future__ import annotations

import torch
from torch import Tensor

from cuda_ops.sparse.reference.conv import accumulator, offsets


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
