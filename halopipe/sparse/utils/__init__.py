"""`torchsparse.utils`."""

from __future__ import annotations

from collections.abc import Sequence

from halopipe.sparse.utils import collate, quantize

__all__ = ["collate", "make_ntuple", "quantize"]


def make_ntuple(x: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    """``ndim`` numbers: those of ``x``, or ``x`` repeated.

    Raises:
        ValueError: another number of them.
    """
    numbers = (x,) * ndim if isinstance(x, int) else tuple(int(each) for each in x)
    if len(numbers) != ndim:
        raise ValueError(f"{x} is {len(numbers)} numbers, not {ndim}; give one, or {ndim}")
    return numbers
