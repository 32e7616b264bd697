"""What an output reads: boxes followed from outputs back to inputs, by the access relations of the layers alone.

    read_back         of wanted boxes of some values: what each layer has to do, and the box of every value that is read
    receptive_field   of one layer: the same as sizes, strides and offsets, for people

A box is the hull of what is read, cut off at the edges of the tensor, so it may hold elements that are not read, but
never lacks one that is.  Its ends are read as well, but where windows skip rows (dilation, a stride wider than the
kernel) and a row skipped is the outermost of a tensor, or falls on what another layer skips.

Sizes, strides and offsets are those of outputs far from the edges (Araujo et al., "Computing Receptive Fields of
Convolutional Neural Networks", Distill 2019; there by closed forms for chains of convolutions, here of any graph):
output o reads rows ``offset + stride o`` and ``size - 1`` more, padding included.  Where outputs take turns (a
transposed convolution), the stride is a fraction, and ``size`` and ``offset`` cover all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from planner.ir.box import Box, Interval, hull, intersect, volume, whole
from planner.ir.errors import UnknownNameError, UsageError
from planner.ir.graph import Graph, Layer, TensorSpec, producer, value_name
from planner.layers._kinds import has_halo, kind
from planner.layers._rules import NOTHING

_PERIODS = 64
"""Longest period of outputs that take turns."""

"""By value."""


@dataclass(frozen=True, slots=True)
class ReadBack:
    """What is done and read to make what is wanted.

    Attributes:
        done: by layer, the box of its work; layers that need not run are left out.
        read: by value, the box that is made or read of it, inside the tensor.
    """

    done: Mapping[str, Box]
    read: Mapping[str, Box]


def read_back(
    layers: Iterable[Layer],
    specs: Mapping[str, TensorSpec],
    wanted: Mapping[str, Box],
    works: Mapping[str, Box] | None = None,
    *,
    inside: bool = True,
) -> ReadBack:
    """Follows ``wanted`` back through ``layers``, in evaluation mode (a batch norm reads the same place).

    Args:
        layers: in the graph's order; what they read and none of them makes is only told.
        specs: of all values that they read or make, at the sizes that are meant.
        wanted: by value, a box inside the tensor.
        works: by layer, a box of its work that is wanted in place of its outputs (of a reduction, whose work is what it
            reduces).
        inside: whether what is read is cut off at the edges of tensors.
    """
    read = {value: box for value, box in wanted.items() if volume(box)}
    done: dict[str, Box] = {}
    for layer in reversed(list(layers)):
        inputs = tuple(specs[name] for name in layer.inputs)
        relation = kind(layer.kind)
        work = relation.work(layer, inputs)
        needed = (works or {}).get(layer.name)
        if needed is not None and not volume(needed):
            needed = None
        for index, spec in enumerate(layer.outputs):
            box = read.get(value_name(layer.name, index))
            if box is not None:
                needed = hull(needed, _work_box(work, spec, box))
        if needed is None:
            continue
        done[layer.name] = needed
        for name, spec, box in zip(layer.inputs, inputs, relation.input_boxes(layer, inputs, needed), strict=True):
            kept = (intersect(box, whole(spec.shape)) if inside else box) if volume(box) else None
            if kept is not None:
                read[name] = hull(read.get(name), kept)
    return ReadBack(done, read)


def _work_box(work: TensorSpec, spec: TensorSpec, box: Box) -> Box:
    """The work that makes ``box`` of an output: the same place, all of it along dims in which the two differ."""
    if len(spec.shape) != len(work.shape) or spec.dims != work.dims:
        return whole(work.shape)
    pairs = zip(box, spec.shape, work.shape, strict=True)
    return tuple(interval if extent == total else Interval(0, total) for interval, extent, total in pairs)


@dataclass(frozen=True, slots=True)
class FieldAlong:
    """What outputs read of an input along one of its dims, far from the edges.

    Attributes:
        dim: its name; ``extent``: of the input.
        size: rows that one output reads, the most where they differ; all of ``extent`` where it reads all.
        stride: rows from what one output reads to what the next one does; 0 where all read the same.  None: no rule,
            such as adaptive bins of unequal size.
        offset: the first row that output 0 reads; negative: padding.  None without a stride.
    """

    dim: str
    extent: int
    size: int
    stride: Fraction | None
    offset: int | None


@dataclass(frozen=True, slots=True)
class ReceptiveField:
    """What a box of an output reads of the graph's inputs.

    Attributes:
        value: the output; ``box``: of it, in global coordinates of the graph's own shapes.
        inputs: by graph input, the box that is read; inputs of which nothing is read are left out.
        along: by graph input, for each of its dims.
    """

    value: str
    box: Box
    inputs: Mapping[str, Box]
    along: Mapping[str, tuple[FieldAlong, ...]]


def receptive_field(graph: Graph, value: str, box: Box | Mapping[str, tuple[int, int]] | None = None) -> ReceptiveField:
    """What ``box`` of ``value`` reads of the graph's inputs, in evaluation mode.

    Args:
        value: a layer, or ``layer:1`` for its second output.
        box: an interval for each dim; or by name of a dim where it starts and stops, ``{"height": (0, 4)}``, dims left
            out being the one element in their middle; None: that in every dim.

    Raises:
        UnknownNameError: no layer makes that value.
        UsageError: the box does not lie in the tensor, or a layer on the way is over sites, whose neighbours depend on
            the data.
    """
    specs = graph.values()
    if value not in specs or value in graph.inputs:
        layer_names = ", ".join(name for name in specs if name not in graph.inputs)
        raise UnknownNameError(f"no layer makes {value!r}", [f"known: {layer_names}"])
    spec = specs[value]
    middle = tuple(Interval(extent // 2, extent // 2 + 1) for extent in spec.shape)
    if isinstance(box, Mapping):
        unknown = [dim for dim in box if spec.dims.count(dim) != 1]
        if unknown:
            raise UsageError(f"{value} has no dim {unknown[0]}", [f"it is [{', '.join(spec.dims)}]"], ["one of these"])
        pairs = zip(spec.dims, middle, strict=True)
        chosen = tuple(Interval(*box[dim]) if dim in box else part for dim, part in pairs)
    else:
        chosen = middle if box is None else tuple(box)
    if len(chosen) != len(spec.shape) or any(
        not 0 <= part.start < part.stop <= extent for part, extent in zip(chosen, spec.shape, strict=False)
    ):
        raise UsageError(
            f"the box {', '.join(map(str, chosen)) or '()'} does not lie in {value}",
            [f"{value} is [{', '.join(spec.dims)}] of {spec.shape}"],
            ["an interval for each dim, not empty, inside the tensor"],
        )
    layers = graph.made_of([producer(value)])
    for layer in layers:
        if has_halo(layer.kind):
            raise UsageError(
                f"what {value} reads depends on the data",
                [f"layer {layer.name} ({layer.kind}) reads neighbours of sites"],
                ["ask for a layer of a dense network"],
            )
    boxes = read_back(layers, specs, {value: chosen}).read
    inputs = {name: boxes[name] for name in graph.inputs if name in boxes}
    return ReceptiveField(value, chosen, inputs, {name: _along(layers, specs, value, name) for name in inputs})


def _along(layers: Sequence[Layer], specs: Mapping[str, TensorSpec], value: str, name: str) -> tuple[FieldAlong, ...]:
    """By dim of an input: output positions along the dim of that name are tried one after the other."""
    spec = specs[value]
    input_spec = specs[name]
    middle = tuple(Interval(extent // 2, extent // 2 + 1) for extent in spec.shape)

    def reads(dim: int | None, position: int, at: int) -> Interval:
        box = middle if dim is None else (*middle[:dim], Interval(position, position + 1), *middle[dim + 1 :])
        read = read_back(layers, specs, {value: box}, inside=False).read
        return read.get(name, (NOTHING,) * len(input_spec.dims))[at]

    rules = []
    for at, (word, extent) in enumerate(zip(input_spec.dims, input_spec.shape, strict=True)):
        dim = spec.dims.index(word) if spec.dims.count(word) == 1 and input_spec.dims.count(word) == 1 else None
        outputs = 1 if dim is None else spec.shape[dim]
        count = min(outputs, 3 * _PERIODS)
        first = (outputs - count) // 2
        rules.append(_rule(word, extent, first, [reads(dim, o, at) for o in range(first, first + count)]))
    return tuple(rules)


def _rule(dim: str, extent: int, first: int, reads: list[Interval]) -> FieldAlong:
    """What intervals of neighbouring outputs, the first of them output ``first``, have in common."""
    size = max(map(len, reads))
    if len({(one.start, one.stop) for one in reads}) == 1:
        alone = len(reads) == 1 and size < extent
        return FieldAlong(dim, extent, size, None if alone else Fraction(0), None if alone else reads[0].start)
    for period in range(1, min(_PERIODS, len(reads) // 2) + 1):
        pairs = [(a, b) for a, b in zip(reads, reads[period:], strict=False) if len(a) and len(b)]
        shifts = {(b.start - a.start, b.stop - a.stop) for a, b in pairs}
        if len(shifts) == 1 and len({shift for both in shifts for shift in both}) == 1 and len(pairs) > period // 2:
            shift = next(iter(shifts))[0]
            turn = first % period
            full = next(k for k in range(len(reads)) if (turn + k) % period == 0)
            periods = (first + full) // period
            start = min(one.start for one in reads[full : full + period] if len(one))
            return FieldAlong(dim, extent, size, Fraction(shift, period), start - periods * shift)
    return FieldAlong(dim, extent, size, None, None)
