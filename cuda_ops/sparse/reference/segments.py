"""Reductions over runs of rows: samples of a batch, points of a voxel."""

from __future__ import annotations

import torch
from torch import Tensor

from cuda_ops.sparse.reference.conv import accumulator
from cuda_ops.sparse.reference.halo import add_rows


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
