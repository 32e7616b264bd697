"""Max and average pooling in 1 to 3 dims: a window that moves, channel by channel.

``[sample, channel, *space]``; attributes ``kernel``, ``stride``, ``padding``, ``dilation`` (a number per dim
of space) and ``ceil_mode``, under which the last window may end outside the tensor.

    kernel 2, stride 2:      output [2, 4)  reads  input [4, 8)
"""

from __future__ import annotations

from math import prod

from planner.ir.box import Box
from planner.ir.graph import Layer
from planner.layers._rules import (
    Boxes,
    Specs,
    empty_work_reads_nothing,
    first_output,
    integers,
    num_elements,
    whole_weights,
    window,
)

REDUCTION = ""
work = first_output
weight_boxes = whole_weights


@empty_work_reads_nothing
def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
    """A window per dim of space."""
    names = ("kernel", "stride", "padding", "dilation")
    windows = list(zip(*(integers(layer.attributes.get(name)) for name in names), strict=True))
    space = len(inputs[0].shape) - len(windows)
    moved = (window(interval, *numbers) for interval, numbers in zip(work_box[space:], windows, strict=True))
    return ((*work_box[:space], *moved),)


def forward_flops(layer: Layer, inputs: Specs) -> int:
    """A comparison or an addition per output element and window element."""
    return num_elements(layer.outputs[0]) * prod(integers(layer.attributes.get("kernel")))
