"""From voxels back to points: every point reads a few rows, each with a weight."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cuda_ops.sparse.gpu.launch import accumulator, block_of, jit, launch
from cuda_ops.sparse.gpu.rows import add_in_order

ELEMENTS = 2048  # of a tile
MOST_COLUMNS = 64


@jit(do_not_specialize=["num_points"])
def weighted_rows(
    x: tl.tensor, index: tl.tensor, weight: tl.tensor, y: tl.tensor, num_points: tl.tensor, num_entries: tl.tensor,
    num_channels: tl.tensor, POINTS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """The sum of a point's rows, each times its weight."""
    points = tl.program_id(0) * POINTS + tl.arange(0, POINTS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = points < num_points
    here = exists[:, None] & (columns < num_channels)[None, :]
    total = tl.zeros((POINTS, COLUMNS), dtype=WIDE)
    at = points.to(tl.int64) * num_entries
    for _ in range(num_entries):
        sources = tl.load(index + at, mask=exists, other=-1)
        there = here & (sources >= 0)[:, None]
        value = tl.load(x + sources.to(tl.int64)[:, None] * num_channels + columns[None, :], mask=there, other=0.0)
        total += value.to(WIDE) * tl.load(weight + at, mask=exists, other=0.0).to(WIDE)[:, None]
        at += 1
    tl.store(
        y + points.to(tl.int64)[:, None] * num_channels + columns[None, :], total.to(y.dtype.element_ty), mask=here
    )


@jit(do_not_specialize=["num_points"])
def products_of_rows(
    x: tl.tensor, dy: tl.tensor, index: tl.tensor, products: tl.tensor, num_points: tl.tensor, num_entries: tl.tensor,
    num_channels: tl.tensor, POINTS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """The product of a point's row and the row that it reads through one entry."""
    points = tl.program_id(0) * POINTS + tl.arange(0, POINTS)
    exists = points < num_points
    at = points.to(tl.int64) * num_entries + tl.program_id(1)
    sources = tl.load(index + at, mask=exists, other=-1).to(tl.int64)
    total = tl.zeros((POINTS, COLUMNS), dtype=WIDE)
    for first in range(0, num_channels, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        there = (sources >= 0)[:, None] & (columns < num_channels)[None, :]
        left = tl.load(x + sources[:, None] * num_channels + columns[None, :], mask=there, other=0.0).to(WIDE)
        place = points.to(tl.int64)[:, None] * num_channels + columns[None, :]
        total += left * tl.load(dy + place, mask=there, other=0.0).to(WIDE)
    tl.store(products + at, tl.sum(total, 1).to(products.dtype.element_ty), mask=exists)


def tile(num_channels: int) -> dict[str, int]:
    """Points and channels of a program."""
    columns = block_of(num_channels, 1, MOST_COLUMNS)
    return {"POINTS": min(ELEMENTS // columns, 128), "COLUMNS": columns}


def interpolate(x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[P, C]: for every point the sum of rows index [P, E] of x [N, C] times weight [P, E]; -1 is an absent row."""
    (num_points, num_entries), num_channels = index.shape, x.shape[1]
    y = x.new_empty((num_points, num_channels))
    sizes = tile(num_channels)
    grid = (triton.cdiv(num_points, sizes["POINTS"]), triton.cdiv(num_channels, sizes["COLUMNS"]))
    launch(
        weighted_rows, grid, x,
        x.contiguous(), index.contiguous(), weight.contiguous(), y, num_points, num_entries, num_channels,
        **sizes, WIDE=accumulator(x.dtype),
    )  # fmt: skip
    return y


def interpolate_backward(dy: torch.Tensor, index: torch.Tensor, weight: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[num_rows, C]: every row gets dy [P, C] of the points that read it, times their weight, in the points' order."""
    dx = dy.new_zeros((num_rows, dy.shape[1]))
    if index.numel():
        add_in_order(dx, index.flatten(), dy.contiguous(), weight.contiguous().flatten(), index.shape[1])
    return dx


def interpolate_weight(x: torch.Tensor, dy: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[P, E]: the product of dy [P, C] and the row of x [N, C] that a point reads; 0 where it is absent."""
    (num_points, num_entries), num_channels = index.shape, x.shape[1]
    products = x.new_empty((num_points, num_entries))
    sizes = tile(num_channels)
    launch(
        products_of_rows, (triton.cdiv(num_points, sizes["POINTS"]), num_entries), x,
        x.contiguous(), dy.contiguous(), index.contiguous(), products, num_points, num_entries, num_channels,
        **sizes, WIDE=accumulator(x.dtype),
    )  # fmt: skip
    return products
