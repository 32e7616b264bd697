"""The mean over all of space: ``[sample, channel, *space]`` -> ``[sample, channel]``, or with dims of extent 1.

What is divided is the input.  Parts are partial sums, and the result is whole along space on every rank.
"""

from __future__ import annotations

from planner.ir.box import Box
from planner.ir.graph import Layer, TensorSpec
from planner.layers._rules import Boxes, Specs, empty_work_reads_nothing, num_elements, whole_weights

REDUCTION = "sum"
weight_boxes = whole_weights


def work(layer: Layer, inputs: Specs) -> TensorSpec:
    """What is summed."""
    return inputs[0]


@empty_work_reads_nothing
def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
    """The same place."""
    return (work_box,)


def forward_flops(layer: Layer, inputs: Specs) -> int:
    """An addition per input element."""
    return num_elements(inputs[0])
