"""The operators' signatures, and the kernel behind each: looks whether its tensors fit, and calls what runs here.

Implementations get contiguous tensors that fit together and return new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cuda_ops._torch import disable_dynamo
from cuda_ops.sparse import checks
from cuda_ops.sparse.dispatch import implementation

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


def _kernel(name: str) -> Callable[..., Any]:
    check = checks.CHECKS[name]

    def kernel(*args: Any) -> Any:
        check(*args)
        first: Tensor = args[0]
        ready = [each.contiguous() if isinstance(each, Tensor) else _plain(each) for each in args]
        return implementation(name, first.device.type)(*ready)

    kernel.__name__ = name
    return disable_dynamo(kernel)  # the compiler sees the operator, not what runs behind it


def _plain(argument: Any) -> Any:
    return tuple(argument) if isinstance(argument, Sequence) else argument


for _name, _schema in SCHEMAS.items():
    torch.library.define(f"{NAMESPACE}::{_name}", _schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(f"{NAMESPACE}::{_name}", "default")(_kernel(_name))
