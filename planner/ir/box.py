"""Boxes, and the data that must move between them.  Pure integers, no torch.

A halo exchange, a redistribution between layouts and the hand-over between pipeline stages ask the same question:
which box does each rank own, which box does it need, and hence who sends which box to whom.  :func:`transfers`
answers it, once, for planner, simulator and runtime.

        owned:   rank 0 [0, 4)   rank 1 [4, 8)
        needed:  rank 0 [0, 5)   rank 1 [3, 8)          (a 3-wide window)
        moved:   1 -> 0 [4, 5)   0 -> 1 [3, 4)          and each keeps its own part
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
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


def whole(shape: tuple[int, ...]) -> Box:
    """The box of an entire tensor of ``shape``."""
    return tuple(Interval(0, extent) for extent in shape)


def intersect(a: Box, b: Box) -> Box | None:
    """What ``a`` and ``b`` share, or None if they share nothing."""
    box = tuple(x & y for x, y in zip(a, b, strict=True))
    return box if all(len(interval) for interval in box) else None


def hull(a: Box | None, b: Box) -> Box:
    """The smallest box that holds both; ``b`` where there is no ``a``."""
    if a is None:
        return b
    return tuple(Interval(min(x.start, y.start), max(x.stop, y.stop)) for x, y in zip(a, b, strict=True))


def subtract(box: Box, other: Box) -> tuple[Box, ...]:
    """Disjoint boxes that make up ``box`` without ``other``: all of it if they share nothing."""
    shared = intersect(box, other)
    if shared is None:
        return (box,)
    parts, rest = [], box
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


def transfers(owned: Mapping[int, Box], needed: Mapping[int, Box]) -> tuple[Transfer, ...]:
    """Every piece of ``needed`` with the one owner it comes from, own pieces included.

    Owned boxes are pairwise disjoint or identical (a replicated tensor).  Of identical owners a rank takes from itself
    if it is one of them, else from owner ``k mod n`` for the ``k``-th needing rank, so that load is spread and every
    element arrives exactly once.  Hence the adjoint (send back along the same list and add) is exact as well.

    Ordered by destination, then by box.
    """
    replicas: dict[Box, list[int]] = {}
    for rank, box in owned.items():
        replicas.setdefault(box, []).append(rank)
    moves, ordered = [], sorted(replicas.items())
    starts = [box[0].start if box else 0 for box, _ in ordered]
    reach = list(accumulate((box[0].stop if box else 1 for box, _ in ordered), max))  # no box before stops later
    for position, (dst, need) in enumerate(needed.items()):
        begin, end = (need[0].start, need[0].stop) if need else (0, 1)
        for box, owners in ordered[bisect_right(reach, begin) : bisect_left(starts, end)]:
            piece = intersect(box, need)
            if piece is not None:
                src = dst if dst in owners else owners[position % len(owners)]
                moves.append(Transfer(src, dst, piece))
    return tuple(moves)
