"""Which halo the backward of a convolution over cut space moves: that of dx or that of dy.

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

import numpy as np

from planner.ir.box import Boxes, Interval, Transfer, volume
from planner.ir.graph import Layer, TensorSpec
from planner.layers._kinds import is_convolution
from planner.layers._rules import group_inputs, integer, windows
from planner.layers.boxes import Array, BoxArray, are_apart, as_boxes, as_tuples, filled, inside, moved, shared
from planner.layers.division import LayerDivision, moves_between


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

    Args:
        held: of the first input, by position.
        moves: of the first input, forward.
    """
    if not moves or layer.ways > 1:
        return None
    boxes = map(as_boxes, (held, layer.needed[0], layer.done))
    halo = halo_of_dy(layer.layer, layer.inputs[0], *boxes)
    if halo is None:
        return None
    reached = as_tuples(halo[0])
    dx_elements = sum(volume(move.box) for move in moves)
    return BackwardHalo(dx_elements, int(halo[1].sum()), reached, moves_between(layer.done, layer.done, reached))


def halo_of_dy(
    layer: Layer, data: TensorSpec, held: BoxArray, needed: BoxArray, done: BoxArray
) -> tuple[BoxArray, Array] | None:
    """The outputs that read what each rank holds, and ``[source, destination]`` elements of dy that move to have them.

    None where dx must move.  That of dy needs the output's rows to be made by one rank each, the input's to be held by
    one rank each, and every rank to have all samples, channels and weights that its rows of dx take.

    Args:
        held, needed: ``[ranks, dims, 2]`` of the first input, whose spec is ``data``.
        done: of the work.
    """
    if not is_convolution(layer.kind) or not isinstance(layer.attributes.get("kernel"), tuple):
        return None
    output = layer.outputs[0].shape
    space = windows(layer)
    leading = len(output) - len(space)
    if not are_apart(held) or not are_apart(done) or (held[:, :leading] != needed[:, :leading]).any():
        return None
    groups = data.shape[leading - 1], output[leading - 1], integer(layer.attributes.get("groups", 1))
    channels = np.stack([held[:, leading - 1], done[:, leading - 1]], axis=1).tolist()
    if any(group_inputs(Interval(*there), *groups) != Interval(*made) for there, made in channels):
        return None  # other ranks' filters read what is held
    reached = done.copy()
    for dim, window in enumerate(space, start=leading):
        reached[:, dim] = _reading(window, held[:, dim], is_transposed=layer.kind == "transposed_conv")
    reached = inside(reached, output)
    own = done[None]
    counts = moved(own, own, reached[None])[0, 0]
    src, dst = np.nonzero(counts)
    lacks = shared(done[src, :leading], reached[dst, :leading]) != done[dst, :leading]
    return None if lacks.any() or not filled(reached).all() else (reached, counts)


def _reading(window: tuple[int, ...], held: BoxArray, *, is_transposed: bool) -> BoxArray:
    """Along one dim of space the outputs that read what is held, ``[ranks, 2]`` both; they may lie outside."""
    kernel, stride, padding, dilation = window
    span = dilation * (kernel - 1)
    start = held[:, 0]
    last = held[:, 1] - 1
    if is_transposed:
        ends = start * stride - padding, last * stride - padding + span + 1
    else:
        ends = -((span - padding - start) // stride), (last + padding) // stride + 1
    return np.stack(ends, axis=-1)
