"""An operator without a rule of its own (attribute ``op`` names it): samples are apart, all else is read whole."""

from __future__ import annotations

from planner.ir.box import Box
from planner.ir.graph import Layer
from planner.layers._rules import (
    Boxes,
    Specs,
    empty_work_reads_nothing,
    first_output,
    num_elements,
    samples_apart,
    whole_weights,
)

REDUCTION = ""
work = first_output
weight_boxes = whole_weights


@empty_work_reads_nothing
def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
    """The samples of the work."""
    return tuple(samples_apart(layer.outputs[0], work_box, spec) for spec in inputs)


def forward_flops(layer: Layer, inputs: Specs) -> int:
    """One an output element: a guess."""
    return sum(num_elements(spec) for spec in layer.outputs)
