"""Cutting tensors into the pieces that messages carry, and putting pieces together again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from planner.ir.box import Box, volume

CPU = torch.device("cpu")

Cut = tuple[int, int, int]
"""(dim, start, length): arguments of ``Tensor.narrow``."""

Cuts = tuple[Cut, ...]
"""Of the dims along which a part is not all of a tensor."""

Piece = tuple[Box, torch.Tensor]
"""Where a tensor lies, in the coordinates of its micro-batch, and the tensor."""


def slices(box: Box, origin: Box) -> tuple[slice, ...]:
    """``box`` as an index into a tensor that covers ``origin``."""
    return tuple(slice(a.start - o.start, a.stop - o.start) for a, o in zip(box, origin, strict=True))


def cuts_of(box: Box, origin: Box) -> Cuts:
    """Where ``box`` lies in a tensor that covers ``origin``: the dims along which it is not all of it."""
    return tuple(
        (dim, part.start - whole.start, len(part))
        for dim, (part, whole) in enumerate(zip(box, origin, strict=True))
        if part != whole
    )


def narrowed(tensor: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """A view of ``tensor``; itself where nothing is cut."""
    for cut in cuts:
        tensor = tensor.narrow(*cut)
    return tensor


def assemble(pieces: Sequence[Piece], box: Box, dtype: torch.dtype, device: torch.device = CPU) -> torch.Tensor:
    """The tensor that covers ``box``, made of disjoint pieces of it; zero where no piece lies, as nothing reads there.

    One piece that is the whole box is returned as it is.
    """
    if len(pieces) == 1 and pieces[0][0] == box:
        return pieces[0][1]
    shape = [len(interval) for interval in box]
    is_covered = sum(volume(part) for part, _ in pieces) == volume(box)
    whole = (torch.empty if is_covered else torch.zeros)(shape, dtype=dtype, device=device)
    for part, tensor in pieces:
        whole[slices(part, box)] = tensor
    return whole


def add_up(pieces: Sequence[Piece], box: Box, dtype: torch.dtype, device: torch.device = CPU) -> torch.Tensor:
    """The sum of pieces that may overlap, over ``box``: the adjoint of handing the same boxes out."""
    if len(pieces) == 1 and pieces[0][0] == box:
        return pieces[0][1]
    total = torch.zeros([len(interval) for interval in box], dtype=dtype, device=device)
    for part, tensor in pieces:
        total[slices(part, box)] += tensor
    return total
