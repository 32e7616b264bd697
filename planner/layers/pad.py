"""Padding of any dims: attributes ``before`` and ``after`` (a number per dim, negative where rows go), and ``mode``.

Output o stands for position o - before of the input.  Outside of the tensor, of n elements,

    constant   reads nothing, so that a box may reach outside, as a convolution's does
    reflect    reads -o and 2 (n - 1) - o
    replicate  reads the outermost element
    circular   reads o modulo n: a part with an edge and what lies beside it reads the other edge too, hence all

    before 2, n 5:      output [0, 4)  reads  input [0, 3)  reflected,  [0, 2)  replicated,  [0, 5)  circular
"""

from __future__ import annotations

from planner.ir.box import Box, Interval
from planner.ir.graph import Layer
from planner.layers._rules import (
    Boxes,
    Specs,
    empty_work_reads_nothing,
    first_output,
    integers,
    no_flops,
    whole_weights,
)

REDUCTION = ""
work = first_output
weight_boxes = whole_weights
forward_flops = no_flops


@empty_work_reads_nothing
def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
    """Along each dim the hull of what the outputs stand for."""
    mode = str(layer.attributes.get("mode", "constant"))
    places = zip(work_box, integers(layer.attributes.get("before")), inputs[0].shape, strict=True)
    return (tuple(_read(Interval(o.start - before, o.stop - before), extent, mode) for o, before, extent in places),)


def _read(positions: Interval, extent: int, mode: str) -> Interval:
    """The hull of the elements at ``positions``, which may lie outside of a dim of ``extent``."""
    if mode == "constant" or (positions.start >= 0 and positions.stop <= extent):
        return positions
    left, right = (
        Interval(positions.start, min(positions.stop, 0)),
        Interval(max(positions.start, extent), positions.stop),
    )
    inside = positions & Interval(0, extent)
    pieces = [_image(piece, extent, mode) for piece in (left, right) if len(piece)] + ([inside] if len(inside) else [])
    return Interval(min(piece.start for piece in pieces), max(piece.stop for piece in pieces))


def _image(outside: Interval, extent: int, mode: str) -> Interval:
    """What positions on one side of the tensor read."""
    is_left = outside.start < 0
    if mode == "replicate":
        return Interval(0, 1) if is_left else Interval(extent - 1, extent)
    if mode == "circular":
        move = extent if is_left else -extent
        return Interval(outside.start + move, outside.stop + move)
    mirror = 0 if is_left else 2 * (extent - 1)
    return Interval(mirror - outside.stop + 1, mirror - outside.start + 1)
