"""The operators of the compiled library, which :func:`cuda_ops.sparse.native.load` has loaded, as plain functions.

The tensors fit together: the operators have looked.  Dtypes that the library does not compute go to the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cuda_ops.sparse import reference

__all__ = [
    "generated_sites",
    "interpolate",
    "kernel_map",
    "reversed_map",
    "segment_expand",
    "segment_max",
    "segment_sum",
    "sorted_sites",
    "sparse_conv",
    "sparse_conv_weight",
    "sparse_max_pool",
    "sparse_max_pool_backward",
    "sparse_sum_pool",
    "strided_sites",
]

Triple = Sequence[int]
_COMPUTED = (torch.float32, torch.float64)
_LIBRARY = torch.ops.halopipe_native


def sorted_sites(coordinates: Tensor) -> tuple[Tensor, Tensor]:
    """Sorted keys int64 [N] of coordinates int32 [N, 4] and the order int64 [N] that sorts them.

    Raises:
        SparseInputError: out of range, or a coordinate that occurs twice.
    """
    if coordinates.dtype == torch.int32 and coordinates.ndim == 2 and coordinates.shape[1] == 4:
        keys, order, fine = _LIBRARY.sorted_sites(coordinates.contiguous())
        if fine:
            return keys, order
    return reference.sorted_sites(coordinates)  # which says what is wrong


def strided_sites(keys: Tensor, kernel: Triple, stride: Triple, dilation: Triple) -> Tensor:
    """Every site whose field of a strided kernel holds one of keys [N]."""
    sites: Tensor = _LIBRARY.strided_sites(keys, list(kernel), list(stride), list(dilation))
    return sites


def generated_sites(keys: Tensor, kernel: Triple, stride: Triple, dilation: Triple) -> Tensor:
    """Every site that a transposed kernel writes to from keys [N]."""
    sites: Tensor = _LIBRARY.generated_sites(keys, list(kernel), list(stride), list(dilation))
    return sites


def kernel_map(
    in_keys: Tensor, out_keys: Tensor, kernel: Triple, stride: Triple, dilation: Triple, transposed: bool
) -> Tensor:
    """int32 [K, M]: the input row that each output reads through each offset, or -1."""
    neighbours: Tensor = _LIBRARY.kernel_map(
        in_keys, out_keys, list(kernel), list(stride), list(dilation), bool(transposed)
    )
    return neighbours


def reversed_map(neighbours: Tensor, num_inputs: int) -> Tensor:
    """int32 [K, N]: the output row that reads each input through each offset, or -1."""
    reverse: Tensor = _LIBRARY.reversed_map(neighbours, num_inputs)
    return reverse


def sparse_conv(x: Tensor, weight: Tensor, neighbours: Tensor, reverse: Tensor) -> Tensor:
    """[M, Cout] of x [N, Cin] and weight [K, Cin, Cout], whose strides are free: a transposed one costs nothing."""
    if x.dtype not in _COMPUTED or weight.dtype != x.dtype:
        return reference.sparse_conv(x, weight, neighbours, reverse)
    y: Tensor = _LIBRARY.sparse_conv(x, weight, neighbours)
    return y


def sparse_conv_weight(x: Tensor, dy: Tensor, neighbours: Tensor) -> Tensor:
    """[K, Cin, Cout] of x [N, Cin] and dy [M, Cout]."""
    if x.dtype not in _COMPUTED or dy.dtype != x.dtype:
        return reference.sparse_conv_weight(x, dy, neighbours)
    gradient: Tensor = _LIBRARY.sparse_conv_weight(x, dy, neighbours)
    return gradient


def sparse_max_pool(x: Tensor, neighbours: Tensor, reverse: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value [M, C] of the neighbours and the row int32 [M, C] that it came from."""
    if x.dtype not in _COMPUTED:
        return reference.sparse_max_pool(x, neighbours, reverse)
    largest, argmax = _LIBRARY.sparse_max_pool(x, neighbours)
    return largest, argmax


def sparse_max_pool_backward(dy: Tensor, argmax: Tensor, reverse: Tensor) -> Tensor:
    """[N, C]: each input's sum of dy [M, C] over the outputs that took it."""
    if dy.dtype not in _COMPUTED:
        return reference.sparse_max_pool_backward(dy, argmax, reverse)
    dx: Tensor = _LIBRARY.sparse_max_pool_backward(dy, argmax, reverse)
    return dx


def sparse_sum_pool(x: Tensor, neighbours: Tensor, reverse: Tensor) -> Tensor:
    """[M, C]: the sum of the neighbours."""
    if x.dtype not in _COMPUTED:
        return reference.sparse_sum_pool(x, neighbours, reverse)
    sums: Tensor = _LIBRARY.sparse_sum_pool(x, neighbours)
    return sums


def segment_sum(x: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """[B, C]: sums of runs of rows."""
    if x.dtype not in _COMPUTED:
        return reference.segment_sum(x, starts, lengths)
    sums: Tensor = _LIBRARY.segment_sum(x, starts, lengths)
    return sums


def segment_max(x: Tensor, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value [B, C] of runs of rows and its row int32 [B, C]."""
    if x.dtype not in _COMPUTED:
        return reference.segment_max(x, starts, lengths)
    largest, argmax = _LIBRARY.segment_max(x, starts, lengths)
    return largest, argmax


def segment_expand(y: Tensor, starts: Tensor, lengths: Tensor, num_rows: int) -> Tensor:
    """[num_rows, C]: every row gets its segment's row of y [B, C]."""
    if y.dtype not in _COMPUTED:
        return reference.segment_expand(y, starts, lengths, num_rows)
    spread: Tensor = _LIBRARY.segment_expand(y, starts, lengths, num_rows)
    return spread


def interpolate(x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """[P, C]: for every point the weighted sum of the rows of x [N, C] at its index [P, E]."""
    if x.dtype not in _COMPUTED or weight.dtype != x.dtype:
        return reference.interpolate(x, index, weight)
    sums: Tensor = _LIBRARY.interpolate(x, index, weight)
    return sums
