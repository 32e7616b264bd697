"""Kernel maps by binary search in sorted keys, and their reverse."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuda_ops.sparse import keys
from cuda_ops.sparse.gpu.launch import jit, launch

BATCH_SHIFT = tl.constexpr(keys.BATCH_SHIFT)
X_SHIFT = tl.constexpr(keys.SHIFTS[0])
Y_SHIFT = tl.constexpr(keys.SHIFTS[1])
FIELD = tl.constexpr((1 << keys.COORDINATE_BITS) - 1)
LOWEST = tl.constexpr(keys.LOWEST)
HIGHEST = tl.constexpr(keys.HIGHEST)
ROWS = 512  # of a program


@jit
def read_through(
    coordinate: tl.tensor, offset: tl.tensor, stride: tl.tensor, TRANSPOSED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The coordinate that is read through an offset, and whether there is such a one."""
    if TRANSPOSED:
        moved = coordinate - offset
        source = moved // stride
        there = source * stride == moved  # the remainder is 0 however a division rounds
    else:
        source = coordinate * stride + offset
        there = source == source
    return source, there & (source >= LOWEST) & (source <= HIGHEST)


@jit(do_not_specialize=["num_outputs", "num_inputs", "rounds"])
def search_sites(
    in_keys: tl.tensor, out_keys: tl.tensor, neighbours: tl.tensor, num_inputs: tl.tensor, num_outputs: tl.tensor,
    rounds: tl.tensor, kernel_y: tl.tensor, kernel_z: tl.tensor, first_x: tl.tensor, first_y: tl.tensor,
    first_z: tl.tensor, stride_x: tl.tensor, stride_y: tl.tensor, stride_z: tl.tensor, dilation_x: tl.tensor,
    dilation_y: tl.tensor, dilation_z: tl.tensor, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """One offset of a run of output sites."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offset = tl.program_id(1)
    exists = rows < num_outputs
    key = tl.load(out_keys + rows, mask=exists, other=0)
    x, x_there = read_through(
        ((key >> X_SHIFT) & FIELD) + LOWEST,
        (first_x + offset // (kernel_y * kernel_z)) * dilation_x, stride_x, TRANSPOSED,
    )  # fmt: skip
    y, y_there = read_through(
        ((key >> Y_SHIFT) & FIELD) + LOWEST,
        (first_y + offset // kernel_z % kernel_y) * dilation_y, stride_y, TRANSPOSED,
    )  # fmt: skip
    z, z_there = read_through(
        (key & FIELD) + LOWEST, (first_z + offset % kernel_z) * dilation_z, stride_z, TRANSPOSED
    )  # fmt: skip
    there = exists & x_there & y_there & z_there
    asked = ((key >> BATCH_SHIFT) << BATCH_SHIFT) + ((x - LOWEST) << X_SHIFT) + ((y - LOWEST) << Y_SHIFT) + (z - LOWEST)
    low = tl.zeros((ROWS,), dtype=tl.int32)
    high = low + num_inputs
    for _ in range(rounds):
        middle = low + (high - low) // 2
        open_ = there & (low < high)
        beyond = tl.load(in_keys + middle, mask=open_, other=0) < asked
        low = tl.where(open_ & beyond, middle + 1, low)
        high = tl.where(open_ & (beyond == 0), middle, high)
    hit = there & (low < num_inputs)
    hit = hit & (tl.load(in_keys + low, mask=hit, other=-1) == asked)
    tl.store(neighbours + offset.to(tl.int64) * num_outputs + rows, tl.where(hit, low, -1), mask=exists)


@jit(do_not_specialize=["num_outputs", "num_inputs"])
def reverse_rows(
    neighbours: tl.tensor, reverse: tl.tensor, num_outputs: tl.tensor, num_inputs: tl.tensor, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Writes where each pair came from; an offset reads an input row once at most, so no two writes meet."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offset = tl.program_id(1).to(tl.int64)
    sources = tl.load(neighbours + offset * num_outputs + rows, mask=rows < num_outputs, other=-1)
    tl.store(reverse + offset * num_inputs + sources, rows, mask=sources >= 0)


def kernel_map(
    in_keys: Tensor,
    out_keys: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
) -> Tensor:
    """int32 [K, M]: the input row that output row o reads through offset k, or -1."""
    num_offsets = kernel[0] * kernel[1] * kernel[2]
    num_inputs = len(in_keys)
    num_outputs = len(out_keys)
    neighbours = torch.empty((num_offsets, num_outputs), dtype=torch.int32, device=in_keys.device)
    firsts = [keys.axis_offsets(size, 1).start for size in kernel]
    launch(
        search_sites, (triton.cdiv(num_outputs, ROWS), num_offsets), in_keys,
        in_keys.contiguous(), out_keys.contiguous(), neighbours, num_inputs, num_outputs, num_inputs.bit_length(),
        *kernel[1:], *firsts, *stride, *dilation, TRANSPOSED=transposed, ROWS=ROWS,
    )  # fmt: skip
    return neighbours


def reversed_map(neighbours: Tensor, num_inputs: int) -> Tensor:
    """int32 [K, N]: the output row that reads input row j through offset k, or -1."""
    num_offsets, num_outputs = neighbours.shape
    reverse = torch.full((num_offsets, num_inputs), -1, dtype=torch.int32, device=neighbours.device)
    grid = (triton.cdiv(num_outputs, ROWS), num_offsets)
    launch(reverse_rows, grid, neighbours, neighbours.contiguous(), reverse, num_outputs, num_inputs, ROWS=ROWS)
    return reverse
