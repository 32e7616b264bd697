"""The weight gradient of a sparse convolution: for every offset, a product over its pairs.

A program owns a tile of one offset's matrix and a share of that offset's pairs; it multiplies what both rows of a pair
hold and writes its sum, in float32, to a workspace.  A second kernel adds the shares in their order, so that two
runs give the same bits (no atomics).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cuda_ops.sparse.gpu.arrangement import Arrangements
from cuda_ops.sparse.gpu.configurations import WEIGHT, Configuration, configuration
from cuda_ops.sparse.gpu.conv import device_name, precision
from cuda_ops.sparse.gpu.launch import block_of, jit, launch

PROGRAMS = 512  # about four for each multiprocessor of a large GPU; not the GPU's own number, so that bits agree
LEAST_ROWS = 512  # of a share; a shorter one costs more in workspace than it gains
ELEMENTS = 1024  # of a program that adds shares


@jit(do_not_specialize=["num_rows"])
def products(
    x: tl.tensor, dy: tl.tensor, inputs: tl.tensor, outputs: tl.tensor, counts: tl.tensor, workspace: tl.tensor,
    num_rows: tl.tensor, num_offsets: tl.tensor, in_channels: tl.tensor, out_channels: tl.tensor, x_stride: tl.tensor,
    dy_stride: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """A share of the pairs of one offset."""
    offset, share = tl.program_id(0), tl.program_id(1)
    column_tiles = tl.cdiv(out_channels, COLUMNS)
    channels = tl.program_id(2) // column_tiles * STEP + tl.arange(0, STEP)
    columns = tl.program_id(2) % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    count = tl.load(counts + offset)
    length = tl.cdiv(tl.cdiv(count, tl.num_programs(1)), ROWS) * ROWS
    start = share * length
    stop = tl.minimum(start + length, count)
    sums = tl.zeros((STEP, COLUMNS), dtype=tl.float32)
    base = offset.to(tl.int64) * num_rows
    for first in range(start, stop, ROWS):
        pairs = first + tl.arange(0, ROWS)
        exists = pairs < stop
        sources = tl.load(inputs + base + pairs, mask=exists, other=0).to(tl.int64)
        targets = tl.load(outputs + base + pairs, mask=exists, other=0).to(tl.int64)
        left = tl.load(
            x + sources[:, None] * x_stride + channels[None, :],
            mask=exists[:, None] & (channels < in_channels)[None, :],
            other=0.0,
        )
        right = tl.load(
            dy + targets[:, None] * dy_stride + columns[None, :],
            mask=exists[:, None] & (columns < out_channels)[None, :],
            other=0.0,
        )
        sums = tl.dot(tl.trans(left), right, sums, input_precision=PRECISION)
    place = (share * num_offsets + offset).to(tl.int64) * in_channels + channels
    tl.store(
        workspace + place[:, None] * out_channels + columns[None, :],
        sums,
        mask=(channels < in_channels)[:, None] & (columns < out_channels)[None, :],
    )


@jit(do_not_specialize=["num_shares"])
def add_shares(
    workspace: tl.tensor, dw: tl.tensor, num_elements: tl.tensor, num_shares: tl.tensor, ELEMENTS: tl.constexpr,
) -> None:  # fmt: skip
    """The shares one after another."""
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    exists = at < num_elements
    total = tl.zeros((ELEMENTS,), dtype=tl.float32)
    for _ in range(num_shares):
        total += tl.load(workspace + at, mask=exists, other=0.0)
        workspace += num_elements
    tl.store(dw + at, total.to(dw.dtype.element_ty), mask=exists)


def sizes_of(found: Configuration, in_channels: int, out_channels: int) -> dict[str, int]:
    """The tile's sizes, not larger than the channels there are."""
    return {
        "ROWS": found.rows,
        "COLUMNS": block_of(out_channels, 16, found.columns),
        "STEP": block_of(in_channels, 16, found.step),
    }


def sparse_conv_weight(
    arrangements: Arrangements, x: torch.Tensor, dy: torch.Tensor, neighbours: torch.Tensor
) -> torch.Tensor:
    """``dw[k] = sum_o x[neighbours[k, o]]^T dy[o]``: [K, Cin, Cout], of x's type."""
    if x.dtype == torch.float64:
        from cuda_ops.sparse import reference

        return reference.sparse_conv_weight(x, dy, neighbours)
    channels = max(x.shape[1], dy.shape[1])
    found = configuration(WEIGHT, 8 * x.element_size(), channels, device_name(x))
    return weight_gradient(found, arrangements, x, dy, neighbours)


def weight_gradient(
    found: Configuration, arrangements: Arrangements, x: torch.Tensor, dy: torch.Tensor, neighbours: torch.Tensor
) -> torch.Tensor:
    """`sparse_conv_weight` with a given configuration."""
    num_offsets, num_rows = neighbours.shape
    in_channels, out_channels = x.shape[1], dy.shape[1]
    if num_rows == 0:
        return x.new_zeros((num_offsets, in_channels, out_channels))
    x = x if x.stride(-1) == 1 else x.contiguous()
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    pairs = arrangements.pairs(neighbours)
    sizes = sizes_of(found, in_channels, out_channels)
    tiles = triton.cdiv(in_channels, sizes["STEP"]) * triton.cdiv(out_channels, sizes["COLUMNS"])
    shares = max(1, min(PROGRAMS // (num_offsets * tiles), triton.cdiv(num_rows, LEAST_ROWS)))
    workspace = x.new_empty((shares, num_offsets, in_channels, out_channels), dtype=torch.float32)
    launch(
        products, (num_offsets, shares, tiles), x,
        x, dy, pairs.inputs, pairs.outputs, pairs.counts, workspace,
        num_rows, num_offsets, in_channels, out_channels, x.stride(0), dy.stride(0),
        **sizes, PRECISION=precision(), num_warps=found.warps, num_stages=found.stages,
    )  # fmt: skip
    dw = x.new_empty((num_offsets, in_channels, out_channels))
    grid = (triton.cdiv(dw.numel(), ELEMENTS),)
    launch(add_shares, grid, x, workspace, dw, dw.numel(), shares, ELEMENTS=ELEMENTS)
    return dw
