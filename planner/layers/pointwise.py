"""Elementwise operations: activations, sums, products, dropout, and what is broadcast in them."""

from __future__ import annotations

from planner.ir.box import Box, whole
from planner.ir.graph import SAMPLE, Layer, is_sites
from planner.layers._rules import Boxes, Specs, broadcast, empty_work_reads_nothing, first_output, num_elements

REDUCTION = ""
work = first_output


@empty_work_reads_nothing
def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
    """The same place in every input; whole along dims where the input has extent 1."""
    return tuple(broadcast(layer.outputs[0], work_box, spec) for spec in inputs)


def weight_boxes(layer: Layer, parameters: Specs, work_box: Box) -> Boxes:
    """A parameter is broadcast like an input, but for PReLU's, which is one number or lies along the channels."""
    output = layer.outputs[0]
    if "prelu" in str(layer.attributes.get("op", "")):
        return tuple(whole(spec.shape) if spec.shape in ((), (1,)) else (work_box[1],) for spec in parameters)
    places = tuple(broadcast(output, work_box, spec) for spec in parameters)
    return tuple(
        tuple(
            total if dim == SAMPLE or is_sites(dim) else interval
            for dim, interval, total in zip(output.dims[-len(box) :], box, whole(spec.shape), strict=True)
        )
        if 0 < len(box) <= len(output.dims)
        else whole(spec.shape)
        for box, spec in zip(places, parameters, strict=True)
    )


def forward_flops(layer: Layer, inputs: Specs) -> int:
    """One an element, whatever the function."""
    return num_elements(layer.outputs[0])
