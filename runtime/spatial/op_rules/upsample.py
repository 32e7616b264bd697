"""Interpolation: every output lies where it lies in the whole tensor, whichever rank makes it.

Along dims that are whole, or grow by a whole factor, torch's own operator does it: groups of as many outputs lie alike
about every input, so that what the part reads is interpolated and the outputs of its outermost rows are cut off.

    factor 2, output [4, 8) reads [1, 5):      [2, 10) is made, [4, 8) is kept

Else rows are picked and weighted, dim by dim.

Interpolation of a part: which elements of the whole tensor each output reads, and with what weights.

Positions are those of ``at::native::upsample_*``, from global indices and sizes; see
``planner.layers.data_movement``.  They are computed in the dtype of the data, but in float32 for shorter ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from planner.ir.box import Interval
from runtime.spatial.empties import empty_like_done
from runtime.spatial.step import Step, gathered

_A = -0.75
"""Of Keys' cubic kernel (1981, "Cubic convolution interpolation for digital image processing")."""


@dataclass(frozen=True, slots=True)
class Resampling:
    """Interpolation along one dim, and the outputs that are wanted of it.

    Attributes:
        mode: ``nearest``, ``nearest-exact``, ``linear`` or ``cubic``.
        inputs, outputs: extents of the whole tensors.
        factor: as the caller gave it; None: follows from the extents.
    """

    mode: str
    inputs: int
    outputs: int
    is_aligned: bool
    factor: float | None
    done: Interval

    @property
    def whole_factor(self) -> int | None:
        """How many outputs there are for each input, each group of them lying alike; None: it is no whole number."""
        times, rest = divmod(self.outputs, self.inputs)
        is_whole = not rest and not self.is_aligned and self.factor in (None, times)
        return times if is_whole else None

    def taps(self, like: Tensor) -> tuple[tuple[Tensor, Tensor | None], ...]:
        """What the outputs read, if not the nearest: of each tap the index of the input, and its weight; None is 1."""
        if self.mode == "linear" and self.inputs == self.outputs:
            return ((torch.arange(self.done.start, self.done.stop, device=like.device), None),)
        positions = self._positions(torch.float64 if like.dtype == torch.float64 else torch.float32, like.device)
        first = positions.floor().clamp(max=self.inputs - 1)
        beyond = (positions - first).clamp(0, 1)
        weights = _linear(beyond) if self.mode == "linear" else _cubic(beyond)
        before = 0 if self.mode == "linear" else 1
        indices = first.long() - before
        return tuple(
            ((indices + tap).clamp(0, self.inputs - 1), weight.to(like.dtype)) for tap, weight in enumerate(weights)
        )

    def _positions(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        o = torch.arange(self.done.start, self.done.stop, dtype=dtype, device=device)
        if self.is_aligned:
            return o * torch.tensor((self.inputs - 1) / max(1, self.outputs - 1), dtype=dtype, device=device)
        step = self.inputs / self.outputs if self.factor is None else 1 / self.factor
        found = (o + 0.5) * torch.tensor(step, dtype=dtype, device=device) - 0.5
        return found.clamp(min=0) if self.mode == "linear" else found


def nearest(
    op: Callable[..., Tensor],
    inputs: Sequence[int],
    outputs: Sequence[int],
    factors: Sequence[float | None],
    like: Tensor,
) -> list[Tensor]:
    """By dim, which input each output is: asked of torch itself, whose rounding follows dtype, size and back end.

    Args:
        op: interpolates an image, as ``aten.upsample_nearest2d.default``.
    """
    dtype = like.dtype if like.dtype in (torch.float32, torch.float64) else torch.float32
    found = []
    for dim, extent in enumerate(inputs):
        ramp = torch.arange(extent, dtype=dtype, device=like.device)
        counted = ramp.view([-1 if at == dim else 1 for at in range(len(inputs))]).expand(*inputs).contiguous()
        image = op(counted[None, None], list(outputs), *factors)[0, 0]
        found.append(image[tuple(slice(None) if at == dim else 0 for at in range(len(inputs)))].long())
    return found


def resampled(x: Tensor, dim: int, start: int, taps: tuple[tuple[Tensor, Tensor | None], ...]) -> Tensor:
    """The weighted sum of what ``taps`` read of ``x``, which begins at ``start`` along ``dim``."""
    shape = [-1 if each == dim else 1 for each in range(x.ndim)]
    found: Tensor | None = None
    for indices, weight in taps:
        term = x.index_select(dim, indices - start)
        term = term if weight is None else term * weight.view(shape)
        found = term if found is None else found + term
    if found is None:
        raise ValueError("no taps")
    return found


def _linear(beyond: Tensor) -> tuple[Tensor, ...]:
    return 1 - beyond, beyond


def _cubic(beyond: Tensor) -> tuple[Tensor, ...]:
    def near(t: Tensor) -> Tensor:
        return ((_A + 2) * t - (_A + 3)) * t * t + 1

    def far(t: Tensor) -> Tensor:
        return ((_A * t - 5 * _A) * t + 8 * _A) * t - 4 * _A

    return far(beyond + 1), near(beyond), near(1 - beyond), far(2 - beyond)


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
    wholes = [side.resampling for side in sides]
    rows = nearest(
        _operator(step),
        [each.inputs for each in wholes],
        [each.outputs for each in wholes],
        [each.factor for each in wholes],
        like,
    )
    taken = [
        each[side.resampling.done.start : side.resampling.done.stop] for each, side in zip(rows, sides, strict=True)
    ]
    if is_native:
        local = nearest(
            _operator(step),
            [len(side.available) for side in sides],
            [side.num_made for side in sides],
            [side.factor for side in sides],
            like,
        )
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
        _Side(Resampling(attributes["mode"], come, made, is_aligned, factor, done), rows)
        for come, made, factor, done, rows in zip(
            inputs[-space:],
            outputs[-space:],
            factors,
            step.done[-space:],
            step.exchange(0).wanted[-space:],
            strict=True,
        )
    ]
