"""How kernels are launched: on the tensor's own device, with the options that all of them share.

Sizes that vary from batch to batch are not specialised (``do_not_specialize``): a kernel is compiled once for its types
and channels, not again in the middle of a run because a cloud has a multiple of sixteen voxels.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

# Sums of products may be fused; Triton warns where that is left open.
OPTIONS = {"enable_fp_fusion": True}

ACCUMULATORS = {torch.float64: tl.float64}


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """The type that values of ``dtype`` are added up in."""
    return ACCUMULATORS.get(dtype, tl.float32)


def on_device(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def launch(kernel: Any, grid: Sequence[int], like: torch.Tensor, *arguments: Any, **options: Any) -> None:
    """Run ``kernel`` over ``grid``; an empty grid is no launch."""
    if min(grid) > 0:
        with on_device(like):
            kernel[tuple(grid)](*arguments, **OPTIONS, **options)


def block_of(size: int, least: int, most: int) -> int:
    """The power of two that holds ``size``, between two others."""
    return max(least, min(most, triton.next_power_of_2(max(size, 1))))
