"""Under autocast a sparse convolution computes in autocast's dtype, as dense ones do; all else is left as it is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

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
            return torch.ops.halopipe.sparse_conv(x, weight, neighbours, reverse)  # type: ignore[no-any-return]

    return sparse_conv


for _device, _key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
    torch.library.impl(f"{NAMESPACE}::sparse_conv", _key)(_kernel(_device))
