"""Boxes: parts of tensors, in global coordinates.  Pure integers, no torch.

Of many ranks at once they are arrays (``planner.layers.boxes``).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True, order=True)
class Interval:
    """Half-open range ``[start, stop)`` along one dim."""

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def __and__(self, other: Interval) -> Interval:
        return Interval(max(self.start, other.start), min(self.stop, other.stop))

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


Box = tuple[Interval, ...]
"""One interval per dim of a tensor, in global coordinates; ``()`` is the box of a scalar."""

Boxes = tuple[Box, ...]
"""Of several tensors, or one a rank, by its position in the stage."""


def whole(shape: tuple[int, ...]) -> Box:
    """The box of an entire tensor of ``shape``."""
    return tuple(Interval(0, extent) for extent in shape)


def intersect(a: Box, b: Box) -> Box | None:
    """What ``a`` and ``b`` share, or None if they share nothing."""
    box = tuple(x & y for x, y in zip(a, b, strict=True))
    return box if all(len(interval) for interval in box) else None


def inside(box: Box, shape: tuple[int, ...]) -> Box:
    """What of ``box`` lies in a tensor of ``shape``; from 0 to 0 along each dim where nothing does."""
    return intersect(box, whole(shape)) or (Interval(0, 0),) * len(shape)


def hull(a: Box | None, b: Box) -> Box:
    """The smallest box that holds both; ``b`` where there is no ``a``."""
    if a is None:
        return b
    return tuple(Interval(min(x.start, y.start), max(x.stop, y.stop)) for x, y in zip(a, b, strict=True))


def subtract(box: Box, other: Box) -> Boxes:
    """Disjoint boxes that make up ``box`` without ``other``: all of it if they share nothing."""
    shared = intersect(box, other)
    if shared is None:
        return (box,)
    parts = []
    rest = box
    for dim, (interval, cut) in enumerate(zip(box, shared, strict=True)):
        for side in (Interval(interval.start, cut.start), Interval(cut.stop, interval.stop)):
            if len(side):
                parts.append((*rest[:dim], side, *rest[dim + 1 :]))
        rest = (*rest[:dim], cut, *rest[dim + 1 :])
    return tuple(parts)


def volume(box: Box) -> int:
    """Number of elements in ``box`` (1 for a scalar)."""
    return prod(len(interval) for interval in box)


@dataclass(frozen=True, slots=True)
class Transfer:
    """``box`` (global coordinates) goes from rank ``src`` to rank ``dst``; ``src == dst`` stays where it is."""

    src: int
    dst: int
    box: Box
