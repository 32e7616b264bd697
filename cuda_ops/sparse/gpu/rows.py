"""Rows that are packed and added back in a fixed order: rows of a halo, corners of points."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cuda_ops.sparse.gpu.launch import accumulator, block_of, jit, launch

ELEMENTS = 2048  # of a tile
MOST_COLUMNS = 128


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


def tile(num_columns: int) -> dict[str, int]:
    """Rows and columns of a program."""
    columns = block_of(num_columns, 1, MOST_COLUMNS)
    return {"ROWS": min(ELEMENTS // columns, 128), "COLUMNS": columns}


def pack_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows index [R] of x [N, ...]."""
    flat = x.contiguous().flatten(1) if x.ndim > 1 else x.contiguous()[:, None]
    y = flat.new_empty((len(index), flat.shape[1]))
    sizes = tile(flat.shape[1])
    grid = (triton.cdiv(len(index), sizes["ROWS"]), triton.cdiv(flat.shape[1], sizes["COLUMNS"]))
    launch(copy_rows, grid, x, flat, index.contiguous(), y, len(index), flat.shape[1], **sizes)
    return y.view(len(index), *x.shape[1:])


def unpack_add(base: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Base [N, ...] with rows [R, ...] added at index [R]; those of one row one after another."""
    sums = base.clone(memory_format=torch.contiguous_format)
    if len(index):
        add_in_order(sums.view(len(base), -1), index, rows.reshape(len(index), -1).contiguous(), None, 1)
    return sums


def add_in_order(
    y: torch.Tensor, index: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor | None, entries_a_row: int
) -> None:
    """Adds to y [N, C], in place, every entry e at index[e]: row ``e // entries_a_row`` of rows times weight[e].

    An index of -1 is nowhere.
    """
    targets, order = torch.sort(index, stable=True)
    sizes = tile(y.shape[1])
    grid = (triton.cdiv(len(index), sizes["ROWS"]), triton.cdiv(y.shape[1], sizes["COLUMNS"]))
    launch(
        add_runs, grid, y,
        y, targets, order, rows, rows if weight is None else weight, len(index), y.shape[1], entries_a_row,
        **sizes, WIDE=accumulator(y.dtype), WEIGHTED=weight is not None,
    )  # fmt: skip
