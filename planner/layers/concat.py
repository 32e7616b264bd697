"""Concatenation along ``dim`` (and stacking, where ``dim`` is new): each input has its own place in the output."""

from __future__ import annotations

from planner.ir.box import Box, Interval, whole
from planner.ir.graph import Layer, TensorSpec
from planner.layers._rules import (
    NOTHING,
    Boxes,
    Specs,
    empty_work_reads_nothing,
    first_output,
    integer,
    no_flops,
    whole_weights,
)

REDUCTION = ""
work = first_output
weight_boxes = whole_weights
forward_flops = no_flops


@empty_work_reads_nothing
def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
    """What of each input's place lies in the work box; nothing of inputs beside it."""
    dim = integer(layer.attributes.get("dim"))
    boxes, offset = [], 0
    for spec in inputs:
        stacked = len(spec.shape) < len(layer.outputs[0].shape)
        extent = 1 if stacked else spec.shape[dim]
        boxes.append(_piece(spec, work_box, dim, Interval(offset, offset + extent), stacked))
        offset += extent
    return tuple(boxes)


def _piece(spec: TensorSpec, work_box: Box, dim: int, place: Interval, stacked: bool) -> Box:
    shared = work_box[dim] & place
    if not len(shared) and whole(spec.shape):
        return tuple(NOTHING for _ in spec.shape)
    along = () if stacked else (Interval(shared.start - place.start, shared.stop - place.start),)
    return (*work_box[:dim], *along, *work_box[dim + 1 :])
