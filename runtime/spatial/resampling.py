"""Interpolation of a part: which elements of the whole tensor each output reads, and with what weights.

Positions are those of ``at::native::upsample_*``, from global indices and sizes; see ``planner.layers.upsample``.  They
are computed in the dtype of the data, but in float32 for shorter ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from planner.ir.box import Interval

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
