"""What is read from somewhere and put, or added, somewhere else.

Rows that are packed and added back in a fixed order: rows of a halo, corners of points.  Points that each read a few
rows of voxels, each with a weight.  Boxes of a dense tensor that travel: one launch a box, straight from the tensor's
strides into the buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuda_ops.sparse.gpu.launch import accumulator, block_of, jit, launch

ELEMENTS = 2048  # of a tile
ROW_COLUMNS = 128  # of a tile, at most
POINT_COLUMNS = 64
DIMS = 5  # of a box: batch, channels, and up to three of space
MOST = 2**31 - 1  # elements of a box, counted in int32
BOX_ELEMENTS = 1024  # of a program that moves a box
PACK = 0
PUT = 1
ADD = 2


@jit(do_not_specialize=["num_rows"])
def copy_rows(
    x: tl.tensor, index: tl.tensor, y: tl.tensor, num_rows: tl.tensor, num_columns: tl.tensor, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """y[r] = x[index[r]]."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sources = tl.load(index + rows, mask=rows < num_rows, other=0).to(tl.int64)
    here = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    value = tl.load(x + sources[:, None] * num_columns + columns[None, :], mask=here)
    tl.store(y + rows.to(tl.int64)[:, None] * num_columns + columns[None, :], value, mask=here)


@jit(do_not_specialize=["num_entries"])
def add_runs(
    y: tl.tensor, targets: tl.tensor, order: tl.tensor, rows: tl.tensor, weight: tl.tensor, num_entries: tl.tensor,
    num_columns: tl.tensor, entries_a_row: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
    WEIGHTED: tl.constexpr,
) -> None:  # fmt: skip
    """Adds entries, sorted by target, to y; who sees a run's first entry adds the whole run, in order.

    Entry e is row ``order[e] // entries_a_row`` of ``rows``, times ``weight[order[e]]`` if ``WEIGHTED``.
    """
    entries = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = entries < num_entries
    target = tl.load(targets + entries, mask=exists, other=-1).to(tl.int64)
    before = tl.load(targets + entries - 1, mask=exists & (entries > 0), other=-1).to(tl.int64)
    active = (target >= 0) & (target != before)
    first = active[:, None] & (columns < num_columns)[None, :]
    at = target[:, None] * num_columns + columns[None, :]
    total = tl.load(y + at, mask=first, other=0.0).to(WIDE)
    while tl.max(active.to(tl.int32), 0) > 0:
        place = tl.load(order + entries, mask=active, other=0)
        value = tl.load(
            rows + (place // entries_a_row)[:, None] * num_columns + columns[None, :],
            mask=active[:, None] & (columns < num_columns)[None, :],
            other=0.0,
        ).to(WIDE)
        if WEIGHTED:
            value *= tl.load(weight + place, mask=active, other=0.0).to(WIDE)[:, None]
        total += value
        entries += 1
        active = active & (entries < num_entries)
        active = active & (tl.load(targets + entries, mask=active, other=-1).to(tl.int64) == target)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=first)


