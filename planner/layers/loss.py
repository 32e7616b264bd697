"""The loss: a mean over samples of what its first input (the prediction) and the targets say.

Its output is one number, so what is divided is the prediction.  Parts are partial sums, weighted by their share.
Attribute ``terms`` says what the mean is over; without it samples alone are apart:

    elements   every element of the prediction, with what is broadcast to it (squares, absolute values)
    places     every sample and place ``[sample, class, *space]`` with all its classes (cross-entropy, also where
               classes weigh differently or are ignored); targets are classes ``[sample, *space]`` or probabilities of
               the prediction's shape
"""

from __future__ import annotations

from planner.ir.box import Box, Interval
from planner.ir.graph import Layer, TensorSpec
from planner.layers._rules import (
    Boxes,
    Specs,
    broadcast,
    empty_work_reads_nothing,
    num_elements,
    samples_apart,
    whole_weights,
)

REDUCTION = "sum"
ELEMENTS, PLACES = "elements", "places"

weight_boxes = whole_weights

_CLASS = 1


def work(layer: Layer, inputs: Specs) -> TensorSpec:
    """The prediction."""
    return inputs[0]


@empty_work_reads_nothing
def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
    """Prediction and targets of the same terms."""
    prediction, terms = inputs[0], layer.attributes.get("terms")
    if terms == ELEMENTS:
        return tuple(broadcast(prediction, work_box, spec) for spec in inputs)
    if terms == PLACES and len(prediction.shape) > _CLASS:
        classes = Interval(0, prediction.shape[_CLASS])
        everything = (*work_box[:_CLASS], classes, *work_box[_CLASS + 1 :])
        return everything, *(_targets(prediction, everything, spec) for spec in inputs[1:])
    return tuple(samples_apart(prediction, work_box, spec) for spec in inputs)


def forward_flops(layer: Layer, inputs: Specs) -> int:
    """Five an element of the prediction, as for a softmax."""
    return 5 * num_elements(inputs[0])


def _targets(prediction: TensorSpec, box: Box, spec: TensorSpec) -> Box:
    shape = prediction.shape
    if spec.shape == shape:
        return box
    if spec.shape == (*shape[:_CLASS], *shape[_CLASS + 1 :]):
        return (*box[:_CLASS], *box[_CLASS + 1 :])
    return samples_apart(prediction, box, spec)
