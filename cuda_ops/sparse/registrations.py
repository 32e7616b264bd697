"""How torch knows the sparse operators: their signatures, shapes without memory, autocast and counted operations.

Under autocast a sparse convolution computes in autocast's dtype, as dense ones do; all else is left as it is.

Floating-point operations of a sparse convolution, for torch's counter: two a pair, input and output channel.

A map without memory is taken as full.

The operators' signatures, and the kernel of each: looks whether its tensors fit, and calls what runs here.

Implementations get contiguous tensors that fit together and return new ones.

Shapes and dtypes of what the operators return, for tensors without memory; site sets get sizes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cuda_ops._torch import FakeTensor, disable_dynamo
from cuda_ops.sparse import checks
from cuda_ops.sparse.dispatch import implementation
from cuda_ops.sparse.keys import AxisInts

NAMESPACE = "halopipe"
SITES = "int[3] kernel, int[3] stride, int[3] dilation"
SCHEMAS = {
    "sorted_sites": "(Tensor coordinates) -> (Tensor keys, Tensor order)",
    "strided_sites": f"(Tensor keys, {SITES}) -> Tensor",
    "generated_sites": f"(Tensor keys, {SITES}) -> Tensor",
    "kernel_map": f"(Tensor in_keys, Tensor out_keys, {SITES}, bool transposed) -> Tensor",
    "reversed_map": "(Tensor neighbours, SymInt num_inputs) -> Tensor",
    "sparse_conv": "(Tensor x, Tensor weight, Tensor neighbours, Tensor reverse) -> Tensor",
    "sparse_conv_weight": "(Tensor x, Tensor dy, Tensor neighbours) -> Tensor",
    "sparse_max_pool": "(Tensor x, Tensor neighbours, Tensor reverse) -> (Tensor, Tensor)",
    "sparse_max_pool_backward": "(Tensor dy, Tensor argmax, Tensor reverse) -> Tensor",
    "sparse_sum_pool": "(Tensor x, Tensor neighbours, Tensor reverse) -> Tensor",
    "segment_sum": "(Tensor x, Tensor starts, Tensor lengths) -> Tensor",
    "segment_max": "(Tensor x, Tensor starts, Tensor lengths) -> (Tensor, Tensor)",
    "segment_grid": "(Tensor x, Tensor cells, Tensor starts, Tensor lengths, SymInt num_cells) -> Tensor",
    "segment_expand": "(Tensor y, Tensor starts, Tensor lengths, SymInt num_rows) -> Tensor",
    "interpolate": "(Tensor x, Tensor index, Tensor weight) -> Tensor",
    "interpolate_backward": "(Tensor dy, Tensor index, Tensor weight, SymInt num_rows) -> Tensor",
    "interpolate_weight": "(Tensor x, Tensor dy, Tensor index) -> Tensor",
    "pack_rows": "(Tensor x, Tensor index) -> Tensor",
    "unpack_add": "(Tensor base, Tensor index, Tensor rows) -> Tensor",
    "pack_boxes": "(Tensor x, SymInt[] boxes) -> Tensor",
    "unpack_boxes": "(Tensor buffer, Tensor x, SymInt[] boxes, bool add) -> Tensor",
}
"""By name."""


def _kernel_of(name: str) -> Callable[..., Any]:
    check = checks.CHECKS[name]

    def kernel(*args: Any) -> Any:
        check(*args)
        first: Tensor = args[0]
        ready = [each.contiguous() if isinstance(each, Tensor) else _plain(each) for each in args]
        return implementation(name, first.device.type)(*ready)

    kernel.__name__ = name
    return disable_dynamo(kernel)  # the compiler sees the operator, not what it calls


def _plain(argument: Any) -> Any:
    return tuple(argument) if isinstance(argument, Sequence) else argument


for _name, _schema in SCHEMAS.items():
    torch.library.define(f"{NAMESPACE}::{_name}", _schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(f"{NAMESPACE}::{_name}", "default")(_kernel_of(_name))


F = TypeVar("F", bound=Callable[..., Any])


def _fake(function: F) -> F:
    """The result of an operator without its numbers; ``function`` is called as the operator is, after ``_``."""
    torch.library.register_fake(f"{NAMESPACE}::{function.__name__.removeprefix('_')}", function)
    return function


@_fake
def _sorted_sites(coordinates: Tensor) -> tuple[Tensor, Tensor]:
    sites = coordinates.shape[0]
    return coordinates.new_empty(sites, dtype=torch.int64), coordinates.new_empty(sites, dtype=torch.int64)


@_fake
def _strided_sites(keys: Tensor, kernel: AxisInts, stride: AxisInts, dilation: AxisInts) -> Tensor:
    return keys.new_empty(torch.library.get_ctx().new_dynamic_size())


torch.library.register_fake(f"{NAMESPACE}::generated_sites", _strided_sites)


@_fake
def _kernel_map(
    in_keys: Tensor, out_keys: Tensor, kernel: AxisInts, stride: AxisInts, dilation: AxisInts, transposed: bool
) -> Tensor:
    return in_keys.new_empty((prod(kernel), out_keys.shape[0]), dtype=torch.int32)


@_fake
def _reversed_map(neighbours: Tensor, num_inputs: int) -> Tensor:
    return neighbours.new_empty((neighbours.shape[0], num_inputs))


@_fake
def _sparse_conv(x: Tensor, weight: Tensor, neighbours: Tensor, reverse: Tensor) -> Tensor:
    return x.new_empty((neighbours.shape[1], weight.shape[2]))


@_fake
def _sparse_conv_weight(x: Tensor, dy: Tensor, neighbours: Tensor) -> Tensor:
    return x.new_empty((neighbours.shape[0], x.shape[1], dy.shape[1]))


@_fake
def _sparse_max_pool(x: Tensor, neighbours: Tensor, reverse: Tensor) -> tuple[Tensor, Tensor]:
    shape = neighbours.shape[1], x.shape[1]
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32)


@_fake
def _sparse_max_pool_backward(dy: Tensor, argmax: Tensor, reverse: Tensor) -> Tensor:
    return dy.new_empty((reverse.shape[1], dy.shape[1]))


@_fake
def _sparse_sum_pool(x: Tensor, neighbours: Tensor, reverse: Tensor) -> Tensor:
    return x.new_empty((neighbours.shape[1], x.shape[1]))


@_fake
def _segment_sum(x: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    return x.new_empty((starts.shape[0], x.shape[1]))


@_fake
def _segment_grid(x: Tensor, cells: Tensor, starts: Tensor, lengths: Tensor, num_cells: int) -> Tensor:
    return x.new_empty((starts.shape[0], x.shape[1], num_cells))


@_fake
def _segment_max(x: Tensor, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    shape = starts.shape[0], x.shape[1]
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32)


@_fake
def _segment_expand(y: Tensor, starts: Tensor, lengths: Tensor, num_rows: int) -> Tensor:
    return y.new_empty((num_rows, y.shape[1]))


@_fake
def _interpolate(x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((index.shape[0], x.shape[1]))


@_fake
def _interpolate_backward(dy: Tensor, index: Tensor, weight: Tensor, num_rows: int) -> Tensor:
    return dy.new_empty((num_rows, dy.shape[1]))


@_fake
def _interpolate_weight(x: Tensor, dy: Tensor, index: Tensor) -> Tensor:
    return x.new_empty(index.shape)


@_fake
def _pack_rows(x: Tensor, index: Tensor) -> Tensor:
    return x.new_empty((index.shape[0], *x.shape[1:]))


@_fake
def _unpack_add(base: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    return torch.empty_like(base, memory_format=torch.contiguous_format)


@_fake
def _pack_boxes(x: Tensor, boxes: Sequence[int]) -> Tensor:
    per_box = 2 * x.ndim
    extents = [stop - start for start, stop in zip(boxes[::2], boxes[1::2], strict=True)]
    return x.new_empty(sum(prod(extents[i : i + x.ndim]) for i in range(0, len(boxes) // per_box * x.ndim, x.ndim)))


@_fake
def _unpack_boxes(buffer: Tensor, x: Tensor, boxes: Sequence[int], add: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def in_its_dtype(device: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """What a sparse convolution is given as it computes with it where autocast is on; its own gradients cast back."""
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(each if each.dtype == torch.float64 else each.to(dtype) for each in tensors)


def _kernel(device: str) -> Callable[..., Tensor]:
    def sparse_conv(x: Tensor, weight: Tensor, neighbours: Tensor, reverse: Tensor) -> Tensor:
        x, weight = in_its_dtype(device, x, weight)
        with torch.autocast(device, enabled=False):
            y: Tensor = torch.ops.halopipe.sparse_conv(x, weight, neighbours, reverse)
        return y

    return sparse_conv


for _device, _key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
    torch.library.impl(f"{NAMESPACE}::sparse_conv", _key)(_kernel(_device))


_OPS = getattr(torch.ops, NAMESPACE)


def _operations(neighbours: Tensor, channels: int) -> int:
    is_known = not isinstance(neighbours, FakeTensor) and not neighbours.is_meta
    pairs = int((neighbours >= 0).sum()) if is_known else neighbours.numel()
    return 2 * pairs * channels


def _conv(x: Tensor, weight: Tensor, neighbours: Tensor, reverse: Tensor, *_: Any, **__: Any) -> int:
    return _operations(neighbours, weight.shape[1] * weight.shape[2])


def _conv_weight(x: Tensor, dy: Tensor, neighbours: Tensor, *_: Any, **__: Any) -> int:
    return _operations(neighbours, x.shape[1] * dy.shape[1])


register_flop_formula(_OPS.sparse_conv, get_raw=True)(_conv)
register_flop_formula(_OPS.sparse_conv_weight, get_raw=True)(_conv_weight)
