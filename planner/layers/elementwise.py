"""What reads each place for itself: elementwise operations, the loss, and operators that nobody described."""

from __future__ import annotations

from planner.ir.box import Box, Boxes, Interval, whole
from planner.ir.graph import SAMPLE, Layer, TensorSpec, is_sites
from planner.layers._kinds import Kind
from planner.layers._rules import (
    Specs,
    all_apart,
    broadcast,
    empty_work_reads_nothing,
    num_elements,
    samples_apart,
)
from planner.layers.sparse import own_rows


class PointwiseKind(Kind, name="pointwise", dims="input"):
    """Elementwise operations: activations, sums, products, dropout, and what is broadcast in them."""

    @staticmethod
    @empty_work_reads_nothing
    def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
        """The same place in every input; whole along dims where the input has extent 1."""
        return tuple(broadcast(layer.outputs[0], work_box, spec) for spec in inputs)

    @staticmethod
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

    @staticmethod
    def forward_flops(layer: Layer, inputs: Specs) -> int:
        """One an element, whatever the function."""
        return num_elements(layer.outputs[0])


ELEMENTS = "elements"
PLACES = "places"

CLASS = 1
"""The dim of a prediction that holds the classes."""


class LossKind(Kind, name="loss", dims="sequence"):
    """The loss: a mean over samples of what its first input (the prediction) and the targets say.

    Its output is one number, so what is divided is the prediction.  Parts are partial sums, weighted by their share.
    Attribute ``terms`` says what the mean is over; without it samples alone are apart:

        elements   every element of the prediction, with what is broadcast to it (squares, absolute values)
        places     every sample and place ``[sample, class, *space]`` with all its classes (cross-entropy, also where
                   classes weigh differently or are ignored); targets are classes ``[sample, *space]`` or
                   probabilities of the prediction's shape

    Classes are apart too in a cross-entropy of class numbers: ranks that have classes of a place tell each other its
    maximum, its sum of exponentials and the target's logit (Shoeybi et al. 2019, "Megatron-LM", section 3).
    """

    REDUCTION = "sum"

    @staticmethod
    def work(layer: Layer, inputs: Specs) -> TensorSpec:
        """The prediction."""
        return inputs[0]

    @staticmethod
    @empty_work_reads_nothing
    def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
        """Prediction and targets of the same terms."""
        prediction = inputs[0]
        terms = layer.attributes.get("terms")
        if terms == ELEMENTS:
            return tuple(broadcast(prediction, work_box, spec) for spec in inputs)
        if terms == PLACES and len(prediction.shape) > CLASS:
            classes = work_box[CLASS] if has_classes_apart(layer, inputs) else Interval(0, prediction.shape[CLASS])
            read = (*work_box[:CLASS], classes, *work_box[CLASS + 1 :])
            return read, *(_targets(prediction, read, spec) for spec in inputs[1:])
        return tuple(samples_apart(prediction, work_box, spec) for spec in inputs)

    @staticmethod
    def forward_flops(layer: Layer, inputs: Specs) -> int:
        """Five an element of the prediction, as for a softmax."""
        return 5 * num_elements(inputs[0])


def has_classes_apart(layer: Layer, inputs: Specs) -> bool:
    """Whether a loss can be computed of parts of the classes: a cross-entropy of logits and numbers of classes."""
    op = str(layer.attributes.get("op", ""))
    shape = inputs[0].shape
    of_numbers = len(inputs) == 2 and not inputs[1].is_float and inputs[1].shape == (*shape[:CLASS], *shape[2:])
    return "cross_entropy_loss" in op and layer.attributes.get("terms") == PLACES and of_numbers and len(shape) > CLASS


def _targets(prediction: TensorSpec, box: Box, spec: TensorSpec) -> Box:
    shape = prediction.shape
    if spec.shape == shape:
        return box
    if spec.shape == (*shape[:CLASS], *shape[CLASS + 1 :]):
        return (*box[:CLASS], *box[CLASS + 1 :])
    return samples_apart(prediction, box, spec)


class OpaqueKind(Kind, name="opaque", dims="input"):
    """An operator without a rule of its own (attribute ``op`` names it): samples and sites are apart, else all is read.

    The capture tries whether they are; where not, the layer is marked (``mixes_samples``).
    """

    @staticmethod
    def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
        """The samples of the work, and the rank's own sites: messages of a sampled graph come from its own rows."""
        boxes = all_apart(layer, inputs, work_box)
        work = layer.outputs[0]
        goes_with = work.has_sites and SAMPLE not in work.dims
        return tuple(
            own_rows(work, work_box, spec, with_samples=goes_with) if spec.has_sites or goes_with else box
            for spec, box in zip(inputs, boxes, strict=True)
        )

    @staticmethod
    def forward_flops(layer: Layer, inputs: Specs) -> int:
        """One an output element: a guess."""
        return sum(num_elements(spec) for spec in layer.outputs)
