"""Convolutions, and pools: a window that moves over space."""

from __future__ import annotations

from math import prod

from planner.ir.box import Box, Boxes, Interval, whole
from planner.ir.graph import Layer, TensorSpec
from planner.layers._kinds import Kind
from planner.layers._rules import (
    NOTHING,
    Specs,
    convolved,
    empty_work_reads_nothing,
    integer,
    integers,
    num_elements,
    samples_apart,
    whole_weights,
    window,
    windows,
)


class ConvKind(Kind, name="conv", dims="space"):
    """Convolution in 1 to 3 dims: any stride, padding, dilation and number of groups.

    ``[sample, channel, *space]``; attributes ``kernel``, ``stride``, ``padding``, ``dilation`` (a number per dim
    of space) and ``groups``.  Weight ``[filter, channel / groups, *kernel]``, bias ``[filter]``.

        kernel 3, stride 2, padding 1:      output [2, 4)  reads  input [3, 8)
    """

    CONVOLUTION = True

    @staticmethod
    @empty_work_reads_nothing
    def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
        """A window per dim of space, the channels of the groups; a weight that is an input is read whole."""
        return convolved(layer, inputs, work_box, window)

    @staticmethod
    def weight_boxes(layer: Layer, parameters: Specs, work_box: Box) -> Boxes:
        """The filters of the output channels; beside a weight that is an input all of the bias."""
        if len(layer.inputs) > 1:
            return whole_weights(layer, parameters, work_box)
        channel = len(layer.outputs[0].shape) - len(integers(layer.attributes.get("kernel"))) - 1
        return tuple((work_box[channel], *whole(spec.shape[1:])) for spec in parameters)

    @staticmethod
    def forward_flops(layer: Layer, inputs: Specs) -> int:
        """A multiply and an add per output element, kernel tap and channel of its group."""
        kernel = integers(layer.attributes.get("kernel"))
        channels = inputs[0].shape[len(inputs[0].shape) - len(kernel) - 1] // integer(layer.attributes.get("groups", 1))
        return 2 * num_elements(layer.outputs[0]) * channels * prod(kernel)


class TransposedConvKind(Kind, name="transposed_conv", dims="space"):
    """Transposed convolution in 1 to 3 dims: the adjoint of a convolution.

    ``[sample, channel, *space]``; attributes as for ``conv``, and ``output_padding``.  Weight
    ``[channel, filter / groups, *kernel]``, bias ``[filter]``.  Output o is made of the inputs i with
    o = i stride - padding + dilation t for a tap t of the kernel.

        kernel 3, stride 2, padding 1:      output [2, 4)  reads  input [1, 3)
    """

    CONVOLUTION = True

    @staticmethod
    @empty_work_reads_nothing
    def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
        """The inputs that reach the outputs, per dim of space; the channels of the groups."""
        return convolved(layer, inputs, work_box, _reaching)

    @staticmethod
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

    @staticmethod
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


class PoolKind(Kind, name="pool", dims="space"):
    """Max and average pooling in 1 to 3 dims: a window that moves, channel by channel.

    ``[sample, channel, *space]``; attributes ``kernel``, ``stride``, ``padding``, ``dilation`` (a number per dim
    of space) and ``ceil_mode``, under which the last window may end outside the tensor.

        kernel 2, stride 2:      output [2, 4)  reads  input [4, 8)
    """

    @staticmethod
    @empty_work_reads_nothing
    def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
        """A window per dim of space."""
        numbers = windows(layer)
        space = len(inputs[0].shape) - len(numbers)
        moved = (window(interval, *each) for interval, each in zip(work_box[space:], numbers, strict=True))
        return ((*work_box[:space], *moved),)

    @staticmethod
    def forward_flops(layer: Layer, inputs: Specs) -> int:
        """A comparison or an addition per output element and window element."""
        return num_elements(layer.outputs[0]) * prod(integers(layer.attributes.get("kernel")))


class AdaptivePoolKind(Kind, name="adaptive_pool", dims="space"):
    """Adaptive pooling: output o of n averages (or takes the maximum of) inputs floor(o i/n) ... ceil((o + 1) i/n) - 1.

    Dims that are not pooled have as many outputs as inputs, for which the same rule says o.
    """

    @staticmethod
    @empty_work_reads_nothing
    def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
        """The bins of the outputs."""
        data = inputs[0]
        output = layer.outputs[0]
        if len(data.shape) != len(output.shape):
            return (samples_apart(output, work_box, data),)
        numbers = zip(work_box, data.shape, output.shape, strict=True)
        return (tuple(Interval(o.start * i // n, -(-o.stop * i // n)) for o, i, n in numbers),)

    @staticmethod
    def forward_flops(layer: Layer, inputs: Specs) -> int:
        """An addition or a comparison per input element (bins that overlap are counted once)."""
        return num_elements(inputs[0])


class GlobalPoolKind(Kind, name="global_pool", dims="input"):
    """The mean over all of space: ``[sample, channel, *space]`` -> ``[sample, channel]``, or with dims of extent 1.

    What is divided is the input.  Parts are partial sums, and the result is whole along space on every rank.
    """

    REDUCTION = "sum"

    @staticmethod
    def work(layer: Layer, inputs: Specs) -> TensorSpec:
        """What is summed."""
        return inputs[0]

    @staticmethod
    @empty_work_reads_nothing
    def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
        """The same place."""
        return (work_box,)

    @staticmethod
    def forward_flops(layer: Layer, inputs: Specs) -> int:
        """An addition per input element."""
        return num_elements(inputs[0])
