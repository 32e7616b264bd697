"""How kernels are launched: on the tensor's own device, with the options that all of them share.

Sizes that vary from batch to batch are not specialised (``do_not_specialize``): a kernel is compiled once for its types
and channels, not again in the middle of a run because a cloud has a multiple of sixteen voxels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, overload

import torch
import triton
import triton.language as tl
from torch import Tensor

# Sums of products may be fused; Triton warns where that is left open.
OPTIONS = {"enable_fp_fusion": True}

ACCUMULATORS = {torch.float64: tl.float64}


class TritonKernel(Protocol):
    """A function that Triton compiles."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """What launches it over ``grid``."""

    def __call__(self, *arguments: Any) -> Any:
        """What it returns, where another kernel calls it."""


class Jit(Protocol):
    """The decorator ``triton.jit``; ``do_not_specialize`` names arguments."""

    @overload
    def __call__(self, function: Callable[..., Any], /) -> TritonKernel: ...

    @overload
    def __call__(self, *, do_not_specialize: Sequence[str]) -> Callable[[Callable[..., Any]], TritonKernel]: ...


jit: Jit = triton.jit  # Triton has no types


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """The type that values of ``dtype`` are added up in."""
    return ACCUMULATORS.get(dtype, tl.float32)


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def launch(kernel: TritonKernel, grid: Sequence[int], like: Tensor, *arguments: Any, **options: Any) -> None:
    """Run ``kernel`` over ``grid``; an empty grid is no launch."""
    if min(grid) > 0:
        with on_device(like):
            kernel[tuple(grid)](*arguments, **OPTIONS, **options)


def block_of(size: int, least: int, most: int) -> int:
    """The power of two that holds ``size``, between two others."""
    power: int = triton.next_power_of_2(max(size, 1))
    return max(least, min(most, power))
