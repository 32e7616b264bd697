"""Under autocast a sparse convolution computes in autocast's dtype, as dense ones do; all else is left as it is.

Floating-point operations of a sparse convolution, for torch's counter: two a pair, input and output channel.

A map without memory is taken as full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cuda_ops._torch import FakeTensor
from cuda_ops.sparse.schemas import NAMESPACE


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
