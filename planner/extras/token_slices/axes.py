"""Token slices: a micro-batch's sequences cut along time into parts that go through a stage one after the other.

A stage that is sliced is divided as one over several ranks is (``division``): slice k does a part of each layer's work
and reads what the access relation says.  The slices run on the same rank one after another, so what slice k reads of
the parts of slices before it is still there, and what it would read of those after it is not: a layer that asks for
that is refused, whatever it is.  Gradients go back the other way, from the last slice to the first (Li et al.,
"TeraPipe: Token-level pipeline parallelism for training large-scale language models", ICML 2021, section 3.2).

    tokens            0 . . . . . 5 . . . 9 . . 12
    slice                  0         1      2
    a linear layer    [0, 5)      [5, 9)  [9, 12)      reads the same tokens
    causal attention  [0, 5)      [5, 9)  [9, 12)      reads keys and values of [0, 5), [0, 9), [0, 12)

Which dim holds the tokens is found layer by layer, by asking access relations what half of the work reads.  A reshape
may merge samples and tokens in one dim; there a slice has, of every sample, its tokens: in an order of rows that begins
with those of the first slice it is an interval like any other, ``[samples x start, samples x stop)``.

What follows from graph inputs alone (masks, positions, targets) is there for all tokens at any time, and made whole by
every slice where a reader asks for more than the slice's own tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from planner.ir.box import Box, Boxes, Interval, Transfer, whole
from planner.ir.errors import UnsupportedModelError
from planner.ir.graph import SAMPLE, Graph, Layer, TensorSpec, producer, value_name
from planner.ir.layout import cut_points
from planner.ir.lazy import once
from planner.ir.plan import AxisPart, Decision, Placement, Size, samples_in
from planner.layers import kind
from planner.layers.division import Division, LayerDivision

TIME = "time"
"""The dim of graph inputs that holds the tokens of a sequence."""

_REPLICA = "replica"
_WITHOUT = ("plan without --allow time and --token-slices",)
"""A dim that no tensor has."""

_ROWS_ALIKE = frozenset({"reshape", "linear", "layer_norm", "softmax", "reduce", "loss"})
"""Kinds that treat rows of a dim of samples and tokens alike, in whatever order they are; none draws numbers."""


_WINDOWS = frozenset({"conv", "transposed_conv", "pool", "adaptive_pool", "upsample", "pad"})
"""Kinds whose op rules exchange halos in ways of their own."""


@dataclass(frozen=True, slots=True)
class TokenDim:
    """Where the tokens of a value, or of a layer's work, lie.

    Attributes:
        is_merged: whether the dim holds samples x tokens.
    """

    dim: int
    name: str
    is_merged: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class TokenAxes:
    """Where tokens lie in all values of a graph.

    Attributes:
        num_tokens: of a sequence.
        values: by name; a value that is missing is whole for every slice.
        works: by layer.
        free: layers that follow from graph inputs alone.
        reads_earlier: layers that read tokens before their own.
    """

    graph: Graph
    num_tokens: int
    values: Mapping[str, TokenDim]
    works: Mapping[str, TokenDim]
    free: frozenset[str]
    reads_earlier: frozenset[str] = frozenset()

    @classmethod
    def of(cls, graph: Graph) -> TokenAxes:
        """Those of ``graph``, free layers that others read beyond their own tokens being whole.

        Raises:
            UnsupportedModelError: a layer cannot be run slice by slice; the error names it and says why.
        """
        num_tokens = _num_tokens(graph)
        whole_layers: frozenset[str] = frozenset()
        while True:
            axes = cls._with(graph, num_tokens, whole_layers)
            faults = tuple(axes._faults())
            more = {producer(fault.value) for fault in faults} & axes.free
            if not more:
                break
            whole_layers |= {layer.name for layer in graph.made_of(more | whole_layers)}
        if faults:
            raise _refused(faults)
        halves = axes._halves()
        earlier = (
            layer.name
            for layer in graph.layers
            if any(halves.moves(layer.name, index) for index in range(len(layer.inputs)))
        )
        return replace(axes, reads_earlier=frozenset(earlier))

    @classmethod
    def _with(cls, graph: Graph, num_tokens: int, whole_layers: frozenset[str]) -> TokenAxes:
        specs = graph.values()
        free = set[str]()
        values = {
            name: TokenDim(spec.dims.index(TIME), TIME) for name, spec in graph.inputs.items() if TIME in spec.dims
        }
        works: dict[str, TokenDim] = {}
        for layer in graph.layers:
            if not layer.parameters and all(v in graph.inputs or producer(v) in free for v in layer.inputs):
                free.add(layer.name)
            if layer.name in whole_layers:
                continue
            work = _token_dim(layer, tuple(specs[name] for name in layer.inputs), values, num_tokens, graph.samples)
            if work is None:
                continue
            works[layer.name] = work
            for index, spec in enumerate(layer.outputs):
                if spec.dims.count(work.name) == 1:
                    at = spec.dims.index(work.name)
                    values[value_name(layer.name, index)] = replace(work, dim=at)
        return cls(graph, num_tokens, values, works, frozenset(free))

    def division(self, decision: Decision, stage: int, samples: int) -> SlicedDivision:
        """How the slices of ``decision`` divide the layers of a stage of one rank, by samples of the micro-batch."""
        return self.divided(decision.layers_of(stage), decision.token_slices, samples)

    def divided(self, layers: Iterable[str], slices: tuple[int, ...], samples: int) -> SlicedDivision:
        """The same for any layers and lengths of slices."""
        by_name = self.graph.by_name()
        specs = self.graph.values()
        divisions = {name: self._layer(by_name[name], specs, slices, samples) for name in layers}
        return SlicedDivision(self, divisions, slices, samples)

    def box(self, value: str, spec: TensorSpec, samples: int, start: int, stop: int) -> Box:
        """The part of a value that belongs to tokens ``start`` to ``stop``, of ``spec`` at its number of samples."""
        at = self.values.get(value)
        box = list(whole(spec.shape))
        if at is not None:
            rows = samples if at.is_merged else 1
            box[at.dim] = Interval(start * rows, stop * rows)
        return tuple(box)

    def box_of(self, value: str, spec: TensorSpec, size: Size) -> Box:
        """The same of a slice; all of a value for whole samples."""
        span = (size.start, size.stop) if isinstance(size, AxisPart) else (0, self.num_tokens)
        return self.box(value, spec, samples_in(size), *span)

    def placement(self, layer: str, lengths: tuple[int, ...]) -> Placement:
        """How a layer's work is cut, as if slices were ranks."""
        work = self.works.get(layer)
        points = cut_points(lengths)
        return Placement(0, {work.name: points} if work is not None else {_REPLICA: tuple(range(len(points)))})

    def _layer(
        self, layer: Layer, specs: Mapping[str, TensorSpec], slices: tuple[int, ...], samples: int
    ) -> LayerDivision:
        work = self.works.get(layer.name)
        sized, inputs, parameters = self.graph.layer_at(layer, samples, specs)
        rows = samples * self.num_tokens if work is not None and work.is_merged else samples
        division = LayerDivision.of(sized, inputs, parameters, self.placement(layer.name, slices), rows)
        if work is None or not work.is_merged:
            return division
        needed = []
        for index, name in enumerate(layer.inputs):
            at = self.values.get(name)
            boxes = division.needed[index]
            if at is not None and not at.is_merged:  # the layer that merges: of each sample, the slice's tokens
                pairs = pairwise(cut_points(slices))
                boxes = tuple(self.box(name, inputs[index], samples, start, stop) for start, stop in pairs)
            needed.append(boxes)
        return replace(division, needed=tuple(needed))

    def _halves(self) -> SlicedDivision:
        length = self.num_tokens // 2
        return self.divided((layer.name for layer in self.graph.layers), (length, self.num_tokens - length), 2)

    def _faults(self) -> Iterator[_Fault]:
        """Where a slice would read what later ones make, or slices would have to meet."""
        division = self._halves()
        read = {producer(value) for layer in self.graph.layers for value in layer.inputs}
        for name, each in division.layers.items():
            layer = each.layer
            reduction = kind(each.layer.kind).REDUCTION
            for index, value in enumerate(layer.inputs):
                moves = division.moves(name, index)
                if any(move.src > move.dst for move in moves):
                    yield _Fault(layer, value, _reads_later(layer, self.num_tokens))
                elif moves and layer.kind in _WINDOWS:
                    yield _Fault(layer, value, "it moves a window over the tokens of")
            work = self.works.get(name)
            if work is None:
                continue
            specs = zip(layer.inputs, each.inputs, strict=True)
            apart = [value for value, spec in specs if SAMPLE in spec.dims and value not in self.values]
            if work.is_merged and apart:
                yield _Fault(layer, apart[0], "it joins rows of samples and tokens with the samples of")
            if reduction == "statistics":
                yield _Fault(layer, layer.inputs[0], "its statistics are over all tokens of")
            elif layer.kind == "loss" and name in read:
                yield _Fault(layer, layer.inputs[0], "other layers read a loss that is summed over all tokens of")
            elif layer.kind != "loss" and len(set(each.owned[0])) == 1:
                yield _Fault(layer, layer.inputs[0], "it sums over all tokens of")


