"""Transposed convolution in 1 to 3 dims: the adjoint of a convolution.

``[sample, channel, *space]``; attributes as for ``conv``, and ``output_padding``.  Weight
``[channel, filter / groups, *kernel]``, bias ``[filter]``.  Output o is made of the inputs i with
o = i stride - padding + dilation t for a tap t of the kernel.

    kernel 3, stride 2, padding 1:      output [2, 4)  reads  input [1, 3)
"""

from __future__ import annotations

from math import prod

from planner.ir.box import Box, Interval, whole
from planner.ir.graph import Layer
from planner.layers._rules import (
    NOTHING,
    Boxes,
    Specs,
    convolved,
    empty_work_reads_nothing,
    first_output,
    integer,
    integers,
    num_elements,
)

REDUCTION = ""
CONVOLUTION = True
work = first_output


@empty_work_reads_nothing
def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
    """The inputs that reach the outputs, per dim of space; the channels of the groups."""
    return convolved(layer, inputs, work_box, _reaching)


def weight_boxes(layer: Layer, parameters: Specs, work_box: Box) -> Boxes:
    """The filters of the output channels.

    With groups a box cannot say which: filters lie along dim 1 within a group and groups along dim 0, so that parts
    which cut a group would overlap; hence all.  So it is with the bias beside a weight that is an input.
    """
    channel = len(layer.outputs[0].shape) - len(integers(layer.attributes.get("kernel"))) - 1
    if integer(layer.attributes.get("groups", 1)) > 1 or len(layer.inputs) > 1:
        return tuple(whole(spec.shape) for spec in parameters)
    filters = work_box[channel]
    return tuple(
        (filters,) if len(spec.shape) == 1 else (Interval(0, spec.shape[0]), filters, *whole(spec.shape[2:]))
        for spec in parameters
    )


def forward_flops(layer: Layer, inputs: Specs) -> int:
    """A multiply and an add per input element, kernel tap and filter of its group."""
    kernel = integers(layer.attributes.get("kernel"))
    output = layer.outputs[0]
    filters = output.shape[len(output.shape) - len(kernel) - 1] // integer(layer.attributes.get("groups", 1))
    return 2 * num_elements(inputs[0]) * filters * prod(kernel)


def _reaching(outputs: Interval, kernel: int, stride: int, padding: int, dilation: int) -> Interval:
    start = -(-(outputs.start + padding - dilation * (kernel - 1)) // stride)
    stop = (outputs.stop - 1 + padding) // stride + 1

    def reaches(index: int) -> bool:
        first = index * stride - padding
        tap = max(0, -((first - outputs.start) // dilation))  # the first at or after the start
        return tap < kernel and first + dilation * tap < outputs.stop

    while start < stop and not reaches(start):
        start += 1
    while start < stop and not reaches(stop - 1):
        stop -= 1
    return Interval(start, stop) if start < stop else NOTHING
