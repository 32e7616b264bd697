"""Which halo the backward of a convolution over cut space moves: that of dx or that of dy.  Pure integers.

    dx      each rank computes all that its dy gives, also of rows that it does not hold; these are sent to their
            holders and added: the adjoint of the forward exchange
    dy      each rank receives the rows of dy that read what it holds, and computes its part of dx alone

The rows are as many for stride 1, and of dy fewer for larger strides; those of dx have the input's channels, those of
dy the output's.  So dy is cheaper where a convolution has fewer filters than channels (the decoder of a U-Net).  All
ranks of a stage do the same, hence the sum over ranks decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.ir.box import Box, Interval, Transfer, intersect, subtract, transfers, volume, whole
from planner.ir.graph import Layer
from planner.layers._rules import group_inputs, integer, integers, windows
from planner.layers.division import LayerDivision

Boxes = tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class BackwardHalo:
    """What either way moves.

    Attributes:
        dx_elements, dy_elements: over all ranks.
        reached: by rank, the outputs that read what it holds.
        moves: of dy, between positions.
    """

    dx_elements: int
    dy_elements: int
    reached: Boxes
    moves: tuple[Transfer, ...]

    @property
    def is_dy(self) -> bool:
        """Whether that of dy is smaller."""
        return self.dy_elements < self.dx_elements


def backward_halo(layer: LayerDivision, held: Boxes, moves: Sequence[Transfer]) -> BackwardHalo | None:
    """Both ways for a convolution, transposed or not; None where only dx can move.

    That of dy needs the output's rows to be made by one rank each, the input's to be held by one rank each, and every
    rank to have all samples, channels and weights that its rows of dx take.

    Args:
        held: of the first input, by position.
        moves: of the first input, forward.
    """
    if not moves or layer.ways > 1 or layer.done != layer.own or not _are_apart(layer.own) or not _are_apart(held):
        return None
    kernel = integers(layer.layer.attributes.get("kernel"))
    output = layer.layer.outputs[0].shape
    leading = len(output) - len(kernel)
    needed = layer.needed[0]
    if any(not volume(box) for box in (*held, *layer.own)):
        return None
    if any(a[:leading] != b[:leading] for a, b in zip(held, needed, strict=True)):
        return None
    groups, channels = integer(layer.layer.attributes.get("groups", 1)), layer.inputs[0].shape[leading - 1]
    reached = []
    for box, own in zip(held, layer.own, strict=True):
        if group_inputs(box[leading - 1], channels, output[leading - 1], groups) != own[leading - 1]:
            return None  # other ranks' filters read what is held
        inside = intersect((*own[:leading], *_reached(layer.layer, box[leading:])), whole(output))
        if inside is None:
            return None
        reached.append(inside)
    dy_moves = [
        Transfer(move.src, move.dst, part)
        for move in transfers(dict(enumerate(layer.own)), dict(enumerate(reached)))
        if move.src != move.dst
        for part in subtract(move.box, layer.own[move.dst])
    ]
    if any(move.box[:leading] != layer.own[move.dst][:leading] for move in dy_moves):
        return None
    dx, dy = (sum(volume(move.box) for move in those) for those in (moves, dy_moves))
    return BackwardHalo(dx, dy, tuple(reached), tuple(dy_moves))


def _reached(layer: Layer, held: Box) -> Box:
    """Along each dim of space the outputs that read some of what is held; may reach outside the tensor."""
    intervals = []
    for part, (kernel, stride, padding, dilation) in zip(held, windows(layer), strict=True):
        span = dilation * (kernel - 1)
        if layer.kind == "transposed_conv":
            intervals.append(Interval(part.start * stride - padding, (part.stop - 1) * stride - padding + span + 1))
        else:
            intervals.append(
                Interval(-((span - padding - part.start) // stride), (part.stop - 1 + padding) // stride + 1)
            )
    return tuple(intervals)


def _are_apart(boxes: Boxes) -> bool:
    """Whether no two boxes share an element."""
    return all(intersect(box, other) is None for index, box in enumerate(boxes) for other in boxes[:index])
