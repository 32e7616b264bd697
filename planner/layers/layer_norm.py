"""Normalisation inside a sample (layer, group, instance, RMS): attribute ``dims``, those that statistics are over.

Of a group normalisation dim 1 is among them, and attribute ``groups`` says into how many parts it is divided.
``by_channel`` says that there is a weight and a bias for each channel (group, instance) and not for each place.
"""

from __future__ import annotations

from planner.ir.box import Box, Interval
from planner.ir.graph import Layer
from planner.layers._rules import (
    Boxes,
    Specs,
    empty_work_reads_nothing,
    first_output,
    group_inputs,
    integer,
    integers,
    num_elements,
    samples_apart,
    whole_weights,
)

REDUCTION = ""
work = first_output

_CHANNEL = 1


@empty_work_reads_nothing
def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
    """Whole along the normalised dims (of channels their groups), the same place along others."""
    normalised = integers(layer.attributes.get("dims"))
    groups = integer(layer.attributes.get("groups", 1))
    box = []
    for dim, (interval, extent) in enumerate(zip(work_box, inputs[0].shape, strict=True)):
        if dim not in normalised:
            box.append(interval)
        elif dim == _CHANNEL and groups > 1:
            box.append(group_inputs(interval, extent, extent, groups))
        else:
            box.append(Interval(0, extent))
    return tuple(box), *(samples_apart(layer.outputs[0], work_box, spec) for spec in inputs[1:])


def weight_boxes(layer: Layer, parameters: Specs, work_box: Box) -> Boxes:
    """The channels of the work where there is a parameter for each; else all of them."""
    if not layer.attributes.get("by_channel"):
        return whole_weights(layer, parameters, work_box)
    return tuple((work_box[_CHANNEL],) for _ in parameters)


def forward_flops(layer: Layer, inputs: Specs) -> int:
    """Sum, square, sum of squares; subtract, scale, multiply, add: 7 an element."""
    return 7 * num_elements(layer.outputs[0])
