"""What a layer of a forward pass needs while it runs: of a block, for one tile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from planner.ir.box import Box, inside, intersect, volume, whole
from planner.ir.graph import BYTES_PER_ELEMENT
from planner.layers import is_convolution
from planner.layers.sized import SizedLayer

_OF_LOSS = 3
"""Tensors of a prediction's size that elementwise losses and a logarithm of softmax make on their way."""

_COPIES = ("adaptive_pool", "upsample")
"""Kinds that take a copy of what they read where it is a part of a tensor; convolutions and pools do as well."""

_BLOCK = 16
_INDEX = 8
"""Channels of a block of oneDNN; bytes of a place that a max-pool notes."""

_SMALL = 20480
"""Elements of one sample up to which torch 2.13 does not call oneDNN (``use_mkldnn`` in its Convolution.cpp)."""

_FEWEST_MULTIPLICATIONS = 2**19
"""From which oneDNN is called by its name where torch would not (:mod:`cuda_ops.dense.conv_kernels`)."""


def box_bytes(box: Box, dtype: str) -> int:
    """What a tensor that covers ``box`` takes."""
    return volume(box) * BYTES_PER_ELEMENT[dtype]


def transient_bytes(sized: SizedLayer, read: Sequence[Box], done: Box, there: Sequence[Box]) -> int:
    """What a layer needs in a forward pass on a processor beside what it reads and makes.

    Seen with torch's counting allocator: a convolution or pool copies what it reads where that is a part of a tensor.
    oneDNN makes its output in blocks of 16 channels, and puts the input of more than
    16 into such blocks; of float64, which it has not, and of small inputs (:func:`spreads_windows`), torch spreads out
    every window.  A transposed convolution makes its output three times, a max-pool numbers its outputs.

    Args:
        read: of each input; it may reach outside, where padding is.
        done: of the work.
        there: of each input, what the tensor covers that it is read from.
    """
    kind = sized.layer.kind
    layer = sized.layer
    pairs = zip(read, sized.inputs, strict=True)
    sizes = [box_bytes(inside(box, spec.shape), spec.dtype) for box, spec in pairs if volume(box)]
    if kind == "loss":
        return _OF_LOSS * max(sizes, default=0)
    if not sizes or not volume(done):
        return 0
    output = box_bytes(done, layer.outputs[0].dtype)
    copied = sizes[0] if intersect(read[0], whole(sized.inputs[0].shape)) != there[0] else 0
    if kind == "pool":
        return copied + _INDEX * volume(done)
    if not is_convolution(kind):
        return copied if kind in _COPIES else 0
    if kind == "transposed_conv":
        return copied + 2 * output
    return copied + _convolution_bytes(sized, sizes[0], (read[0], done, there[0]), output)


def _convolution_bytes(sized: SizedLayer, input_bytes: int, boxes: tuple[Box, Box, Box], output_bytes: int) -> int:
    """What a convolution spreads out, or puts into blocks; ``boxes``: what it reads, its work, the tensor it reads."""
    read, done, there = boxes
    layer = sized.layer
    window = _integers(layer.attributes.get("kernel"))
    kernel = prod(window)
    channel = len(done) - len(window) - 1
    channels = sized.inputs[0].shape[channel]
    filters = len(done[channel])
    spread = kernel * channels * (output_bytes // filters) if kernel > 1 else 0
    if layer.outputs[0].dtype == "float64":
        return spread
    if kernel == 1 and channels <= _BLOCK:
        return 0
    made = output_bytes // filters * _blocks(filters)
    blocked_input = input_bytes // channels * _blocks(channels) if channels > _BLOCK else 0
    blocks = max(made, blocked_input + made - output_bytes)
    # Held rows may be convolved on their own, or all that is read, with zeros around it.
    held = intersect(read, there)
    rows = (tuple(map(len, box[-len(window) - 1 :])) for box in (held, read) if box is not None)
    samples = len(read[0]) if channel else 1
    spreads = {spreads_windows((samples, *shape), filters, layer.attributes) for shape in rows}
    return max(spread if is_spread else blocks for is_spread in spreads)


def spreads_windows(shape: Sequence[int], filters: int, attributes: Mapping[str, object]) -> bool:
    """Whether the windows of a convolution in float32 are spread out, on a processor: oneDNN is not called.

    Filters of one element apart, which torch itself multiplies where it has one thread.

    Args:
        shape: of what it is given: samples, channels, and space.
        filters: that it makes.
        attributes: of the layer.
    """
    kernel, stride, dilation = (_integers(attributes.get(name)) for name in ("kernel", "stride", "dilation"))
    groups = attributes.get("groups", 1)
    is_wide = len(kernel) > 1 and min(kernel[-2:]) > 3
    if groups != 1 or shape[0] > 1 or is_wide or prod(shape[:4]) > _SMALL:  # sic: of three dims the last does not count
        return False
    if len(kernel) < 3 and max(dilation, default=1) == 1:
        return True  # what torch has for these is as fast
    return prod(shape) * filters * prod(kernel) // prod(stride) < _FEWEST_MULTIPLICATIONS


def _blocks(channels: int) -> int:
    return -(-channels // _BLOCK) * _BLOCK


def _integers(value: object) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else ()
