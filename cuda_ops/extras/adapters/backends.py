"""The kernels of spconv as an implementation of our operators: functions of their names.

They take contiguous tensors that fit together as the operators make them; what they lack is taken from the reference.
spconv's native algorithm reads our maps as lists of pairs by offset. The input gradient is a convolution by the reverse
map, as everywhere here.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import torch
from torch import Tensor

from cuda_ops.sparse import reference


def load() -> SimpleNamespace | None:
    """The functions; None where spconv is not installed."""
    return _spconv() if find_spec("spconv") is not None else None


def pairs_of(neighbours: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of rows by offset, and how many each offset has.

    Returns:
        int32 (2, offsets, outputs): input and output rows, the pairs of an offset first and -1 after them, and int32
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
        outputs = neighbours.shape[1]
        offsets = weight.shape[0]
        if not (x.numel() and outputs) or not (x.is_cuda or x.dtype in (torch.float32, torch.float64)):
            return reference.sparse_conv(x, weight, neighbours, reverse)
        pairs, counts = pairs_of(neighbours)
        filters = weight.permute(2, 0, 1).reshape(weight.shape[2], offsets, 1, 1, weight.shape[1]).contiguous()
        with _one_thread(x):
            y: Tensor = ops.indice_conv(x, filters, pairs, counts, outputs)
        return y

    def sparse_conv_weight(x: Tensor, dy: Tensor, neighbours: Tensor) -> Tensor:
        offsets = neighbours.shape[0]
        channels = (x.shape[1], dy.shape[1])
        if not x.is_cuda or not (x.numel() and dy.numel()):  # without CUDA its backward raises
            return reference.sparse_conv_weight(x, dy, neighbours)
        pairs, counts = pairs_of(neighbours)
        filters = x.new_zeros((channels[1], offsets, 1, 1, channels[0]))
        gradient: Tensor
        _, gradient = ops.indice_conv_backward(x, filters, dy, pairs, counts)
        return gradient.reshape(channels[1], offsets, channels[0]).permute(1, 2, 0).contiguous()

    return SimpleNamespace(sparse_conv=sparse_conv, sparse_conv_weight=sparse_conv_weight)


class _one_thread:  # noqa: N801  (used as a function)
    """On the CPU spconv's scatter races with more than one thread."""

    def __init__(self, x: Tensor) -> None:
        self._changes = not x.is_cuda
        self._threads = torch.get_num_threads()

    def __enter__(self) -> None:
        if self._changes:
            torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        if self._changes:
            torch.set_num_threads(self._threads)
