"""Sparse convolution: gather and multiply, output-stationary.

A program owns a tile of output rows x output channels.  For every offset that some row of the tile has a neighbour
at, it gathers the neighbours' features, multiplies them by the offset's weight and adds to sums in float32; offsets
that no row has are skipped.  Implicit GEMM as in TorchSparse++ (Tang et al., 2023).  The input gradient is the same
with the map reversed and the weight transposed, which is a matter of strides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cuda_ops.sparse.gpu.arrangement import Arrangements
from cuda_ops.sparse.gpu.configurations import CONVOLUTION, Configuration, configuration
from cuda_ops.sparse.gpu.launch import block_of, jit, launch


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
        known = (bits < 31) & (first + bits < num_offsets)
        at = (first + bits).to(tl.int64)[:, None] * num_rows + rows[None, :]
        present = tl.load(neighbours + at, mask=known[:, None] & exists[None, :], other=-1) >= 0
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


def device_name(tensor: torch.Tensor) -> str:
    """Such as ``sm_90``; empty on a CPU."""
    if not tensor.is_cuda:
        return ""
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return f"sm_{major}{minor}"


def blocks(found: Configuration, in_channels: int, out_channels: int) -> dict[str, int]:
    """The tile's sizes, not larger than the channels there are."""
    return {
        "ROWS": found.rows,
        "COLUMNS": block_of(out_channels, 16, found.columns),
        "STEP": block_of(in_channels, 16, found.step),
    }


def sparse_conv(
    arrangements: Arrangements,
    x: torch.Tensor,
    weight: torch.Tensor,
    neighbours: torch.Tensor,
    reverse: torch.Tensor,
) -> torch.Tensor:
    """``y[o] = sum_k x[neighbours[k, o]] @ weight[k]``: x [N, Cin], weight [K, Cin, Cout] of any strides."""
    if x.dtype == torch.float64:
        from cuda_ops.sparse import reference

        return reference.sparse_conv(x, weight, neighbours, reverse)
    channels = max(weight.shape[1:])
    found = configuration(CONVOLUTION, 8 * x.element_size(), channels, device_name(x))
    return convolved(found, arrangements, x, weight, neighbours)


def convolved(
    found: Configuration, arrangements: Arrangements, x: torch.Tensor, weight: torch.Tensor, neighbours: torch.Tensor
) -> torch.Tensor:
    """`sparse_conv` with a given configuration."""
    num_offsets, num_rows = neighbours.shape
    in_channels, out_channels = weight.shape[1:]
    y = x.new_empty((num_rows, out_channels))
    x, neighbours = x if x.stride(-1) == 1 else x.contiguous(), neighbours.contiguous()
    order = arrangements.grouped(neighbours) if found.grouped else None
    sizes = blocks(found, in_channels, out_channels)
    grid = (triton.cdiv(num_rows, sizes["ROWS"]), triton.cdiv(out_channels, sizes["COLUMNS"]))
    launch(
        convolve, grid, x,
        x, weight, neighbours, neighbours if order is None else order, y,
        num_rows, num_offsets, in_channels, out_channels, x.stride(0), *weight.stride(),
        **sizes, ORDERED=order is not None, PRECISION=precision(), num_warps=found.warps, num_stages=found.stages,
    )  # fmt: skip
    return y
