"""The loss: a mean over samples of what its first input (the prediction) and the targets say.

Its output is one number, so what is divided is the prediction.  Parts are partial sums, weighted by their samples.
"""

from __future__ import annotations

from planner.ir.box import Box
from planner.ir.graph import Layer, TensorSpec
from planner.layers._rules import Boxes, Specs, empty_work_reads_nothing, num_elements, samples_apart, whole_weights

REDUCTION = "sum"
weight_boxes = whole_weights


def work(layer: Layer, inputs: Specs) -> TensorSpec:
    """The prediction."""
    return inputs[0]


@empty_work_reads_nothing
def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
    """Prediction and targets of the same samples, whole along other dims."""
    return tuple(samples_apart(inputs[0], work_box, spec) for spec in inputs)


def forward_flops(layer: Layer, inputs: Specs) -> int:
    """Five an element of the prediction, as for a softmax."""
    return 5 * num_elements(inputs[0])
