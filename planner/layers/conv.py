"""Convolution in 1 to 3 dims: any stride, padding, dilation and number of groups.

``[sample, channel, *space]``; attributes ``kernel``, ``stride``, ``padding``, ``dilation`` (a number per dim
of space) and ``groups``.  Weight ``[filter, channel / groups, *kernel]``, bias ``[filter]``.

    kernel 3, stride 2, padding 1:      output [2, 4)  reads  input [3, 8)
"""

from __future__ import annotations

from math import prod

from planner.ir.box import Box, whole
from planner.ir.graph import Layer
from planner.layers._rules import (
    Boxes,
    Specs,
    convolved,
    empty_work_reads_nothing,
    first_output,
    integer,
    integers,
    num_elements,
    whole_weights,
    window,
)

REDUCTION = ""
CONVOLUTION = True
work = first_output


@empty_work_reads_nothing
def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
    """A window per dim of space, the channels of the groups; a weight that is an input is read whole."""
    return convolved(layer, inputs, work_box, window)


def weight_boxes(layer: Layer, parameters: Specs, work_box: Box) -> Boxes:
    """The filters of the output channels; beside a weight that is an input all of the bias."""
    if len(layer.inputs) > 1:
        return whole_weights(layer, parameters, work_box)
    channel = len(layer.outputs[0].shape) - len(integers(layer.attributes.get("kernel"))) - 1
    return tuple((work_box[channel], *whole(spec.shape[1:])) for spec in parameters)


def forward_flops(layer: Layer, inputs: Specs) -> int:
    """A multiply and an add per output element, kernel tap and channel of its group."""
    kernel = integers(layer.attributes.get("kernel"))
    channels = inputs[0].shape[len(inputs[0].shape) - len(kernel) - 1] // integer(layer.attributes.get("groups", 1))
    return 2 * num_elements(layer.outputs[0]) * channels * prod(kernel)
