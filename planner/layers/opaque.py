"""An operator without a rule of its own (attribute ``op`` names it): samples and sites are apart, else it reads all.

The capture tries whether they are; where not, the layer is marked (``mixes_samples``).
"""

from __future__ import annotations

from planner.ir.box import Box
from planner.ir.graph import Layer
from planner.layers._rules import (
    Boxes,
    Specs,
    all_apart,
    first_output,
    num_elements,
    whole_weights,
)
from planner.layers._sites import own_rows

REDUCTION = ""
work = first_output
weight_boxes = whole_weights


def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
    """The samples of the work, and the rank's own sites."""
    boxes = all_apart(layer, inputs, work_box)
    return tuple(
        own_rows(layer.outputs[0], work_box, spec) if spec.has_sites else box
        for spec, box in zip(inputs, boxes, strict=True)
    )


def forward_flops(layer: Layer, inputs: Specs) -> int:
    """One an output element: a guess."""
    return sum(num_elements(spec) for spec in layer.outputs)
