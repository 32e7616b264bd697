"""Shapes and dtypes of what the operators return, for tensors without memory; site sets get sizes of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from cuda_ops.sparse.schemas import NAMESPACE

Triple = Sequence[int]


def _sorted_sites(coordinates: Tensor) -> tuple[Tensor, Tensor]:
    sites = coordinates.shape[0]
    return coordinates.new_empty(sites, dtype=torch.int64), coordinates.new_empty(sites, dtype=torch.int64)


def _new_sites(keys: Tensor, kernel: Triple, stride: Triple, dilation: Triple) -> Tensor:
    return keys.new_empty(torch.library.get_ctx().new_dynamic_size())


def _kernel_map(
    in_keys: Tensor, out_keys: Tensor, kernel: Triple, stride: Triple, dilation: Triple, transposed: bool
) -> Tensor:
    return in_keys.new_empty((prod(kernel), out_keys.shape[0]), dtype=torch.int32)


def _reversed_map(neighbours: Tensor, num_inputs: int) -> Tensor:
    return neighbours.new_empty((neighbours.shape[0], num_inputs))


def _sparse_conv(x: Tensor, weight: Tensor, neighbours: Tensor, reverse: Tensor) -> Tensor:
    return x.new_empty((neighbours.shape[1], weight.shape[2]))


def _sparse_conv_weight(x: Tensor, dy: Tensor, neighbours: Tensor) -> Tensor:
    return x.new_empty((neighbours.shape[0], x.shape[1], dy.shape[1]))


def _sparse_max_pool(x: Tensor, neighbours: Tensor, reverse: Tensor) -> tuple[Tensor, Tensor]:
    shape = neighbours.shape[1], x.shape[1]
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32)


def _sparse_max_pool_backward(dy: Tensor, argmax: Tensor, reverse: Tensor) -> Tensor:
    return dy.new_empty((reverse.shape[1], dy.shape[1]))


def _sparse_sum_pool(x: Tensor, neighbours: Tensor, reverse: Tensor) -> Tensor:
    return x.new_empty((neighbours.shape[1], x.shape[1]))


def _segment_sum(x: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    return x.new_empty((starts.shape[0], x.shape[1]))


def _segment_max(x: Tensor, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    shape = starts.shape[0], x.shape[1]
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32)


def _segment_expand(y: Tensor, starts: Tensor, lengths: Tensor, num_rows: int) -> Tensor:
    return y.new_empty((num_rows, y.shape[1]))


def _interpolate(x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((index.shape[0], x.shape[1]))


def _interpolate_backward(dy: Tensor, index: Tensor, weight: Tensor, num_rows: int) -> Tensor:
    return dy.new_empty((num_rows, dy.shape[1]))


def _interpolate_weight(x: Tensor, dy: Tensor, index: Tensor) -> Tensor:
    return x.new_empty(index.shape)


def _pack_rows(x: Tensor, index: Tensor) -> Tensor:
    return x.new_empty((index.shape[0], *x.shape[1:]))


def _unpack_add(base: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    return torch.empty_like(base, memory_format=torch.contiguous_format)


def _pack_boxes(x: Tensor, boxes: Sequence[int]) -> Tensor:
    per_box, extents = 2 * x.ndim, [stop - start for start, stop in zip(boxes[::2], boxes[1::2], strict=True)]
    return x.new_empty(sum(prod(extents[i : i + x.ndim]) for i in range(0, len(boxes) // per_box * x.ndim, x.ndim)))


def _unpack_boxes(buffer: Tensor, x: Tensor, boxes: Sequence[int], add: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_FAKES: dict[str, Callable[..., Any]] = {
    "sorted_sites": _sorted_sites,
    "strided_sites": _new_sites,
    "generated_sites": _new_sites,
    "kernel_map": _kernel_map,
    "reversed_map": _reversed_map,
    "sparse_conv": _sparse_conv,
    "sparse_conv_weight": _sparse_conv_weight,
    "sparse_max_pool": _sparse_max_pool,
    "sparse_max_pool_backward": _sparse_max_pool_backward,
    "sparse_sum_pool": _sparse_sum_pool,
    "segment_sum": _segment_sum,
    "segment_max": _segment_max,
    "segment_expand": _segment_expand,
    "interpolate": _interpolate,
    "interpolate_backward": _interpolate_backward,
    "interpolate_weight": _interpolate_weight,
    "pack_rows": _pack_rows,
    "unpack_add": _unpack_add,
    "pack_boxes": _pack_boxes,
    "unpack_boxes": _unpack_boxes,
}

for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake)
