"""Linear map of the last dim: ``[..., in] -> [..., out]``, weight ``[out, in]``, bias ``[out]``."""

from __future__ import annotations

from planner.ir.box import Box, Interval, whole
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


@empty_work_reads_nothing
def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
    """The same rows, all their features; of a factor that is an activation itself, its samples."""
    data, output = inputs[0], layer.outputs[0]
    if len(data.shape) == len(output.shape) and data.shape[:-1] == output.shape[:-1]:
        rows: Box = (*work_box[:-1], Interval(0, data.shape[-1]))
    else:
        rows = samples_apart(output, work_box, data)
    return rows, *(samples_apart(output, work_box, spec) for spec in inputs[1:])


def weight_boxes(layer: Layer, parameters: Specs, work_box: Box) -> Boxes:
    """The rows of the weight that make the output features; beside a weight that is an input all of the bias."""
    if len(layer.inputs) > 1:
        return whole_weights(layer, parameters, work_box)
    features = layer.outputs[0].shape[-1]
    return tuple(
        (work_box[-1], *whole(spec.shape[1:])) if spec.shape[0] == features else whole(spec.shape)
        for spec in parameters
    )


def forward_flops(layer: Layer, inputs: Specs) -> int:
    """A multiply and an add per output element and input feature."""
    return 2 * num_elements(layer.outputs[0]) * inputs[0].shape[-1]
