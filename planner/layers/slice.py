"""Parts of a tensor along ``dim``: slices, one element, and division into several parts.

Attributes ``dim``, ``starts`` (where each output begins), ``step``, and ``drops``: whether the outputs lack the dim.

    starts 3, step 2:      output [1, 3)  reads  input [5, 8)
"""

from __future__ import annotations

from planner.ir.box import Box, Interval
from planner.ir.graph import Layer
from planner.layers._rules import (
    Boxes,
    Specs,
    empty_work_reads_nothing,
    first_output,
    integer,
    integers,
    no_flops,
    whole_weights,
)

REDUCTION = ""
work = first_output
weight_boxes = whole_weights
forward_flops = no_flops


@empty_work_reads_nothing
def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
    """The same place along other dims; along ``dim`` what the part is cut from, of several parts that of all.

    (The work is the first part.  Parts may differ in length, so that its box does not tell those of the others.)
    """
    dim, step = integer(layer.attributes.get("dim")), integer(layer.attributes.get("step", 1))
    starts = integers(layer.attributes.get("starts"))
    if layer.attributes.get("drops"):
        return ((*work_box[:dim], Interval(min(starts), max(starts) + 1), *work_box[dim:]),)
    if len(starts) > 1:
        stop = max(start + spec.shape[dim] for start, spec in zip(starts, layer.outputs, strict=True))
        along = Interval(min(starts), stop)
    else:
        o = work_box[dim]
        along = Interval(starts[0] + o.start * step, starts[0] + (o.stop - 1) * step + 1)
    return ((*work_box[:dim], along, *work_box[dim + 1 :]),)