def row_tile(num_columns: int) -> dict[str, int]:
    """Rows and columns of a program."""
    columns = block_of(num_columns, 1, ROW_COLUMNS)
    return {"ROWS": min(ELEMENTS // columns, 128), "COLUMNS": columns}


def pack_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows index [R] of x [N, ...]."""
    flat = x.contiguous().flatten(1) if x.ndim > 1 else x.contiguous()[:, None]
    y = flat.new_empty((len(index), flat.shape[1]))
    sizes = row_tile(flat.shape[1])
    grid = (triton.cdiv(len(index), sizes["ROWS"]), triton.cdiv(flat.shape[1], sizes["COLUMNS"]))
    launch(copy_rows, grid, x, flat, index.contiguous(), y, len(index), flat.shape[1], **sizes)
    return y.view(len(index), *x.shape[1:])


def unpack_add(base: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """Base [N, ...] with rows [R, ...] added at index [R]; those of one row one after another."""
    sums = base.clone(memory_format=torch.contiguous_format)
    if len(index):
        add_in_order(sums.view(len(base), -1), index, rows.reshape(len(index), -1).contiguous(), None, 1)
    return sums


def add_in_order(y: Tensor, index: Tensor, rows: Tensor, weight: Tensor | None, entries_a_row: int) -> None:
    """Adds to y [N, C], in place, every entry e at index[e]: row ``e // entries_a_row`` of rows times weight[e].

    An index of -1 is nowhere.
    """
    targets, order = torch.sort(index, stable=True)
    sizes = row_tile(y.shape[1])
    grid = (triton.cdiv(len(index), sizes["ROWS"]), triton.cdiv(y.shape[1], sizes["COLUMNS"]))
    launch(
        add_runs, grid, y,
        y, targets, order, rows, rows if weight is None else weight, len(index), y.shape[1], entries_a_row,
        **sizes, WIDE=accumulator(y.dtype), WEIGHTED=weight is not None,
    )  # fmt: skip


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


def point_tile(num_channels: int) -> dict[str, int]:
    """Points and channels of a program."""
    columns = block_of(num_channels, 1, POINT_COLUMNS)
    return {"POINTS": min(ELEMENTS // columns, 128), "COLUMNS": columns}


def interpolate(x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """[P, C]: for every point the sum of rows index [P, E] of x [N, C] times weight [P, E]; -1 is an absent row."""
    num_points, num_entries = index.shape
    num_channels = x.shape[1]
    y = x.new_empty((num_points, num_channels))
    sizes = point_tile(num_channels)
    grid = (triton.cdiv(num_points, sizes["POINTS"]), triton.cdiv(num_channels, sizes["COLUMNS"]))
    launch(
        weighted_rows, grid, x,
        x.contiguous(), index.contiguous(), weight.contiguous(), y, num_points, num_entries, num_channels,
        **sizes, WIDE=accumulator(x.dtype),
    )  # fmt: skip
    return y


def interpolate_backward(dy: Tensor, index: Tensor, weight: Tensor, num_rows: int) -> Tensor:
    """[num_rows, C]: every row gets dy [P, C] of the points that read it, times their weight, in the points' order."""
    dx = dy.new_zeros((num_rows, dy.shape[1]))
    if index.numel():
        add_in_order(dx, index.flatten(), dy.contiguous(), weight.contiguous().flatten(), index.shape[1])
    return dx


def interpolate_weight(x: Tensor, dy: Tensor, index: Tensor) -> Tensor:
    """[P, E]: the product of dy [P, C] and the row of x [N, C] that a point reads; 0 where it is absent."""
    num_points, num_entries = index.shape
    num_channels = x.shape[1]
    products = x.new_empty((num_points, num_entries))
    sizes = point_tile(num_channels)
    launch(
        products_of_rows, (triton.cdiv(num_points, sizes["POINTS"]), num_entries), x,
        x.contiguous(), dy.contiguous(), index.contiguous(), products, num_points, num_entries, num_channels,
        **sizes, WIDE=accumulator(x.dtype),
    )  # fmt: skip
    return products


@jit
def move_box(
    x: tl.tensor, buffer: tl.tensor, num_elements: tl.tensor, extent_1: tl.tensor, extent_2: tl.tensor,
    extent_3: tl.tensor, extent_4: tl.tensor, stride_0: tl.tensor, stride_1: tl.tensor, stride_2: tl.tensor,
    stride_3: tl.tensor, stride_4: tl.tensor, MODE: tl.constexpr, WIDE: tl.constexpr, ELEMENTS: tl.constexpr,
) -> None:  # fmt: skip
    """One box, read into the buffer (mode 0), put from it (1) or added (2)."""
    element = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    here = element < num_elements
    rest = element
    at = (rest % extent_4).to(tl.int64) * stride_4
    rest = rest // extent_4
    at += (rest % extent_3).to(tl.int64) * stride_3
    rest = rest // extent_3
    at += (rest % extent_2).to(tl.int64) * stride_2
    rest = rest // extent_2
    at += (rest % extent_1).to(tl.int64) * stride_1
    at += (rest // extent_1).to(tl.int64) * stride_0
    if MODE == 0:
        tl.store(buffer + element, tl.load(x + at, mask=here), mask=here)
    elif MODE == 1:
        tl.store(x + at, tl.load(buffer + element, mask=here), mask=here)
    else:
        total = tl.load(x + at, mask=here).to(WIDE) + tl.load(buffer + element, mask=here).to(WIDE)
        tl.store(x + at, total.to(x.dtype.element_ty), mask=here)


def pack_boxes(x: Tensor, boxes: Sequence[int]) -> Tensor:
    """The elements of boxes of x one box after another, 1-D; boxes are flat: start, stop a dim, box by box."""
    pieces = list(parts(x, boxes))
    if not fits(x, pieces):
        from cuda_ops.sparse import reference

        return reference.pack_boxes(x, boxes)
    buffer = x.new_empty(sum(part.numel() for part in pieces))
    _move(pieces, buffer, PACK)
    return buffer


def unpack_boxes(buffer: Tensor, x: Tensor, boxes: Sequence[int], add: bool) -> Tensor:
    """A copy of x with the elements of buffer put into its boxes, or added to them."""
    filled = x.clone(memory_format=torch.contiguous_format)
    pieces = list(parts(filled, boxes))
    if not fits(x, pieces):
        from cuda_ops.sparse import reference

        return reference.unpack_boxes(buffer, x, boxes, add)
    _move(pieces, buffer.contiguous(), ADD if add else PUT)
    return filled


def parts(x: Tensor, boxes: Sequence[int]) -> Iterator[Tensor]:
    """The boxes as views of x."""
    for first in range(0, len(boxes), 2 * x.ndim):
        bounds = boxes[first : first + 2 * x.ndim]
        yield x[tuple(slice(*pair) for pair in zip(bounds[::2], bounds[1::2], strict=True))]


def fits(x: Tensor, pieces: Sequence[Tensor]) -> bool:
    """Whether the kernel can count the dims of ``x`` and the elements of each piece."""
    return 0 < x.ndim <= DIMS and all(part.numel() <= MOST for part in pieces)


def _move(pieces: Sequence[Tensor], buffer: Tensor, mode: int) -> None:
    first = 0
    for part in pieces:
        padding = DIMS - part.ndim
        extents = (*[1] * padding, *part.shape)
        strides = (*[0] * padding, *part.stride())
        size = math.prod(extents)
        launch(
            move_box, (triton.cdiv(size, BOX_ELEMENTS),), part,
            part, buffer[first : first + size], size, *extents[1:], *strides,
            MODE=mode, WIDE=accumulator(part.dtype), ELEMENTS=BOX_ELEMENTS,
        )  # fmt: skip
        first += size
