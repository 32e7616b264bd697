"""Pooling: a program owns a tile of output rows x channels and goes through the offsets in ascending order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cuda_ops.sparse.gpu.launch import accumulator, block_of, jit, launch

ELEMENTS = 2048  # of a tile
MOST_COLUMNS = 64


@jit(do_not_specialize=["num_rows"])
def largest_neighbour(
    x: tl.tensor, neighbours: tl.tensor, y: tl.tensor, argmax: tl.tensor, num_rows: tl.tensor, num_offsets: tl.tensor,
    num_channels: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Ties go to the smallest offset, the first NaN wins."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = rows < num_rows
    here = exists[:, None] & (columns < num_channels)[None, :]
    best = tl.zeros((ROWS, COLUMNS), dtype=WIDE)
    winner = tl.full((ROWS, COLUMNS), -1, dtype=tl.int32)
    for _ in range(num_offsets):
        sources = tl.load(neighbours + rows, mask=exists, other=-1)
        there = here & (sources >= 0)[:, None]
        value = tl.load(x + sources.to(tl.int64)[:, None] * num_channels + columns[None, :], mask=there, other=0.0)
        value = value.to(WIDE)
        takes = there & ((winner < 0) | (value > best) | ((value != value) & (best == best)))
        best = tl.where(takes, value, best)
        winner = tl.where(takes, sources[:, None], winner)
        neighbours += num_rows
    at = rows.to(tl.int64)[:, None] * num_channels + columns[None, :]
    tl.store(y + at, best.to(y.dtype.element_ty), mask=here)
    tl.store(argmax + at, winner, mask=here)


@jit(do_not_specialize=["num_rows"])
def sum_of_neighbours(
    x: tl.tensor, neighbours: tl.tensor, argmax: tl.tensor, y: tl.tensor, num_rows: tl.tensor, num_offsets: tl.tensor,
    num_channels: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, TAKEN: tl.constexpr,
) -> None:  # fmt: skip
    """The sum over neighbours; with ``TAKEN`` of those alone whose maximum came from this row."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = rows < num_rows
    here = exists[:, None] & (columns < num_channels)[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=WIDE)
    for _ in range(num_offsets):
        sources = tl.load(neighbours + rows, mask=exists, other=-1)
        there = here & (sources >= 0)[:, None]
        at = sources.to(tl.int64)[:, None] * num_channels + columns[None, :]
        if TAKEN:
            there = there & (tl.load(argmax + at, mask=there, other=-1) == rows[:, None])
        total += tl.load(x + at, mask=there, other=0.0).to(WIDE)
        neighbours += num_rows
    at = rows.to(tl.int64)[:, None] * num_channels + columns[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=here)


def tile(num_channels: int) -> dict[str, int]:
    """Rows and channels of a program."""
    columns = block_of(num_channels, 1, MOST_COLUMNS)
    return {"ROWS": min(ELEMENTS // columns, 256), "COLUMNS": columns}


def sparse_max_pool(
    x: torch.Tensor, neighbours: torch.Tensor, reverse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest neighbour [M, C] and its input row int32 [M, C]; 0 and -1 where there is none."""
    (num_offsets, num_rows), num_channels = neighbours.shape, x.shape[1]
    y = x.new_empty((num_rows, num_channels))
    argmax = torch.empty_like(y, dtype=torch.int32)
    sizes = tile(num_channels)
    grid = (triton.cdiv(num_rows, sizes["ROWS"]), triton.cdiv(num_channels, sizes["COLUMNS"]))
    launch(
        largest_neighbour, grid, x,
        x.contiguous(), neighbours.contiguous(), y, argmax, num_rows, num_offsets, num_channels,
        **sizes, WIDE=accumulator(x.dtype),
    )  # fmt: skip
    return y, argmax


def sparse_max_pool_backward(dy: torch.Tensor, argmax: torch.Tensor, reverse: torch.Tensor) -> torch.Tensor:
    """[N, C]: every input row gets the gradients dy [M, C] of the outputs that took it."""
    return _sum(dy, reverse, argmax)


def sparse_sum_pool(x: torch.Tensor, neighbours: torch.Tensor, reverse: torch.Tensor) -> torch.Tensor:
    """[M, C]: the sum of the neighbours that are there."""
    return _sum(x, neighbours, None)


def _sum(x: torch.Tensor, neighbours: torch.Tensor, argmax: torch.Tensor | None) -> torch.Tensor:
    (num_offsets, num_rows), num_channels = neighbours.shape, x.shape[1]
    y = x.new_empty((num_rows, num_channels))
    neighbours = neighbours.contiguous()
    sizes = tile(num_channels)
    grid = (triton.cdiv(num_rows, sizes["ROWS"]), triton.cdiv(num_channels, sizes["COLUMNS"]))
    launch(
        sum_of_neighbours, grid, x,
        x.contiguous(), neighbours, neighbours if argmax is None else argmax.contiguous(), y,
        num_rows, num_offsets, num_channels, **sizes, WIDE=accumulator(x.dtype), TAKEN=argmax is not None,
    )  # fmt: skip
    return y
