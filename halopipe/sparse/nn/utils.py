"""`torchsparse.nn.utils`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cuda_ops.sparse.keys import kernel_offsets
from cuda_ops.sparse.nn.tensor import SparseTensor, triple

__all__ = ["fapply", "get_kernel_offsets"]
KernelExtent = int | tuple[int, int, int]


def fapply(input: SparseTensor, fn: Callable[..., Tensor], *args: Any, **kwargs: Any) -> SparseTensor:
    """``fn`` of the features, on the same sites."""
    return input.with_feats(fn(input.feats, *args, **kwargs))


def get_kernel_offsets(
    size: KernelExtent, stride: KernelExtent = 1, dilation: KernelExtent = 1, device: str = "cpu"
) -> Tensor:
    """int32 (offsets, 3): of a kernel in the order of its weights here, x slowest and z fastest."""
    kernel, steps, wide = (triple(each, "kernel offsets", "get_kernel_offsets") for each in (size, stride, dilation))
    spread = tuple(step * extent for step, extent in zip(steps, wide, strict=True))
    return torch.tensor(kernel_offsets(kernel, spread), dtype=torch.int32, device=device)
