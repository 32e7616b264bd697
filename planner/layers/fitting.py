"""Whether attributes and shapes of a graph's layers are such as their kinds can read: each asked as planners ask it.

The access relation of every layer is evaluated on its whole work and on the halves of each dim.  What cannot be
evaluated, or answers something that is no box of the tensor, is a fault of the file: no planner meets it later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from planner.ir.box import Box, Interval, whole
from planner.ir.graph import Attribute, Graph, Layer, TensorSpec
from planner.ir.quantities import Fault
from planner.ir.validation import MOST_EXTENT
from planner.layers._kinds import kind, kinds

_POSITIVE = ("kernel", "stride", "dilation", "groups", "step", "factor_numerators", "factor_denominators")
_REACHES = ("kernel", "stride", "dilation", "padding", "step")
_NOT_NEGATIVE = ("padding", "starts", "pairs", "terms", "space")
_PLACES = ("dims", "dim", "kept")
_WINDOW = ("kernel", "stride", "padding", "dilation")
_MOST_REACH = 2**20
"""Of a window: kernels, strides and dilations beyond this are no layer's, and relations would count for ever."""

_MOST_FLOPS = 1e24


def misfits(graph: Graph) -> Iterator[Fault]:
    """Where a layer does not fit its kind, of a graph whose names and shapes are in order otherwise."""
    for index, (layer, inputs) in enumerate(graph.with_inputs()):
        path = f"graph.layers[{index}]"
        if layer.kind not in kinds():
            yield f"{path}.kind", f"no layer kind {layer.kind!r}; known: {', '.join(kinds())}"
            continue
        of_layer = list(_attributes(f"{path}.attributes", layer.attributes)) or list(_windows(path, layer, inputs))
        yield from of_layer or _relation(
            path, layer, inputs, tuple(graph.parameters[name] for name in layer.parameters)
        )


def _attributes(path: str, attributes: Mapping[str, Attribute]) -> Iterator[Fault]:
    for name, value in attributes.items():
        numbers = value if isinstance(value, tuple) else (value,)
        least = 1 if name in _POSITIVE else 0 if name in _NOT_NEGATIVE else -MOST_EXTENT
        most = _MOST_REACH if name in _REACHES else 64 if name in _PLACES else MOST_EXTENT
        for number in numbers:
            if isinstance(number, (bool, str)):
                continue
            if number < least:
                yield f"{path}.{name}", f"{number} is less than {least}"
            elif number > most:
                yield f"{path}.{name}", f"{number} is more than {most}"


def _windows(path: str, layer: Layer, inputs: tuple[TensorSpec, ...]) -> Iterator[Fault]:
    """A window that moves over an input must fit as often as there are outputs, but for the last one."""
    if layer.kind not in ("conv", "pool") or not inputs:
        return
    attributes = [layer.attributes.get(name) for name in _WINDOW]
    counts = [len(numbers) for numbers in attributes if isinstance(numbers, tuple)]
    if len(counts) < len(_WINDOW) or len(set(counts)) > 1:
        lacking = [name for name, numbers in zip(_WINDOW, attributes, strict=True) if not isinstance(numbers, tuple)]
        shown = f"no {', '.join(lacking)}" if lacking else f"{', '.join(map(str, counts))} of {', '.join(_WINDOW)}"
        yield f"{path}.attributes", f"{shown}: a number for each dim of space is needed"
        return
    data = inputs[0].shape
    made = layer.outputs[0].shape
    if len(data) != len(made) or len(data) < counts[0] + 1:
        yield f"{path}.outputs[0].shape", f"{len(made)} dims, of an input of {len(data)}, for {counts[0]} of space"
        return
    for dim, numbers in enumerate(zip(*attributes, strict=True), start=len(data) - counts[0]):
        kernel, stride, padding, dilation = numbers
        reads = (made[dim] - 1) * stride + dilation * (kernel - 1) + 1
        there = data[dim] + 2 * padding
        if made[dim] > 0 and not there - 2 * stride < reads < there + stride:
            text = f"{made[dim]} windows reach over {reads} of an input of {there} with its padding"
            yield f"{path}.outputs[0].shape[{dim}]", text
    groups = layer.attributes.get("groups", 1)
    channel = len(data) - counts[0] - 1
    for name, extent in (("inputs", data[channel]), ("outputs", made[channel])):
        if isinstance(groups, int) and extent % groups:
            yield f"{path}.attributes.groups", f"{groups} groups do not divide the {extent} channels of its {name}"


def _relation(
    path: str, layer: Layer, inputs: tuple[TensorSpec, ...], parameters: tuple[TensorSpec, ...]
) -> Iterator[Fault]:
    relation = kind(layer.kind)
    try:
        work = relation.work(layer, inputs)
        for box in _asked(work):
            read = relation.input_boxes(layer, inputs, box)
            used = relation.weight_boxes(layer, parameters, box)
            for what, specs, boxes in (("inputs", inputs, read), ("parameters", parameters, used)):
                if [len(each) for each in boxes] != [len(spec.dims) for spec in specs]:
                    dims = ", ".join(str(len(spec.dims)) for spec in specs)
                    yield f"{path}.{what}", f"of {dims or 'no'} dims, which a {layer.kind} does not read so"
                    return
        flops = relation.forward_flops(layer, inputs)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = str(error) or type(error).__name__
        yield path, f"attributes and shapes of {layer.name!r} are no {layer.kind}'s ({what})"
        return
    if not 0 <= flops <= _MOST_FLOPS:
        yield path, f"{flops:g} operations of {layer.name!r} are beyond any machine"


def _asked(work: TensorSpec) -> Iterator[Box]:
    """All of the work, and the halves of each dim."""
    full = whole(work.shape)
    yield full
    for dim, interval in enumerate(full):
        middle = interval.stop // 2
        if middle:
            yield (*full[:dim], Interval(0, middle), *full[dim + 1 :])
            yield (*full[:dim], Interval(middle, interval.stop), *full[dim + 1 :])
