"""Sparse convolution: rows in blocks that stay in cache, and in a block offset by offset: gather, multiply, add.

Blocks depend on shapes alone, never on threads, and a row's offsets are added in one order: centre first (which an odd
kernel on its own sites reads and writes in place), then ascending.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_BYTES = 1 << 20
"""Of the rows that a block gathers or adds to: half of a common level-2 cache, with the map's part beside it."""


def sparse_conv(x: Tensor, weight: Tensor, neighbours: Tensor, reverse: Tensor) -> Tensor:
    """[M, Cout]: the sum over offsets k of x [N, Cin] at neighbours[k], times weight [K, Cin, Cout]."""
    dtype, wide = x.dtype, accumulator(x.dtype)
    x, weights = x.to(wide), weight.to(wide).unbind(0)
    outputs, centre = neighbours.shape[1], identity(neighbours, x.shape[0])
    sums = x.new_zeros((outputs, weight.shape[2])) if centre is None else x @ weights[centre]
    for rows in blocks(outputs, weight.shape[1:], x):
        part = sums[rows]
        for k, to_rows, from_rows in offsets(neighbours[:, rows], centre):
            part.index_add_(0, to_rows, x.index_select(0, from_rows) @ weights[k])
    return sums.to(dtype)


def sparse_conv_weight(x: Tensor, dy: Tensor, neighbours: Tensor) -> Tensor:
    """[K, Cin, Cout]: for every offset the sum over its pairs of x [N, Cin] outer dy [M, Cout]."""
    dtype, wide = x.dtype, accumulator(x.dtype)
    x, dy, centre = x.to(wide), dy.to(wide), identity(neighbours, x.shape[0])
    sums = x.new_zeros((neighbours.shape[0], x.shape[1], dy.shape[1]))
    of_offset = sums.unbind(0)
    for rows in blocks(neighbours.shape[1], sums.shape[1:], x):
        part = dy[rows]
        if centre is not None:
            of_offset[centre].addmm_(x[rows].T, part)
        for k, to_rows, from_rows in offsets(neighbours[:, rows], centre):
            of_offset[k].addmm_(x.index_select(0, from_rows).T, part.index_select(0, to_rows))
    return sums.to(dtype)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def identity(neighbours: Tensor, inputs: int) -> int | None:
    """The offset through which every output reads the input of its own row; None: there is none in the middle."""
    volume, outputs = neighbours.shape
    middle = volume // 2
    if outputs != inputs:
        return None
    own = torch.arange(outputs, dtype=neighbours.dtype, device=neighbours.device)
    return middle if torch.equal(neighbours[middle], own) else None


def blocks(rows: int, channels: torch.Size, like: Tensor) -> Iterator[slice]:
    """Blocks of rows; on a GPU, where calls are what costs, all are one."""
    size = rows if like.device.type != "cpu" else max(512, BLOCK_BYTES // (like.element_size() * max(*channels, 16)))
    for first in range(0, rows, max(size, 1)):
        yield slice(first, min(first + size, rows))


def offsets(neighbours: Tensor, without: int | None = None) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Offset, output rows and input rows (see :func:`pairs`) of every offset with pairs, except one."""
    for k, rows in enumerate(neighbours.unbind(0)):
        if k != without:
            to_rows, from_rows = pairs(rows)
            if to_rows.shape[0]:
                yield k, to_rows, from_rows


def pairs(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Output and input rows (int64, int32) of one offset's row of a map."""
    to_rows = (rows >= 0).nonzero().squeeze(1)
    return to_rows, rows.index_select(0, to_rows)
