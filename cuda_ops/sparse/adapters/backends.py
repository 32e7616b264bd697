"""The kernels of torchsparse and spconv, as implementations of our operators.

Each is a namespace with functions of the operators' names, for contiguous tensors that fit together as the operators
make them; what it lacks is taken from the reference. Our maps go into
theirs: torchsparse's implicit GEMM reads the transposed ``neighbours``, padded to whole blocks of rows, and its
gather-scatter and spconv's native algorithm read lists of pairs by offset. The input gradient is a convolution by the
reverse map, as everywhere here.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cuda_ops.sparse import reference

_BLOCK_ROWS = 128  # of torchsparse's implicit GEMM (`build_kmap.py`, cta_M)
_SPLIT_K = 32  # of its weight gradient (`implicit_gemm.py`)


def load(name: str) -> SimpleNamespace | None:
    """The functions of ``torchsparse`` or ``spconv``; None where it is not installed."""
    makers = {"torchsparse": _torchsparse, "spconv": _spconv}
    return makers[name]() if find_spec(name) is not None else None


def pairs_of(neighbours: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of rows by offset, and how many each offset has.

    Returns:
        int32 (2, offsets, outputs): input and output rows, the pairs of an offset first and -1 behind them, and int32
        (offsets,).
    """
    there = neighbours >= 0
    counts = there.sum(1)
    offset, output = there.nonzero(as_tuple=True)
    place = torch.arange(len(offset), device=offset.device) - (counts.cumsum(0) - counts)[offset]
    pairs = neighbours.new_full((2, *neighbours.shape), -1)
    pairs[0, offset, place] = neighbours[offset, output]
    pairs[1, offset, place] = output.to(neighbours.dtype)
    return pairs, counts.to(torch.int32)


def _spconv() -> SimpleNamespace:
    ops = import_module("spconv.pytorch.ops")

    def sparse_conv(x: Tensor, weight: Tensor, neighbours: Tensor, reverse: Tensor) -> Tensor:
        outputs, offsets = neighbours.shape[1], weight.shape[0]
        if not (x.numel() and outputs) or not _has_cpu_dtype(x):
            return reference.sparse_conv(x, weight, neighbours, reverse)
        pairs, counts = pairs_of(neighbours)
        filters = weight.permute(2, 0, 1).reshape(weight.shape[2], offsets, 1, 1, weight.shape[1]).contiguous()
        with _one_thread(x):
            y: Tensor = ops.indice_conv(x, filters, pairs, counts, outputs)
        return y

    def sparse_conv_weight(x: Tensor, dy: Tensor, neighbours: Tensor) -> Tensor:
        offsets, channels = neighbours.shape[0], (x.shape[1], dy.shape[1])
        if not x.is_cuda or not (x.numel() and dy.numel()):  # without CUDA its backward raises
            return reference.sparse_conv_weight(x, dy, neighbours)
        pairs, counts = pairs_of(neighbours)
        filters = x.new_zeros((channels[1], offsets, 1, 1, channels[0]))
        gradient: Tensor
        _, gradient = ops.indice_conv_backward(x, filters, dy, pairs, counts)
        return gradient.reshape(channels[1], offsets, channels[0]).permute(1, 2, 0).contiguous()

    return SimpleNamespace(sparse_conv=sparse_conv, sparse_conv_weight=sparse_conv_weight)


def _has_cpu_dtype(x: Tensor) -> bool:
    return x.is_cuda or x.dtype in (torch.float32, torch.float64)


class _one_thread:  # noqa: N801  (used as a function)
    """On the CPU spconv's scatter races with more than one thread."""

    def __init__(self, x: Tensor) -> None:
        self._changes, self._threads = not x.is_cuda, torch.get_num_threads()

    def __enter__(self) -> None:
        if self._changes:
            torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        if self._changes:
            torch.set_num_threads(self._threads)