class SlicedDivision(Division):
    """The layers of one stage, divided over token slices; positions are slices.

    What other stages make is held by the slice whose tokens it is, as if this stage had made it.
    """

    def __init__(
        self,
        axes: TokenAxes,
        layers: Mapping[str, LayerDivision],
        slices: tuple[int, ...],
        samples: int,
    ) -> None:
        super().__init__(layers, len(slices), samples)
        self.axes = axes
        self._points = cut_points(slices)
        self._specs = axes.graph.values()

    def makes(self, value: str) -> bool:
        return value not in self.axes.graph.inputs

    @once
    def owned(self, value: str) -> Boxes:
        spec = self._specs[value].at(self.samples, self.axes.graph.samples)
        return tuple(self.axes.box(value, spec, self.samples, *pair) for pair in pairwise(self._points))

    def held(self, value: str) -> Boxes:
        return self.owned(value) if self.makes(value) else super().held(value)

    def moves(self, reader: str, index: int) -> tuple[Transfer, ...]:
        """What slices read of one another; a value that is whole in each of them is moved by none."""
        value = self.layers[reader].layer.inputs[index]
        return super().moves(reader, index) if value in self.axes.values else ()


@dataclass(frozen=True, slots=True)
class _Fault:
    """Why a layer cannot be run slice by slice."""

    layer: Layer
    value: str
    why: str


