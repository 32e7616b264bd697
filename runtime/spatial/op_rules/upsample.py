"""Interpolation: every output lies where it lies in the whole tensor, whichever rank makes it.

Along dims that are whole, or grow by a whole factor, torch's own operator does it: groups of as many outputs lie alike
about every input, so that what the part reads is interpolated and the outputs of its outermost rows are cut off.

    factor 2, output [4, 8) reads [1, 5):      [2, 10) is made, [4, 8) is kept

Else rows are picked and weighted, dim by dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from planner.ir.box import Interval
from runtime.spatial.empties import empty_like_done
from runtime.spatial.resampling import Resampling, nearest, resampled
from runtime.spatial.step import Step, gathered


def run(step: Step, op: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The outputs of this rank's part."""
    found = gathered(step, arguments)
    if step.is_empty:
        return empty_like_done(step, found)
    x = next(value for name, value in found.items() if step.input_of(name) == 0)
    key = "taps", x.dtype, x.device
    if key not in step.memo:
        step.memo[key] = _taps(step, x)
    sides, taps = _sides(step), step.memo[key]
    if taps is None:
        return _natively(step, sides, x)
    for dim, (side, along) in enumerate(zip(sides, taps, strict=True), x.ndim - len(sides)):
        x = resampled(x, dim, side.available.start, along)
    return x


@dataclass(frozen=True, slots=True)
class _Side:
    """One interpolated dim.

    Attributes:
        available: the rows that this rank has.
    """

    resampling: Resampling
    available: Interval

    @property
    def is_whole(self) -> bool:
        return len(self.resampling.done) == self.resampling.outputs and len(self.available) == self.resampling.inputs

    @property
    def first(self) -> int:
        """The output that the operator makes first of what is available."""
        return 0 if self.is_whole else self.available.start * (self.resampling.whole_factor or 0)

    @property
    def num_made(self) -> int:
        """How many outputs the operator makes of it."""
        if self.is_whole:
            return self.resampling.outputs
        return len(self.available) * (self.resampling.whole_factor or 0)

    @property
    def factor(self) -> float | None:
        """What the operator is told."""
        return self.resampling.factor if self.is_whole else None


def _taps(step: Step, like: Tensor) -> list[Any] | None:
    """What the outputs read along each dim; None: the operator makes them of what is available."""
    sides = _sides(step)
    is_native = all(side.is_whole or side.resampling.whole_factor for side in sides)
    if not sides[0].resampling.mode.startswith("nearest"):
        return None if is_native else [side.resampling.taps(like) for side in sides]
    numbers = zip(
        *((each.inputs, each.outputs, each.factor) for each in (side.resampling for side in sides)), strict=True
    )
    rows = nearest(_operator(step), *numbers, like)
    taken = [
        each[side.resampling.done.start : side.resampling.done.stop] for each, side in zip(rows, sides, strict=True)
    ]
    if is_native:
        parts = ((len(side.available), side.num_made, side.factor) for side in sides)
        local = nearest(_operator(step), *zip(*parts, strict=True), like)
        pairs = zip(local, taken, sides, strict=True)
        if all(_agree(here, there, side) for here, there, side in pairs):
            return None
    return [((each, None),) for each in taken]


def _agree(here: Tensor, there: Tensor, side: _Side) -> bool:
    first = side.resampling.done.start - side.first
    return torch.equal(here[first : first + len(there)] + side.available.start, there)


def _operator(step: Step) -> Any:
    name = str(step.layer.attributes["op"]).split(".")[1]
    return getattr(torch.ops.aten, name).default


def _natively(step: Step, sides: tuple[_Side, ...], x: Tensor) -> Tensor:
    is_nearest = sides[0].resampling.mode.startswith("nearest")
    aligned = () if is_nearest else (bool(step.layer.attributes.get("align_corners")),)
    factors = [side.factor for side in sides]
    made: Tensor = _operator(step)(x, [side.num_made for side in sides], *aligned, *factors)
    for dim, side in enumerate(sides, x.ndim - len(sides)):
        done = side.resampling.done
        if len(done) != side.num_made:
            made = made.narrow(dim, done.start - side.first, len(done))
    return made


def _sides(step: Step) -> tuple[_Side, ...]:
    if "sides" not in step.memo:
        step.memo["sides"] = tuple(_found(step))
    sides: tuple[_Side, ...] = step.memo["sides"]
    return sides


def _found(step: Step) -> list[_Side]:
    attributes: Any = step.layer.attributes
    inputs, outputs = step.division.inputs[0].shape, step.layer.outputs[0].shape
    space = attributes["space"]
    factors: list[float | None] = [None] * space
    if "factor_numerators" in attributes:
        ratios = zip(attributes["factor_numerators"], attributes["factor_denominators"], strict=True)
        factors = [numerator / denominator for numerator, denominator in ratios]
    is_aligned = bool(attributes.get("align_corners"))
    return [
        _Side(Resampling(attributes["mode"], *numbers, is_aligned, factor, done), rows)
        for *numbers, factor, done, rows in zip(
            inputs[-space:],
            outputs[-space:],
            factors,
            step.done[-space:],
            step.exchange(0).wanted[-space:],
            strict=True,
        )
    ]
