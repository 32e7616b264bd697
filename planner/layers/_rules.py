"""What layer kinds have in common: how an interval of the work maps to an interval of an input."""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import prod

from planner.ir.box import Box, Boxes, Interval, whole
from planner.ir.graph import SAMPLE, Attribute, Layer, TensorSpec

Specs = tuple[TensorSpec, ...]
InputBoxes = Callable[[Layer, Specs, Box], Boxes]

NOTHING = Interval(0, 0)


def whole_weights(layer: Layer, parameters: Specs, work_box: Box) -> Boxes:
    """Every part of the work uses all parameters."""
    return tuple(whole(spec.shape) for spec in parameters)


def num_elements(spec: TensorSpec) -> int:
    """Number of elements of a dense tensor."""
    return prod(spec.shape)


def integers(value: Attribute | None) -> tuple[int, ...]:
    """An attribute that holds one number a dim.

    Raises:
        TypeError: it is missing or something else.
    """
    if not isinstance(value, tuple):
        raise TypeError(f"{value!r} is not a tuple of numbers")
    return value


def integer(value: Attribute | None) -> int:
    """An attribute that holds one number.

    Raises:
        TypeError: it is missing or something else.
    """
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is not a number")
    return value


def empty_work_reads_nothing(relation: InputBoxes) -> InputBoxes:
    """``relation``, but an empty work box reads empty boxes, whatever its other dims say."""

    @functools.wraps(relation)
    def wrapped(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
        if all(len(interval) for interval in work_box):
            return relation(layer, inputs, work_box)
        return tuple(tuple(NOTHING for _ in spec.shape) for spec in inputs)

    return wrapped


def sample_interval(work: TensorSpec, work_box: Box, extent: int) -> Interval | None:
    """The rows of a sample dim of ``extent`` that belong to the samples in ``work_box``; None if work has no samples.

    Either dim may hold several rows a sample (a flattened batch x time), and the cut is between samples; were it not,
    the samples that are cut through would be read whole.
    """
    if SAMPLE not in work.dims:
        return None
    dim = work.dims.index(SAMPLE)
    rows = work_box[dim]
    total = work.shape[dim]
    return Interval(rows.start * extent // total, -(-rows.stop * extent // total))


def samples_apart(work: TensorSpec, work_box: Box, spec: TensorSpec) -> Box:
    """The samples of the work, whole along every other dim."""
    box = []
    for dim, extent in zip(spec.dims, spec.shape, strict=True):
        interval = sample_interval(work, work_box, extent) if dim == SAMPLE else None
        box.append(interval or Interval(0, extent))
    return tuple(box)


@empty_work_reads_nothing
def all_apart(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
    """Of every input the samples of the work, whole along every other dim."""
    return tuple(samples_apart(layer.outputs[0], work_box, spec) for spec in inputs)


def broadcast(work: TensorSpec, work_box: Box, spec: TensorSpec) -> Box:
    """The same place in a tensor that is broadcast to the work: dims aligned at the end, extents equal or 1."""
    offset = len(work.shape) - len(spec.shape)
    if offset < 0:
        return samples_apart(work, work_box, spec)
    pairs = zip(work_box[offset:], work.shape[offset:], spec.shape, strict=True)
    return tuple(interval if extent == total else Interval(0, extent) for interval, total, extent in pairs)


def window(outputs: Interval, kernel: int, stride: int, padding: int, dilation: int) -> Interval:
    """What a sliding window reads to make ``outputs``; starts below 0 or ends outside where it reads padding.

    outputs o0 ... o1 - 1:  [o0 stride - padding, (o1 - 1) stride - padding + dilation (kernel - 1) + 1)
    """
    start = outputs.start * stride - padding
    return Interval(start, (outputs.stop - 1) * stride - padding + dilation * (kernel - 1) + 1)


def group_inputs(outputs: Interval, num_outputs: int, num_inputs: int, groups: int) -> Interval:
    """The channels that a grouped convolution reads to make the channels ``outputs``."""
    outputs_each = num_outputs // groups
    inputs_each = num_inputs // groups
    return Interval(outputs.start // outputs_each * inputs_each, -(-outputs.stop // outputs_each) * inputs_each)


def windows(layer: Layer) -> list[tuple[int, ...]]:
    """(kernel, stride, padding, dilation) of each dim of space of a convolution or pool."""
    names = ("kernel", "stride", "padding", "dilation")
    return list(zip(*(integers(layer.attributes.get(name)) for name in names), strict=True))


def convolved(layer: Layer, inputs: Specs, work_box: Box, read: Callable[..., Interval]) -> Boxes:
    """What a convolution reads: the channels of the groups, and along each dim of space what ``read`` says.

    Args:
        read: (outputs, kernel, stride, padding, dilation) -> inputs.  A weight that is an input is read whole.
    """
    data = inputs[0]
    output = layer.outputs[0]
    numbers = windows(layer)
    space = len(data.shape) - len(numbers)
    channel = space - 1
    groups = integer(layer.attributes.get("groups", 1))
    box = (
        *work_box[:channel],
        group_inputs(work_box[channel], output.shape[channel], data.shape[channel], groups),
        *(read(interval, *each) for interval, each in zip(work_box[space:], numbers, strict=True)),
    )
    return box, *(samples_apart(output, work_box, spec) for spec in inputs[1:])
