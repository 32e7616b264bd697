"""Padding and cropping of any dims: outputs read what they stand for in the whole tensor.

Rows inside the tensor are taken as they are; only a part at an edge makes others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional

from planner.ir.box import Interval
from runtime.spatial.empties import connected, empty_like_done
from runtime.spatial.step import Step, gathered, picked, shape_of


def run(step: Step, op: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The part, made dim by dim."""
    found = gathered(step, arguments)
    if step.is_empty:
        return empty_like_done(step, found)
    attributes: Any = step.layer.attributes
    x = next(value for name, value in found.items() if step.input_of(name) == 0)
    mode, before = str(attributes.get("mode", "constant")), attributes["before"]
    positions = [Interval(done.start - rows, done.stop - rows) for done, rows in zip(step.done, before, strict=True)]
    if mode == "constant":
        value = found.get("value")
        return _constant(step, x, positions, 0.0 if value is None else value)
    extents = step.division.inputs[0].shape
    sides = zip(positions, extents, step.exchange(0).wanted, strict=True)
    for dim, (position, extent, available) in enumerate(sides):
        if position != available:
            rows = (_image(place, extent, mode) - available.start for place in range(position.start, position.stop))
            x = picked(x, dim, rows)
    return x


def _constant(step: Step, x: Tensor, positions: list[Interval], value: float) -> Tensor:
    """``value`` around what lies inside the tensor, of which there may be nothing."""
    available = step.exchange(0).wanted
    if not all(len(interval) for interval in available):
        return connected(x.new_full(shape_of(step.done), value), x)
    around = [
        rows
        for wanted, have in reversed(list(zip(positions, available, strict=True)))
        for rows in (have.start - wanted.start, wanted.stop - have.stop)
    ]
    return functional.pad(x, around, value=value) if any(around) else x


def _image(place: int, extent: int, mode: str) -> int:
    """The element that a place stands for, which may lie outside of a dim of ``extent``."""
    if 0 <= place < extent:
        return place
    if mode == "replicate":
        return min(max(place, 0), extent - 1)
    if mode == "circular":
        return place % extent
    return -place if place < 0 else 2 * (extent - 1) - place
