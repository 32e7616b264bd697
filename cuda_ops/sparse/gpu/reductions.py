"""Reductions: pooling over the neighbours of a map, sums and maxima over runs of rows, and their ways back.

Pooling: a program owns a tile of output rows x channels and goes through the offsets in ascending order.

Runs of rows (segments): few long ones (samples of a batch) are divided into shares that are added in their order
afterwards; many short ones (points of a voxel) are taken several at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuda_ops.sparse.gpu.launch import accumulator, block_of, jit, launch

MOST_COLUMNS = 64
ELEMENTS = 2048  # of a tile that pools
LONG = 32  # mean rows of a segment from which on it has a program of its own
SHARE_ROWS = 256  # mean rows of a share
MOST_SHARES = 64  # of a segment


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


def window_tile(num_channels: int) -> dict[str, int]:
    """Rows and channels of a program."""
    columns = block_of(num_channels, 1, MOST_COLUMNS)
    return {"ROWS": min(ELEMENTS // columns, 256), "COLUMNS": columns}


def sparse_max_pool(x: Tensor, neighbours: Tensor, reverse: Tensor) -> tuple[Tensor, Tensor]:
    """Largest neighbour [M, C] and its input row int32 [M, C]; 0 and -1 where there is none."""
    num_offsets, num_rows = neighbours.shape
    num_channels = x.shape[1]
    y = x.new_empty((num_rows, num_channels))
    argmax = torch.empty_like(y, dtype=torch.int32)
    sizes = window_tile(num_channels)
    grid = (triton.cdiv(num_rows, sizes["ROWS"]), triton.cdiv(num_channels, sizes["COLUMNS"]))
    launch(
        largest_neighbour, grid, x,
        x.contiguous(), neighbours.contiguous(), y, argmax, num_rows, num_offsets, num_channels,
        **sizes, WIDE=accumulator(x.dtype),
    )  # fmt: skip
    return y, argmax


def sparse_max_pool_backward(dy: Tensor, argmax: Tensor, reverse: Tensor) -> Tensor:
    """[N, C]: every input row gets the gradients dy [M, C] of the outputs that took it."""
    return _sum_pool(dy, reverse, argmax)


def sparse_sum_pool(x: Tensor, neighbours: Tensor, reverse: Tensor) -> Tensor:
    """[M, C]: the sum of the neighbours that are there."""
    return _sum_pool(x, neighbours, None)


def _sum_pool(x: Tensor, neighbours: Tensor, argmax: Tensor | None) -> Tensor:
    num_offsets, num_rows = neighbours.shape
    num_channels = x.shape[1]
    y = x.new_empty((num_rows, num_channels))
    neighbours = neighbours.contiguous()
    sizes = window_tile(num_channels)
    grid = (triton.cdiv(num_rows, sizes["ROWS"]), triton.cdiv(num_channels, sizes["COLUMNS"]))
    launch(
        sum_of_neighbours, grid, x,
        x.contiguous(), neighbours, neighbours if argmax is None else argmax.contiguous(), y,
        num_rows, num_offsets, num_channels, **sizes, WIDE=accumulator(x.dtype), TAKEN=argmax is not None,
    )  # fmt: skip
    return y


@jit
def bounds(
    starts: tl.tensor, lengths: tl.tensor, segments: tl.tensor, exists: tl.tensor, share: tl.tensor,
    num_shares: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """First row and number of rows of a share of each segment."""
    length = tl.load(lengths + segments, mask=exists, other=0)
    part = (length + num_shares - 1) // num_shares
    skipped = tl.minimum(share * part, length)
    return tl.load(starts + segments, mask=exists, other=0) + skipped, tl.minimum(part, length - skipped)


@jit(do_not_specialize=["num_segments"])
def add_segments(
    x: tl.tensor, starts: tl.tensor, lengths: tl.tensor, y: tl.tensor, num_segments: tl.tensor, num_channels: tl.tensor,
    SEGMENTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """The sum of a share."""
    segments = tl.program_id(0) * SEGMENTS + tl.arange(0, SEGMENTS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    exists = segments < num_segments
    start, length = bounds(starts, lengths, segments, exists, tl.program_id(1), tl.num_programs(1))
    total = tl.zeros((SEGMENTS, ROWS, COLUMNS), dtype=WIDE)
    for first in range(0, tl.max(length, 0), ROWS):
        steps = first + tl.arange(0, ROWS)
        there = (steps[None, :] < length[:, None])[:, :, None] & (columns < num_channels)[None, None, :]
        at = (start[:, None] + steps[None, :])[:, :, None] * num_channels + columns[None, None, :]
        total += tl.load(x + at, mask=there, other=0.0).to(WIDE)
    place = (segments * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    tl.store(
        y + place[:, None] * num_channels + columns[None, :],
        tl.sum(total, 1).to(y.dtype.element_ty),
        mask=exists[:, None] & (columns < num_channels)[None, :],
    )


@jit(do_not_specialize=["num_segments"])
def largest_of_segments(
    x: tl.tensor, starts: tl.tensor, lengths: tl.tensor, y: tl.tensor, argmax: tl.tensor, num_segments: tl.tensor,
    num_channels: tl.tensor, SEGMENTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """The largest value of a share and its row; without rows -infinity and -1.  The first NaN wins."""
    segments = tl.program_id(0) * SEGMENTS + tl.arange(0, SEGMENTS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    exists = segments < num_segments
    start, length = bounds(starts, lengths, segments, exists, tl.program_id(1), tl.num_programs(1))
    best = tl.full((SEGMENTS, ROWS, COLUMNS), -float("inf"), dtype=WIDE)
    winner = tl.full((SEGMENTS, ROWS, COLUMNS), -1, dtype=tl.int32)
    for first in range(0, tl.max(length, 0), ROWS):
        steps = first + tl.arange(0, ROWS)
        there = (steps[None, :] < length[:, None])[:, :, None] & (columns < num_channels)[None, None, :]
        rows = (start[:, None] + steps[None, :])[:, :, None]
        value = tl.load(x + rows * num_channels + columns[None, None, :], mask=there, other=0.0).to(WIDE)
        takes = there & ((winner < 0) | (value > best) | ((value != value) & (best == best)))
        best = tl.where(takes, value, best)
        winner = tl.where(takes, rows.to(tl.int32), winner)
    nan = best != best
    some_nan = tl.max(nan.to(tl.int32), 1) > 0
    largest = tl.max(tl.where(nan, -float("inf"), best), 1)
    candidate = (winner >= 0) & tl.where(some_nan[:, None, :], nan, best == largest[:, None, :])
    row = tl.min(tl.where(candidate, winner, 2147483647), 1)
    place = (segments * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    at = place[:, None] * num_channels + columns[None, :]
    here = exists[:, None] & (columns < num_channels)[None, :]
    tl.store(y + at, tl.where(some_nan, float("nan"), largest).to(y.dtype.element_ty), mask=here)
    tl.store(argmax + at, tl.where(row == 2147483647, -1, row), mask=here)


@jit(do_not_specialize=["num_segments"])
def expand_segments(
    y: tl.tensor, starts: tl.tensor, lengths: tl.tensor, x: tl.tensor, num_segments: tl.tensor, num_channels: tl.tensor,
    SEGMENTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """A segment's row, written to each row of a share."""
    segments = tl.program_id(0) * SEGMENTS + tl.arange(0, SEGMENTS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    exists = segments < num_segments
    start, length = bounds(starts, lengths, segments, exists, tl.program_id(1), tl.num_programs(1))
    mask = exists[:, None] & (columns < num_channels)[None, :]
    value = tl.load(y + segments.to(tl.int64)[:, None] * num_channels + columns[None, :], mask=mask, other=0.0)
    value = tl.broadcast_to(value[:, None, :], (SEGMENTS, ROWS, COLUMNS))
    for first in range(0, tl.max(length, 0), ROWS):
        steps = first + tl.arange(0, ROWS)
        there = (steps[None, :] < length[:, None])[:, :, None] & (columns < num_channels)[None, None, :]
        at = (start[:, None] + steps[None, :])[:, :, None] * num_channels + columns[None, None, :]
        tl.store(x + at, value, mask=there)


def shape_of(num_segments: int, num_rows: int, num_channels: int) -> tuple[int, dict[str, int]]:
    """Shares of a segment, and the tile of a program."""
    columns = block_of(num_channels, 1, MOST_COLUMNS)
    if num_rows < LONG * num_segments:
        return 1, {"SEGMENTS": 16, "ROWS": 2, "COLUMNS": columns}
    shares = max(1, min(MOST_SHARES, num_rows // (num_segments * SHARE_ROWS)))
    return shares, {"SEGMENTS": 1, "ROWS": 32, "COLUMNS": columns}


def grid_of(num_segments: int, shares: int, num_channels: int, sizes: dict[str, int]) -> tuple[int, int, int]:
    """Programs by segments, shares and channels."""
    return triton.cdiv(num_segments, sizes["SEGMENTS"]), shares, triton.cdiv(num_channels, sizes["COLUMNS"])


def runs(num_segments: int, shares: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Starts and lengths of the shares of each segment."""
    starts = torch.arange(0, num_segments * shares, shares, device=like.device)
    return starts, torch.full_like(starts, shares)


def segment_sum(x: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """[B, C]: sums of rows starts[b] .. starts[b] + lengths[b] of x [N, C]; 0 for an empty segment."""
    num_segments = len(starts)
    num_rows, num_channels = x.shape
    if num_segments == 0:
        return x.new_zeros((0, num_channels))
    shares, sizes = shape_of(num_segments, num_rows, num_channels)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = x.new_empty((num_segments * shares, num_channels), dtype=x.dtype if shares == 1 else wide)
    launch(
        add_segments, grid_of(num_segments, shares, num_channels, sizes), x,
        x.contiguous(), starts.contiguous(), lengths.contiguous(), y, num_segments, num_channels,
        **sizes, WIDE=accumulator(x.dtype),
    )  # fmt: skip
    return y if shares == 1 else y.view(num_segments, shares, num_channels).sum(1).to(x.dtype)


def segment_max(x: Tensor, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value [B, C] of every segment and its row int32 [B, C]; 0 and -1 for an empty segment."""
    num_segments = len(starts)
    num_rows, num_channels = x.shape
    if num_segments == 0:
        return x.new_zeros((0, num_channels)), x.new_zeros((0, num_channels), dtype=torch.int32)
    shares, sizes = shape_of(num_segments, num_rows, num_channels)
    largest, argmax = _largest(x, starts, lengths, shares, sizes)
    if shares > 1:  # of the shares' maxima; empty shares are last, so that they never win
        shared_rows = argmax
        largest, argmax = _largest(largest, *runs(num_segments, shares, x), 1, sizes)
        argmax = shared_rows.gather(0, argmax.to(torch.int64))
    return torch.where(argmax < 0, 0, largest), argmax


def _largest(x: Tensor, starts: Tensor, lengths: Tensor, shares: int, sizes: dict[str, int]) -> tuple[Tensor, Tensor]:
    num_segments = len(starts)
    num_channels = x.shape[1]
    y = x.new_empty((num_segments * shares, num_channels))
    argmax = torch.empty_like(y, dtype=torch.int32)
    launch(
        largest_of_segments, grid_of(num_segments, shares, num_channels, sizes), x,
        x.contiguous(), starts.contiguous(), lengths.contiguous(), y, argmax, num_segments, num_channels,
        **sizes, WIDE=accumulator(x.dtype),
    )  # fmt: skip
    return y, argmax


def segment_expand(y: Tensor, starts: Tensor, lengths: Tensor, num_rows: int) -> Tensor:
    """[num_rows, C]: every row gets its segment's row of y [B, C]; rows of no segment get 0."""
    num_segments, num_channels = y.shape
    x = y.new_zeros((num_rows, num_channels))
    if num_segments:
        shares, sizes = shape_of(num_segments, num_rows, num_channels)
        launch(
            expand_segments, grid_of(num_segments, shares, num_channels, sizes), y,
            y.contiguous(), starts.contiguous(), lengths.contiguous(), x, num_segments, num_channels, **sizes,
        )  # fmt: skip
    return x
