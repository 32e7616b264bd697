"""Sparse convolution and its weight gradient: gather and multiply.

Forward is output-stationary.  A program owns a tile of output rows x output channels.  For every offset that some row
of the tile has a neighbour at, it gathers the neighbours' features, multiplies them by the offset's weight and adds to
sums in float32; offsets that no row has are skipped.  Implicit GEMM as in TorchSparse++ (Tang et al., 2023).  The input
gradient is the same with the map reversed and the weight transposed, which is a matter of strides.

The weight gradient is, for every offset, a product over its pairs.  A program owns a tile of one offset's matrix and a
share of that offset's pairs; it multiplies what both rows of a pair hold and writes its sum, in float32, to a
workspace.  A second kernel adds the shares in their order, so that two runs give the same bits (no atomics).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuda_ops.sparse.gpu.launch import block_of, jit, launch
from cuda_ops.sparse.gpu.tiling import CONVOLUTION, WEIGHT, Arrangements, Configuration, configuration

PROGRAMS = 512  # about four for each multiprocessor of a large GPU; not the GPU's own number, so that bits agree
LEAST_ROWS = 512  # of a share; a shorter one costs more in workspace than it gains
ELEMENTS = 1024  # of a program that adds shares


@jit
def lowest(offsets: tl.tensor) -> tl.tensor:
    """The index of the lowest bit that is set, of an int32 without its sign bit: the exponent of the float it is."""
    bit = offsets & (-offsets)
    return (bit.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@jit(do_not_specialize=["num_rows"])
def convolve(
    x: tl.tensor, weight: tl.tensor, neighbours: tl.tensor, order: tl.tensor, y: tl.tensor, num_rows: tl.tensor,
    num_offsets: tl.tensor, in_channels: tl.tensor, out_channels: tl.tensor, x_stride: tl.tensor,
    weight_offset_stride: tl.tensor, weight_in_stride: tl.tensor, weight_out_stride: tl.tensor, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, ORDERED: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """One tile.  The loop over offsets and channels is one, without a branch, so that loads run ahead of products."""
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = places < num_rows
    rows = tl.load(order + places, mask=exists, other=0) if ORDERED else places
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    steps = tl.cdiv(in_channels, STEP)
    bits = tl.arange(0, 32)
    for first in range(0, num_offsets, 31):
        valid = (bits < 31) & (first + bits < num_offsets)
        at = (first + bits).to(tl.int64)[:, None] * num_rows + rows[None, :]
        present = tl.load(neighbours + at, mask=valid[:, None] & exists[None, :], other=-1) >= 0
        some = tl.max(present.to(tl.int32), 1)
        offsets = tl.sum(some << bits, 0)
        for step in range(tl.sum(some, 0) * steps):
            part = step % steps
            offset = (first + lowest(offsets)).to(tl.int64)
            offsets = tl.where(part == steps - 1, offsets & (offsets - 1), offsets)
            sources = tl.load(neighbours + offset * num_rows + rows, mask=exists, other=-1)
            channels = part * STEP + tl.arange(0, STEP)
            gathered = tl.load(
                x + sources.to(tl.int64)[:, None] * x_stride + channels[None, :],
                mask=(sources >= 0)[:, None] & (channels < in_channels)[None, :],
                other=0.0,
            )
            matrix = tl.load(
                weight
                + offset * weight_offset_stride
                + channels[:, None] * weight_in_stride
                + columns[None, :] * weight_out_stride,
                mask=(channels < in_channels)[:, None] & (columns < out_channels)[None, :],
                other=0.0,
            )
            sums = tl.dot(gathered, matrix, sums, input_precision=PRECISION)
    tl.store(
        y + rows.to(tl.int64)[:, None] * out_channels + columns[None, :],
        sums.to(y.dtype.element_ty),
        mask=exists[:, None] & (columns < out_channels)[None, :],
    )


def precision() -> str:
    """How float32 is multiplied: exactly, unless torch was told otherwise (`torch.set_float32_matmul_precision`)."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def device_name(tensor: Tensor) -> str:
    """Such as ``sm_90``; empty on a CPU."""
    if not tensor.is_cuda:
        return ""
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return f"sm_{major}{minor}"


def blocks(tile: Configuration, in_channels: int, out_channels: int) -> dict[str, int]:
    """The tile's sizes, not larger than the channels there are."""
    return {
        "ROWS": tile.rows,
        "COLUMNS": block_of(out_channels, 16, tile.columns),
        "STEP": block_of(in_channels, 16, tile.step),
    }


