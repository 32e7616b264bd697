"""The sparse operators as functions; importing this module registers them as ``torch.ops.halopipe``.

N input sites, M output sites, K offsets of a kernel, C channels, B samples.  A *site set* is a sorted int64 tensor of
packed keys (:mod:`cuda_ops.sparse.keys`).  A *map* is ``neighbours`` int32 [K, M], the input row that an output row
reads through an offset or -1, and ``reverse`` int32 [K, N], the output row that reads an input row through it or -1:

    plain       out[o] = sum_k W[k] . in[o * stride + offset_k * dilation]
    transposed  out[o] = sum_k W[k] . in[(o - offset_k * dilation) / stride]     where divisible

so that a gradient is the same gather through the other half.  Features are float64, float32, bfloat16 or float16 (then
sums are kept in float32).  All operators are deterministic, whatever the number of threads (plain torch as far as its
matrix products are, which on some processors divide a long sum by threads), and take sets without a site.  Tensors that
do not fit raise :class:`cuda_ops.sparse.errors.SparseInputError`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cuda_ops.sparse import gradients, registrations  # noqa: F401  # they make the operators, and complete them
from cuda_ops.sparse.keys import AxisInts

_OPS = torch.ops.halopipe


def sorted_sites(coordinates: Tensor) -> tuple[Tensor, Tensor]:
    """Site set [N] of integer coordinates [N, 4], batch first, and the order int64 [N] that sorts them.

    Raises:
        SparseInputError: a coordinate out of range, or twice the same.
    """
    keys, order = _OPS.sorted_sites(coordinates)
    return keys, order


def strided_sites(keys: Tensor, kernel: AxisInts, stride: AxisInts, dilation: AxisInts) -> Tensor:
    """Every site whose field holds one of ``keys``, as a strided convolution makes them."""
    sites: Tensor = _OPS.strided_sites(keys, kernel, stride, dilation)
    return sites


def generated_sites(keys: Tensor, kernel: AxisInts, stride: AxisInts, dilation: AxisInts) -> Tensor:
    """Every site that one of ``keys`` reaches, as a generative transposed convolution makes them."""
    sites: Tensor = _OPS.generated_sites(keys, kernel, stride, dilation)
    return sites


def kernel_map(
    in_keys: Tensor, out_keys: Tensor, kernel: AxisInts, stride: AxisInts, dilation: AxisInts, transposed: bool = False
) -> Tensor:
    """``neighbours`` int32 [K, M] from site set [N] to site set [M]."""
    neighbours: Tensor = _OPS.kernel_map(in_keys, out_keys, kernel, stride, dilation, transposed)
    return neighbours


def reversed_map(neighbours: Tensor, num_inputs: int) -> Tensor:
    """``reverse`` int32 [K, N] of ``neighbours`` [K, M]."""
    reverse: Tensor = _OPS.reversed_map(neighbours, num_inputs)
    return reverse


def sparse_conv(x: Tensor, weight: Tensor, neighbours: Tensor, reverse: Tensor) -> Tensor:
    """[M, Cout] of x [N, Cin] and weight [K, Cin, Cout]."""
    y: Tensor = _OPS.sparse_conv(x, weight, neighbours, reverse)
    return y


def sparse_conv_weight(x: Tensor, dy: Tensor, neighbours: Tensor) -> Tensor:
    """Gradient [K, Cin, Cout] of the weight, of x [N, Cin] and dy [M, Cout]."""
    dw: Tensor = _OPS.sparse_conv_weight(x, dy, neighbours)
    return dw


def sparse_max_pool(x: Tensor, neighbours: Tensor, reverse: Tensor) -> tuple[Tensor, Tensor]:
    """Largest neighbour [M, C] and its input row int32 [M, C]; ties: the smallest offset; none there: 0 and -1."""
    largest, rows = _OPS.sparse_max_pool(x, neighbours, reverse)
    return largest, rows


def sparse_max_pool_backward(dy: Tensor, argmax: Tensor, reverse: Tensor) -> Tensor:
    """[N, C]: dy [M, C] summed where it came from."""
    dx: Tensor = _OPS.sparse_max_pool_backward(dy, argmax, reverse)
    return dx


def sparse_sum_pool(x: Tensor, neighbours: Tensor, reverse: Tensor) -> Tensor:
    """Sum [M, C] of the neighbours that are there."""
    sums: Tensor = _OPS.sparse_sum_pool(x, neighbours, reverse)
    return sums


def segment_sum(x: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """Sums [B, C] of rows starts[b] .. starts[b] + lengths[b] of x [N, C]; segments are disjoint."""
    sums: Tensor = _OPS.segment_sum(x, starts, lengths)
    return sums


def segment_max(x: Tensor, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value [B, C] of every segment and its row int32 [B, C]; 0 and -1 for an empty segment."""
    largest, rows = _OPS.segment_max(x, starts, lengths)
    return largest, rows


def segment_grid(x: Tensor, cells: Tensor, starts: Tensor, lengths: Tensor, num_cells: int) -> Tensor:
    """[B, C, num_cells]: the rows of every segment of x [N, C] in its own cells [N], those of one cell summed."""
    sums: Tensor = _OPS.segment_grid(x, cells, starts, lengths, num_cells)
    return sums


def segment_expand(y: Tensor, starts: Tensor, lengths: Tensor, num_rows: int) -> Tensor:
    """[num_rows, C]: its segment's row of y [B, C] for every row; 0 for rows of no segment."""
    rows: Tensor = _OPS.segment_expand(y, starts, lengths, num_rows)
    return rows


def interpolate(x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """[P, C]: for every point the rows index int32 [P, E] (-1: absent) of x [N, C] times weight [P, E], summed."""
    y: Tensor = _OPS.interpolate(x, index, weight)
    return y


def pack_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows index [R] of x [N, ...]."""
    rows: Tensor = _OPS.pack_rows(x, index)
    return rows


def unpack_add(base: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """A copy of base [N, ...] with rows [R, ...] added at index [R], those of one row in their order."""
    sums: Tensor = _OPS.unpack_add(base, index, rows)
    return sums


def pack_boxes(x: Tensor, boxes: Sequence[int]) -> Tensor:
    """The elements of boxes of x, 1-D; boxes are flat: start, stop of every dim, box after box."""
    buffer: Tensor = _OPS.pack_boxes(x, boxes)
    return buffer


def unpack_boxes(buffer: Tensor, x: Tensor, boxes: Sequence[int], add: bool = False) -> Tensor:
    """A copy of x with the elements of buffer in its boxes (which are disjoint then), or added to them."""
    filled: Tensor = _OPS.unpack_boxes(buffer, x, boxes, add)
    return filled
