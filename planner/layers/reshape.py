"""Views, flattening, permutations, expansion: dims that are left alone stay apart, all else is read whole.

Attribute ``kept`` says, for each dim of the output, which dim of the input it is, and -1 where it is none of them.
Without it the samples alone are known to stay apart.

    [sample, channel, height, width] -> [sample, height, width, channel]      kept (0, 2, 3, 1)
    [sample, channel, height, width] -> [sample, channel, height x width]     kept (0, 1, -1)
"""

from __future__ import annotations

from planner.ir.box import Box
from planner.ir.graph import Layer
from planner.layers._rules import (
    Boxes,
    Specs,
    all_apart,
    empty_work_reads_nothing,
    first_output,
    integers,
    no_flops,
    samples_apart,
    whole_weights,
)

REDUCTION = ""
work = first_output
weight_boxes = whole_weights
forward_flops = no_flops


@empty_work_reads_nothing
def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
    """The same place along dims that are kept; of the rest the samples of the work."""
    if "kept" not in layer.attributes:
        return all_apart(layer, inputs, work_box)
    box = list(samples_apart(layer.outputs[0], work_box, inputs[0]))
    for interval, dim in zip(work_box, integers(layer.attributes["kept"]), strict=True):
        if dim >= 0:
            box[dim] = interval
    return (tuple(box),)
