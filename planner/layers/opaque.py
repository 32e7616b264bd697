"""An operator without a rule of its own (attribute ``op`` names it): samples are apart, all else is read whole."""

from __future__ import annotations

from planner.ir.graph import Layer
from planner.layers._rules import (
    Specs,
    all_apart,
    first_output,
    num_elements,
    whole_weights,
)

REDUCTION = ""
work = first_output
input_boxes = all_apart
weight_boxes = whole_weights


def forward_flops(layer: Layer, inputs: Specs) -> int:
    """One an output element: a guess."""
    return sum(num_elements(spec) for spec in layer.outputs)
