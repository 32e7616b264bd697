"""Normalisation inside a sample (layer, group, instance, RMS): attribute ``dims``, those that statistics are over."""

from __future__ import annotations

from planner.ir.box import Box, Interval
from planner.ir.graph import Layer
from planner.layers._rules import (
    Boxes,
    Specs,
    empty_work_reads_nothing,
    first_output,
    integers,
    num_elements,
    samples_apart,
    whole_weights,
)

REDUCTION = ""
work = first_output
weight_boxes = whole_weights


@empty_work_reads_nothing
def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
    """Whole along the normalised dims, the same place along others."""
    normalised = integers(layer.attributes.get("dims"))
    data = inputs[0]
    box = tuple(
        Interval(0, extent) if dim in normalised else interval
        for dim, (interval, extent) in enumerate(zip(work_box, data.shape, strict=True))
    )
    return box, *(samples_apart(layer.outputs[0], work_box, spec) for spec in inputs[1:])


def forward_flops(layer: Layer, inputs: Specs) -> int:
    """Sum, square, sum of squares; subtract, scale, multiply, add: 7 an element."""
    return 7 * num_elements(layer.outputs[0])