def along_time(graph: Graph, slices: tuple[int, ...], ranks: Sequence[tuple[int, ...]]) -> TokenAxes:
    """Where tokens lie, if sequences can be cut into slices of these lengths, in stages on ``ranks``.

    Raises:
        UnsupportedModelError: they cannot.
    """
    require_one_rank(slices, ranks)
    return require_sliceable(graph, slices)


def require_one_rank(slices: tuple[int, ...], ranks: Sequence[tuple[int, ...]]) -> None:
    """Raises :class:`UnsupportedModelError` if a stage of a plan with slices is on several ranks."""
    shared = next((stage for stage, own in enumerate(ranks) if slices and len(own) > 1), None)
    if shared is not None:
        raise UnsupportedModelError(
            f"stage {shared} is on several ranks, and in a plan with token slices each stage is on one",
            [f"{len(ranks[shared])} ranks; slices of {', '.join(map(str, slices))} tokens"],
            ["one rank a stage", "no token slices"],
        )


def require_sliceable(graph: Graph, slices: tuple[int, ...]) -> TokenAxes:
    """Where tokens lie, if sequences can be cut into slices of these lengths.

    Raises:
        UnsupportedModelError: they cannot.
    """
    axes = TokenAxes.of(graph)
    if sum(slices) != axes.num_tokens or min(slices) < 1:
        raise UnsupportedModelError(
            f"token slices of {', '.join(map(str, slices))} tokens do not make up a sequence",
            [f"they add up to {sum(slices)}, the model's sequences have {axes.num_tokens} tokens"],
            ["plan again for sequences of that length"],
        )
    return axes


