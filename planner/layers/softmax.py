"""Softmax and its logarithm along ``dim``."""

from __future__ import annotations

from planner.ir.box import Box, Interval
from planner.ir.graph import Layer
from planner.layers._rules import (
    Boxes,
    Specs,
    empty_work_reads_nothing,
    first_output,
    integer,
    num_elements,
    whole_weights,
)

REDUCTION = ""
work = first_output
weight_boxes = whole_weights


@empty_work_reads_nothing
def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
    """Whole along ``dim``, the same place along others."""
    dim = integer(layer.attributes.get("dim"))
    return ((*work_box[:dim], Interval(0, inputs[0].shape[dim]), *work_box[dim + 1 :]),)


def forward_flops(layer: Layer, inputs: Specs) -> int:
    """Maximum, subtract, exponential, sum, divide: 5 an element."""
    return 5 * num_elements(layer.outputs[0])
