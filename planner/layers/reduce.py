"""Reductions inside a sample (mean, sum, maximum, norm) over attribute ``dims``, of extent 1 then if it ``keeps`` them.

[sample, channel, height, width] -> [sample, 1, height, width]      dims (1,), keeps
"""

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
    whole_weights,
)

REDUCTION = ""
work = first_output
weight_boxes = whole_weights


@empty_work_reads_nothing
def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
    """Whole along the reduced dims, the same place along others."""
    reduced, keeps = integers(layer.attributes.get("dims")), bool(layer.attributes.get("keeps"))
    places = iter(work_box)
    box = []
    for dim, extent in enumerate(inputs[0].shape):
        if dim not in reduced:
            box.append(next(places))
            continue
        box.append(Interval(0, extent))
        if keeps:
            next(places)
    return (tuple(box),)


def forward_flops(layer: Layer, inputs: Specs) -> int:
    """One an input element, whatever the function."""
    return num_elements(inputs[0])
