"""What is normalised or reduced over some dims: normalisations, softmax, sums and means."""

from __future__ import annotations

from planner.ir.box import Box, Boxes, Interval
from planner.ir.graph import SAMPLE, Layer, is_sites
from planner.layers._kinds import Kind
from planner.layers._rules import (
    Specs,
    broadcast,
    empty_work_reads_nothing,
    group_inputs,
    integer,
    integers,
    num_elements,
    samples_apart,
    whole_weights,
)


class BatchNormKind(Kind, name="batch_norm", dims="space"):
    """Batch normalisation: elementwise, once the statistics of every channel are known.

    The statistics are over all samples and all of space, or all sites; where these are divided, counts, sums and sums
    of squares are combined over the ranks, which boxes do not say: ``REDUCTION`` does.  Weight and bias ``[channel]``.
    """

    REDUCTION = "statistics"

    @staticmethod
    @empty_work_reads_nothing
    def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
        """The same place."""
        return tuple(broadcast(layer.outputs[0], work_box, spec) for spec in inputs)

    @staticmethod
    def weight_boxes(layer: Layer, parameters: Specs, work_box: Box) -> Boxes:
        """The channels of the work."""
        dims = layer.outputs[0].dims
        if "channel" in dims:
            channel = dims.index("channel")
        else:
            channel = 1 + next((at for at, dim in enumerate(dims) if dim == SAMPLE or is_sites(dim)), 0)
        return tuple((work_box[channel],) for _ in parameters)

    @staticmethod
    def forward_flops(layer: Layer, inputs: Specs) -> int:
        """Sum, square, sum of squares; subtract, scale, multiply, add: 7 an element."""
        return 7 * num_elements(layer.outputs[0])


_CHANNEL = 1


class LayerNormKind(Kind, name="layer_norm", dims="input"):
    """Normalisation inside a sample (layer, group, instance, RMS): attribute ``dims``, those that statistics are over.

    Of a group normalisation dim 1 is among them, and attribute ``groups`` says into how many parts it is divided.
    ``by_channel`` says that there is a weight and a bias for each channel (group, instance) and not for each place.
    """

    @staticmethod
    @empty_work_reads_nothing
    def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
        """Whole along the normalised dims (of channels their groups), the same place along others."""
        normalised = integers(layer.attributes.get("dims"))
        groups = integer(layer.attributes.get("groups", 1))
        box = []
        for dim, (interval, extent) in enumerate(zip(work_box, inputs[0].shape, strict=True)):
            if dim not in normalised:
                box.append(interval)
            elif dim == _CHANNEL and groups > 1:
                box.append(group_inputs(interval, extent, extent, groups))
            else:
                box.append(Interval(0, extent))
        return tuple(box), *(samples_apart(layer.outputs[0], work_box, spec) for spec in inputs[1:])

    @staticmethod
    def weight_boxes(layer: Layer, parameters: Specs, work_box: Box) -> Boxes:
        """The channels of the work where there is a parameter for each; else all of them."""
        if not layer.attributes.get("by_channel"):
            return whole_weights(layer, parameters, work_box)
        return tuple((work_box[_CHANNEL],) for _ in parameters)

    @staticmethod
    def forward_flops(layer: Layer, inputs: Specs) -> int:
        """Sum, square, sum of squares; subtract, scale, multiply, add: 7 an element."""
        return 7 * num_elements(layer.outputs[0])


class SoftmaxKind(Kind, name="softmax", dims="input"):
    """Softmax and its logarithm along ``dim``."""

    @staticmethod
    @empty_work_reads_nothing
    def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
        """Whole along ``dim``, the same place along others."""
        dim = integer(layer.attributes.get("dim"))
        return ((*work_box[:dim], Interval(0, inputs[0].shape[dim]), *work_box[dim + 1 :]),)

    @staticmethod
    def forward_flops(layer: Layer, inputs: Specs) -> int:
        """Maximum, subtract, exponential, sum, divide: 5 an element."""
        return 5 * num_elements(layer.outputs[0])


class ReduceKind(Kind, name="reduce", dims="input"):
    """Reductions inside a sample (mean, sum, maximum, norm) over ``dims``, of extent 1 then if it ``keeps`` them.

    [sample, channel, height, width] -> [sample, 1, height, width]      dims (1,), keeps
    """

    @staticmethod
    @empty_work_reads_nothing
    def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
        """Whole along the reduced dims, the same place along others."""
        reduced = integers(layer.attributes.get("dims"))
        keeps = bool(layer.attributes.get("keeps"))
        places = iter(work_box)
        box = []
        for dim, extent in enumerate(inputs[0].shape):
            if dim not in reduced:
                box.append(next(places))
                continue
            box.append(Interval(0, extent))
            if keeps:
                next(places)
        return (tuple(box),)

    @staticmethod
    def forward_flops(layer: Layer, inputs: Specs) -> int:
        """One an input element, whatever the function."""
        return num_elements(inputs[0])