def sparse_conv(
    arrangements: Arrangements,
    x: Tensor,
    weight: Tensor,
    neighbours: Tensor,
    reverse: Tensor,
) -> Tensor:
    """``y[o] = sum_k x[neighbours[k, o]] @ weight[k]``: x [N, Cin], weight [K, Cin, Cout] of any strides."""
    if x.dtype == torch.float64:
        from cuda_ops.sparse import reference

        return reference.sparse_conv(x, weight, neighbours, reverse)
    channels = max(weight.shape[1:])
    tile = configuration(CONVOLUTION, 8 * x.element_size(), channels, device_name(x))
    return convolved(tile, arrangements, x, weight, neighbours)


def convolved(tile: Configuration, arrangements: Arrangements, x: Tensor, weight: Tensor, neighbours: Tensor) -> Tensor:
    """`sparse_conv` with a given configuration."""
    num_offsets, num_rows = neighbours.shape
    in_channels, out_channels = weight.shape[1:]
    y = x.new_empty((num_rows, out_channels))
    x = x if x.stride(-1) == 1 else x.contiguous()
    neighbours = neighbours.contiguous()
    order = arrangements.grouped(neighbours) if tile.grouped else None
    sizes = blocks(tile, in_channels, out_channels)
    grid = (triton.cdiv(num_rows, sizes["ROWS"]), triton.cdiv(out_channels, sizes["COLUMNS"]))
    launch(
        convolve, grid, x,
        x, weight, neighbours, neighbours if order is None else order, y,
        num_rows, num_offsets, in_channels, out_channels, x.stride(0), *weight.stride(),
        **sizes, ORDERED=order is not None, PRECISION=precision(), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


@jit(do_not_specialize=["num_rows"])
def products(
    x: tl.tensor, dy: tl.tensor, inputs: tl.tensor, outputs: tl.tensor, counts: tl.tensor, workspace: tl.tensor,
    num_rows: tl.tensor, num_offsets: tl.tensor, in_channels: tl.tensor, out_channels: tl.tensor, x_stride: tl.tensor,
    dy_stride: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """A share of the pairs of one offset."""
    offset = tl.program_id(0)
    share = tl.program_id(1)
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


def sparse_conv_weight(arrangements: Arrangements, x: Tensor, dy: Tensor, neighbours: Tensor) -> Tensor:
    """``dw[k] = sum_o x[neighbours[k, o]]^T dy[o]``: [K, Cin, Cout], of x's type."""
    if x.dtype == torch.float64:
        from cuda_ops.sparse import reference

        return reference.sparse_conv_weight(x, dy, neighbours)
    channels = max(x.shape[1], dy.shape[1])
    tile = configuration(WEIGHT, 8 * x.element_size(), channels, device_name(x))
    return weight_gradient(tile, arrangements, x, dy, neighbours)


def weight_gradient(
    tile: Configuration, arrangements: Arrangements, x: Tensor, dy: Tensor, neighbours: Tensor
) -> Tensor:
    """`sparse_conv_weight` with a given configuration."""
    num_offsets, num_rows = neighbours.shape
    in_channels = x.shape[1]
    out_channels = dy.shape[1]
    if num_rows == 0:
        return x.new_zeros((num_offsets, in_channels, out_channels))
    x = x if x.stride(-1) == 1 else x.contiguous()
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    pairs = arrangements.pairs(neighbours)
    sizes = blocks(tile, in_channels, out_channels)
    tiles = triton.cdiv(in_channels, sizes["STEP"]) * triton.cdiv(out_channels, sizes["COLUMNS"])
    shares = max(1, min(PROGRAMS // (num_offsets * tiles), triton.cdiv(num_rows, LEAST_ROWS)))
    workspace = x.new_empty((shares, num_offsets, in_channels, out_channels), dtype=torch.float32)
    launch(
        products, (num_offsets, shares, tiles), x,
        x, dy, pairs.inputs, pairs.outputs, pairs.counts, workspace,
        num_rows, num_offsets, in_channels, out_channels, x.stride(0), dy.stride(0),
        **sizes, PRECISION=precision(), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    dw = x.new_empty((num_offsets, in_channels, out_channels))
    grid = (triton.cdiv(dw.numel(), ELEMENTS),)
    launch(add_shares, grid, x, workspace, dw, dw.numel(), shares, ELEMENTS=ELEMENTS)
    return dw