def _torchsparse() -> SimpleNamespace:
    backend, settings = import_module("torchsparse.backend"), import_module("torchsparse.backends")
    by_device = {True: blockwise(backend, settings), False: pairwise(backend)}

    def sparse_conv(x: Tensor, weight: Tensor, neighbours: Tensor, reverse: Tensor) -> Tensor:
        if not (x.numel() and neighbours.shape[1]) or not (x.is_cuda or x.dtype == torch.float32):
            return reference.sparse_conv(x, weight, neighbours, reverse)
        y: Tensor = by_device[x.is_cuda].sparse_conv(x, weight, neighbours)
        return y

    def sparse_conv_weight(x: Tensor, dy: Tensor, neighbours: Tensor) -> Tensor:
        if not (x.numel() and dy.numel()) or not (x.is_cuda or x.dtype == torch.float32):
            return reference.sparse_conv_weight(x, dy, neighbours)
        dweight: Tensor = by_device[x.is_cuda].sparse_conv_weight(x, dy, neighbours)
        return dweight

    return SimpleNamespace(sparse_conv=sparse_conv, sparse_conv_weight=sparse_conv_weight)


def blockwise(backend: Any, settings: Any) -> SimpleNamespace:
    """Torchsparse's implicit GEMM on GPUs (`implicit_gemm.py`); float16, float32 and TF32 as its settings allow."""

    def sparse_conv(x: Tensor, weight: Tensor, neighbours: Tensor) -> Tensor:
        outputs, channels = neighbours.shape[1], weight.shape[2]
        found: Tensor = backend.conv_forward_implicit_gemm_cuda(
            x, weight, _blocks(neighbours), outputs, channels, settings.allow_tf32, settings.allow_fp16
        )
        return found[:outputs].to(x.dtype)

    def sparse_conv_weight(x: Tensor, dy: Tensor, neighbours: Tensor) -> Tensor:
        # It sums first[map[row]] times second[row] over the rows of a map: ours, with x where it has the gradient.
        found: Tensor = backend.conv_backward_wgrad_implicit_gemm_cuda(
            x, dy, _blocks(neighbours), _SPLIT_K, settings.allow_tf32, settings.allow_fp16
        )
        return found.reshape(neighbours.shape[0], x.shape[1], dy.shape[1]).to(x.dtype)

    return SimpleNamespace(sparse_conv=sparse_conv, sparse_conv_weight=sparse_conv_weight)


def pairwise(backend: Any) -> SimpleNamespace:
    """Torchsparse's gather-scatter on the CPU (`gather_scatter.py`), which knows float32 alone."""

    def listed(neighbours: Tensor) -> tuple[Tensor, Tensor]:
        there = neighbours >= 0
        offset, output = there.nonzero(as_tuple=True)
        rows = torch.stack((neighbours[offset, output], output.to(neighbours.dtype)), 1)
        return rows.contiguous(), there.sum(1).to(torch.int32)

    def sparse_conv(x: Tensor, weight: Tensor, neighbours: Tensor) -> Tensor:
        out = x.new_zeros((neighbours.shape[1], weight.shape[2]))
        backend.conv_forward_gather_scatter_cpu(x, out, weight, *listed(neighbours), False)
        return out

    def sparse_conv_weight(x: Tensor, dy: Tensor, neighbours: Tensor) -> Tensor:
        weight = x.new_zeros((neighbours.shape[0], x.shape[1], dy.shape[1]))
        gradient, unused = torch.zeros_like(weight), torch.zeros_like(x)
        backend.conv_backward_gather_scatter_cpu(x, unused, dy, weight, gradient, *listed(neighbours), False)
        return gradient

    return SimpleNamespace(sparse_conv=sparse_conv, sparse_conv_weight=sparse_conv_weight)


def _blocks(neighbours: Tensor) -> Tensor:
    """(outputs, offsets), padded to whole blocks with rows that read nothing."""
    rows = neighbours.shape[1]
    return functional.pad(neighbours.t(), (0, 0, 0, -rows % _BLOCK_ROWS), value=-1).contiguous()
