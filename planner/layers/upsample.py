"""Interpolation to another size: nearest, linear (bilinear, trilinear) or cubic, of the trailing dims.

Attributes ``mode`` (``nearest``, ``nearest-exact``, ``linear``, ``cubic``), ``align_corners``, ``space`` (how many dims
are interpolated), and, where the caller gave factors rather than sizes, these as ``factor_numerators`` and
``factor_denominators``.  Output o lies at input position

    nearest        o s               s = 1 / factor, or inputs / outputs
    nearest-exact  (o + 1/2) s
    linear, cubic  (o + 1/2) s - 1/2
                   o s               with aligned corners, where s = (inputs - 1) / (outputs - 1)

and reads the element at the floor of that, linear the next one too, cubic the one before and the next two.  Indices are
clipped to the tensor; linear takes what lies before the first element for it.

torch computes positions in float32 or in float64, by dtype and back end, fused or not.  Where these disagree about a
floor, the hull of them is read.  A dim that keeps its size is copied, but by cubic, and of one that doubles indices are
halved, in some back ends whatever factor was given: then the hull has both.

    linear, factor 2:      output [2, 4)  reads  input [0, 3)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from math import floor, prod

from planner.ir.box import Box, Interval
from planner.ir.graph import Layer
from planner.layers._rules import (
    Boxes,
    Specs,
    empty_work_reads_nothing,
    first_output,
    integer,
    integers,
    num_elements,
    whole_weights,
)

REDUCTION = ""
work = first_output
weight_boxes = whole_weights

_REACH = {"nearest": (0, 0), "nearest-exact": (0, 0), "linear": (0, 1), "cubic": (1, 2)}
"""How many elements before and after the one at the floor are read."""
_TAPS = {"nearest": 1, "nearest-exact": 1, "linear": 2, "cubic": 4}


@empty_work_reads_nothing
def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
    """The same place, but along interpolated dims what lies about the outputs' positions."""
    shape, outputs = inputs[0].shape, layer.outputs[0].shape
    first = len(shape) - integer(layer.attributes.get("space"))
    along = []
    for dim in range(first, len(shape)):
        steps = tuple(_steps(layer, dim - first, shape[dim], outputs[dim]))
        along.append(_read(layer, work_box[dim], shape[dim], outputs[dim], steps))
    return ((*work_box[:first], *along),)


def forward_flops(layer: Layer, inputs: Specs) -> int:
    """A multiply and an add per output element and element that it reads."""
    taps = prod((_TAPS[str(layer.attributes.get("mode"))],) * integer(layer.attributes.get("space")))
    return 2 * num_elements(layer.outputs[0]) * taps


def _steps(layer: Layer, position: int, inputs: int, outputs: int) -> Iterator[float]:
    """How far apart, in elements of the input, outputs lie: as computed in either precision."""
    if layer.attributes.get("align_corners"):
        exact = (inputs - 1) / (outputs - 1) if outputs > 1 else 0.0
    elif "factor_numerators" in layer.attributes:
        numerator = integers(layer.attributes.get("factor_numerators"))[position]
        exact = 1.0 / (numerator / integers(layer.attributes.get("factor_denominators"))[position])
    else:
        exact = inputs / outputs
    yield exact
    yield _single(exact)


def _read(layer: Layer, o: Interval, inputs: int, outputs: int, steps: tuple[float, ...]) -> Interval:
    """The hull over all ways to round."""
    mode = str(layer.attributes.get("mode"))
    if inputs == outputs and steps[0] == 1 and mode != "cubic":
        return o
    before, after = _REACH[mode]
    is_aligned = bool(layer.attributes.get("align_corners"))
    first = min(floor(position) for step in steps for position in _positions(mode, is_aligned, o.start, step))
    last = max(floor(position) for step in steps for position in _positions(mode, is_aligned, o.stop - 1, step))
    found = Interval(_clipped(first - before, inputs), _clipped(last + after, inputs) + 1)
    times = outputs // inputs
    if mode == "cubic" or outputs not in (inputs, 2 * inputs) or steps[0] * times == 1:
        return found
    return Interval(min(found.start, o.start // times), max(found.stop, -(-o.stop // times)))


def _positions(mode: str, is_aligned: bool, output: int, step: float) -> tuple[float, ...]:
    """Where an output lies, computed in float64, in float32, and in float32 with the last step fused."""
    offset = 0.5 if mode == "nearest-exact" or (mode in ("linear", "cubic") and not is_aligned) else 0.0
    less = 0.5 if offset and mode != "nearest-exact" else 0.0
    exact = (output + offset) * step
    found = exact - less, _single(_single(exact) - less), _single(exact - less)
    return tuple(max(position, 0.0) for position in found) if mode == "linear" else found


def _clipped(index: int, extent: int) -> int:
    return min(max(index, 0), extent - 1)


def _single(number: float) -> float:
    """``number`` in float32."""
    found: float = struct.unpack("f", struct.pack("f", number))[0]
    return found
