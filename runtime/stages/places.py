"""Which of a layer's random numbers a rank draws, where its stage is divided along other dims than samples.

        micro-batch 2, node dropout_1, 4 samples of 6      011001 101110 | 010111 001011      in blocks of 2
        a rank with samples [1, 3) and rows [2, 4)                  11       01               draws both blocks

So ranks draw, whole along other dims, the samples of which they need a part, and keep their part: copies and halos get
the numbers that their owner gets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from planner.ir.box import Box, Interval, whole
from planner.ir.errors import StageFailedError
from runtime.pieces import slices
from runtime.stages.numbers import Filled

BLOCK = 1 << 14
"""Least numbers of a block: few enough to waste little where a rank has a part of one, enough to outweigh its start."""


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's part of what a node draws.

    Attributes:
        start, count: the samples of which it does a part.
        total: samples of the micro-batch.
        box: the numbers that it needs of those; None: all that these samples have.
        shape: that ``box`` is a part of.
    """

    start: int
    count: int
    total: int
    box: Box | None = None
    shape: tuple[int, ...] = ()


class Places(Protocol):
    """Where the layers of a divided stage draw."""

    def place(self, layer: str, is_main: bool) -> Place:
        """In the micro-batch that is being run; ``is_main``: by the layer's own operator, not one that helps it."""
        ...

    def parts_of_samples(self, layer: str) -> int:
        """Into how many parts the samples of a layer are cut."""
        ...

    def draws_all(self, layer: str) -> bool:
        """Whether every rank draws all that one device draws."""
        ...


def drawn_part(
    place: Place,
    dim: int | None,
    dtype: torch.dtype,
    device: torch.device,
    filled: Filled,
    generator: Callable[[int], torch.Generator],
    num_dims: int | None = None,
) -> Tensor:
    """The numbers of ``place.box``.

    Args:
        dim: that samples lie along; None: the numbers are the same for all samples, and drawn at once.
        generator: for the block that begins with a sample.
        num_dims: the dims behind these are 1.
    """
    box, shape = _shortened(place, num_dims)
    local = [len(interval) for interval in box]
    if not all(local):
        return torch.empty(local, dtype=dtype, device=device)
    if dim is None or (num_dims is not None and dim >= num_dims):
        drawn = filled(torch.empty(shape, dtype=dtype, device=device), generator(0))
        return drawn[slices(box, whole(shape))].contiguous()
    each, rest = divmod(shape[dim], place.total)
    if rest:
        raise StageFailedError(f"numbers of shape {shape} are drawn for {place.total} samples", [f"along dim {dim}"])
    rows = math.ceil(BLOCK * place.total / math.prod(shape))
    begin, end = box[dim].start // each, -(-box[dim].stop // each)
    found = torch.empty(local, dtype=dtype, device=device)
    for first in range(begin - begin % rows, end, rows):
        block = Interval(each * first, each * min(first + rows, place.total))
        drawn = filled(
            torch.empty((*shape[:dim], len(block), *shape[dim + 1 :]), dtype=dtype, device=device), generator(first)
        )
        shared = (*box[:dim], box[dim] & block, *box[dim + 1 :])
        found[slices(shared, box)] = drawn[slices(shared, (*whole(shape[:dim]), block, *whole(shape[dim + 1 :])))]
    return found


def _shortened(place: Place, num_dims: int | None) -> tuple[Box, tuple[int, ...]]:
    box = place.box or ()
    if num_dims is None:
        return box, place.shape
    ones = len(box) - num_dims
    return (*box[:num_dims], *(Interval(0, 1),) * ones), (*place.shape[:num_dims], *(1,) * ones)
