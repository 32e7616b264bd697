"""What the dims of a traced value mean: the samples by the symbol in its shape, others by the kind of its layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from planner.ir.graph import SAMPLE, TensorSpec
from profiler.trace import proportion

_SPACE = {1: ("width",), 2: ("height", "width"), 3: ("depth", "height", "width")}
_SPATIAL_KINDS = frozenset({"conv", "transposed_conv", "pool", "adaptive_pool", "batch_norm"})
_SAME_AS_INPUT = frozenset({"pointwise", "concat", "softmax", "layer_norm", "opaque"})


def specify(value: Tensor, names: tuple[str, ...], samples: int, symbol: Any | None) -> TensorSpec:
    """The spec of a traced ``value`` for ``samples`` samples; ``names`` are those of its dims if no dim is special.

    Where the number of samples is fixed (no ``symbol``), dim 0 holds the samples if it is that long.
    """
    shape = tuple(_extent(size, samples, symbol) for size in value.shape)
    if symbol is None:
        places = [0] if shape and shape[0] == samples else []
    else:
        places = [dim for dim, size in enumerate(value.shape) if proportion(size, symbol)][:1]
    return TensorSpec(_placed(names, places, len(shape)), shape, str(value.dtype).removeprefix("torch."))


def input_names(value: Tensor) -> tuple[str, ...]:
    """Names of the dims of a graph input: numbers are images or sequences of features, integers labels or tokens."""
    rank = value.ndim
    if value.is_floating_point():
        return spatial_names(rank) if rank >= 4 else _sequence_names(rank)
    return (SAMPLE, "time")[:rank] if rank <= 2 else (SAMPLE, *_SPACE.get(rank - 1, ()))


def output_names(kind: str, rank: int, inputs: tuple[TensorSpec, ...]) -> tuple[str, ...]:
    """Names of the dims of the result of a layer of ``kind``."""
    if kind in _SPATIAL_KINDS:
        return spatial_names(rank)
    if kind == "attention" and rank == 4:
        return (SAMPLE, "head", "time", "feature")
    if kind in _SAME_AS_INPUT:
        alike = next((spec for spec in inputs if len(spec.dims) == rank and SAMPLE in spec.dims[:1]), None)
        if alike is not None:
            return alike.dims
    return _sequence_names(rank)


def spatial_names(rank: int) -> tuple[str, ...]:
    """Sample, channel and up to three dims of space."""
    return (SAMPLE, "channel", *_SPACE.get(rank - 2, ()))[:rank] if rank <= 5 else ()


def _sequence_names(rank: int) -> tuple[str, ...]:
    known = {1: (SAMPLE,), 2: (SAMPLE, "feature"), 3: (SAMPLE, "time", "feature")}
    return known.get(rank, ())


def _placed(names: tuple[str, ...], places: list[int], rank: int) -> tuple[str, ...]:
    """``names`` if they fit: as many as ``rank``, with the samples where they are; else numbered names."""
    if len(names) == rank and places == [0]:
        return names
    return tuple(SAMPLE if dim in places else f"dim{dim}" for dim in range(rank))


def _extent(size: Any, samples: int, symbol: Any | None) -> int:
    if symbol is not None and isinstance(size, torch.SymInt):
        return int(size.node.expr.subs(symbol, samples))
    return int(size)
