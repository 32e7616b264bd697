"""Embedding: indices ``[...]`` -> rows ``[..., feature]`` of a table ``[entry, feature]``."""

from __future__ import annotations

from planner.ir.box import Box, Interval
from planner.ir.graph import Layer
from planner.layers._rules import Boxes, Specs, empty_work_reads_nothing, first_output, no_flops

REDUCTION = ""
work = first_output
forward_flops = no_flops


@empty_work_reads_nothing
def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
    """The indices of the same place."""
    return (work_box[:-1],)


def weight_boxes(layer: Layer, parameters: Specs, work_box: Box) -> Boxes:
    """Any entry may be asked for; of it, the features of the work."""
    return tuple((Interval(0, spec.shape[0]), work_box[-1]) for spec in parameters)
