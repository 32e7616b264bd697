"""What the dims of a traced value mean: the samples by the symbol in its shape, others by the kind of its layer."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from planner.ir.graph import SAMPLE, TensorSpec
from profiler.trace import Traced

_SPACE = {1: ("width",), 2: ("height", "width"), 3: ("depth", "height", "width")}
_FIRM = frozenset({SAMPLE, "channel", "depth", "height", "width", "head"})  # access relations and layouts go by these
_SPATIAL_KINDS = frozenset({"conv", "transposed_conv", "pool", "adaptive_pool", "batch_norm"})
_SAME_AS_INPUT = frozenset({"pointwise", "concat", "softmax", "layer_norm", "opaque"})


def specify(value: Tensor, names: tuple[str, ...], traced: Traced) -> TensorSpec:
    """The spec of a traced ``value`` in the example; ``names`` are those of its dims if no dim is special.

    Where the number of samples is fixed, dim 0 holds the samples if it is that long.  Sizes that vary give their names
    to dims of no firm meaning.
    """
    symbols = traced.symbols
    shape = tuple(symbols.extent(size, traced.samples) for size in value.shape)
    sizes = [symbols.name_of(size) for size in value.shape]
    if traced.is_polymorphic:
        places = [dim for dim, size in enumerate(value.shape) if symbols.per_sample(size)][:1]
    else:
        places = [0] if shape and shape[0] == traced.samples and sizes[0] is None else []
    dims = list(_placed(names, places, len(shape)))
    guessed = {*traced.varying, "time"} if any(sizes) else set(traced.varying)
    for dim, (name, size) in enumerate(zip(dims, sizes, strict=True)):
        if name not in _FIRM and size != name and (name in guessed or (size and size not in dims)):
            dims[dim] = size if size and size not in dims else f"dim{dim}"
    return TensorSpec(tuple(dims), shape, str(value.dtype).removeprefix("torch."))


def specify_input(value: Tensor, tensor: str, traced: Traced) -> TensorSpec:
    """The spec of the graph input called ``tensor``: just those dims bear the name of a size that vary with it."""
    spec = specify(value, input_names(value), traced)
    places = {dim: name for name, found in traced.varying.items() for where, dim in found if where == tensor}
    dims = tuple(places.get(dim, f"dim{dim}" if name in traced.varying else name) for dim, name in enumerate(spec.dims))
    return replace(spec, dims=dims)


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
