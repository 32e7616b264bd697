"""Adaptive pooling: output o of n averages (or takes the maximum of) inputs floor(o i / n) ... ceil((o + 1) i / n) - 1.

Dims that are not pooled have as many outputs as inputs, for which the same rule says o.
"""

from __future__ import annotations

from planner.ir.box import Box, Interval
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
    """The bins of the outputs."""
    data, output = inputs[0], layer.outputs[0]
    if len(data.shape) != len(output.shape):
        return (samples_apart(output, work_box, data),)
    numbers = zip(work_box, data.shape, output.shape, strict=True)
    return (tuple(Interval(o.start * i // n, -(-o.stop * i // n)) for o, i, n in numbers),)


def forward_flops(layer: Layer, inputs: Specs) -> int:
    """An addition or a comparison per input element (bins that overlap are counted once)."""
    return num_elements(inputs[0])