def _num_tokens(graph: Graph) -> int:
    lengths = {
        spec.shape[spec.dims.index(TIME)]: name for name, spec in graph.inputs.items() if spec.dims.count(TIME) == 1
    }
    if len(lengths) != 1:
        details = [f"{name} has {length} tokens" for length, name in lengths.items()]
        title = "the sequences of a sample differ in length" if lengths else "no input has a dim of tokens (time)"
        raise UnsupportedModelError(f"token slices: {title}", details, _WITHOUT)
    length = next(iter(lengths))
    if length < 2:
        raise UnsupportedModelError("token slices: sequences have one token", [], _WITHOUT)
    return length


def _token_dim(
    layer: Layer, inputs: tuple[TensorSpec, ...], values: Mapping[str, TokenDim], num_tokens: int, samples: int
) -> TokenDim | None:
    """The dim of the layer's work along which parts read the tokens of their own, and perhaps earlier ones."""
    sliced = [(index, values[name]) for index, name in enumerate(layer.inputs) if name in values]
    if not sliced:
        return None
    relation = kind(layer.kind)
    work = relation.work(layer, inputs)
    if layer.kind == "reshape" and (merged := _merged(layer, inputs[0], sliced[0][1], num_tokens, samples)):
        return merged
    for dim, (name, extent) in enumerate(zip(work.dims, work.shape, strict=True)):
        is_merged = name == SAMPLE
        rows = samples if is_merged else 1
        if extent != num_tokens * rows or work.dims.count(name) > 1:
            continue
        if is_merged and (layer.kind not in _ROWS_ALIKE or not any(at.is_merged for _, at in sliced)):
            continue
        first = list(whole(work.shape))
        first[dim] = Interval(0, num_tokens // 2 * rows)
        read = relation.input_boxes(layer, inputs, tuple(first))
        if any(at.is_merged == is_merged and read[index][at.dim] == first[dim] for index, at in sliced):
            return TokenDim(dim, name, is_merged)
    return None


def _merged(layer: Layer, read: TensorSpec, at: TokenDim, num_tokens: int, samples: int) -> TokenDim | None:
    """The dim of samples x tokens that a reshape makes of two dims that follow one another."""
    made = layer.outputs[0]
    before = at.dim - 1
    if at.is_merged or before < 0 or read.dims[before] != SAMPLE or made.dims.count(SAMPLE) != 1:
        return None
    dim = made.dims.index(SAMPLE)
    is_merged = made.shape[dim] == samples * num_tokens and read.shape[before] == samples
    is_in_place = prod(made.shape[:dim]) == prod(read.shape[:before])
    if is_merged and is_in_place and not _is_permuted(layer, at.dim):
        return TokenDim(dim, SAMPLE, is_merged=True)
    return None


def _is_permuted(layer: Layer, time: int) -> bool:
    """Whether a reshape keeps the dim of tokens, or moves others past it."""
    kept = layer.attributes.get("kept", ())
    places = [dim for dim in kept if dim >= 0] if isinstance(kept, tuple) else []
    return time in places or places != sorted(places)


def _reads_later(layer: Layer, num_tokens: int) -> str:
    """Why a layer would read what later slices make."""
    if layer.kind == "opaque":
        return "which tokens it reads for one is not known, so that it would read later ones of"
    if layer.kind in ("pad", "slice", "concat") and TIME not in [
        dim for spec in layer.outputs for dim, extent in zip(spec.dims, spec.shape, strict=True) if extent == num_tokens
    ]:
        return f"it makes other than {num_tokens} tokens, so that they stand in other places than those of"
    return "to make its first half it reads tokens of the second half of"


def _refused(faults: tuple[_Fault, ...]) -> UnsupportedModelError:
    first = faults[0]
    every = [f"layer {each.layer.name} ({each.layer.kind}): {each.why} {each.value}" for each in faults]
    lines = list(dict.fromkeys(every))
    lines[3:] = [f"and {len(lines) - 3} more"] if len(lines) > 3 else []
    remedies = [*_WITHOUT]
    if any(each.layer.kind in ("attention", "softmax") for each in faults):
        remedies.insert(0, "attention: scaled_dot_product_attention(..., is_causal=True) is known to be causal")
    return UnsupportedModelError(f"layer {first.layer.name} cannot be run in token slices", lines, remedies)
