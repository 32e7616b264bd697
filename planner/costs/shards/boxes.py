"""Boxes as arrays: ``[..., dims, 2]``, start and stop in the last axis.  The rules of ``planner.ir``, many at once.

What moves between two layers is the rule of ``planner.ir.box.transfers``: every element that a rank needs and does not
hold comes from the one owner that ``transfers`` names; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.ir.box import Box, Interval
from planner.ir.graph import SAMPLE, TensorSpec
from planner.ir.layout import Layout, scaled_intervals

Boxes = NDArray[np.int64]
"""``[..., dims, 2]``."""
Counts = NDArray[np.float64]
"""Numbers of elements; floats are exact up to 2**53."""
Members = tuple[int, ...]
"""Positions of ranks in their group."""


def boxes_of(layout: Layout, spec: TensorSpec, samples: int) -> Boxes:
    """``[parts, dims, 2]``: ``layout.boxes(spec, samples)``."""
    parts = [len(points) - 1 for points in layout.cuts.values()]
    places = np.indices(parts).reshape(len(parts), -1) if parts else np.zeros((0, 1), dtype=np.int64)
    boxes = np.zeros((places.shape[1], len(spec.dims), 2), dtype=np.int64)
    names = list(layout.cuts)
    for position, (dim, extent) in enumerate(zip(spec.dims, spec.shape, strict=True)):
        units = samples if dim == SAMPLE else extent
        if dim not in layout.cuts or units == 0 or (extent == 1 and dim != SAMPLE):
            boxes[:, position, 1] = extent
            continue
        intervals = scaled_intervals(layout.cuts[dim], units)
        bounds = np.array([(part.start, part.stop) for part in intervals]) * (extent // units)
        boxes[:, position] = bounds[places[names.index(dim)]]
    return boxes


def as_boxes(boxes: Sequence[Box]) -> Boxes:
    """``[number, dims, 2]``."""
    dims = len(boxes[0]) if boxes else 0
    ends = [[(interval.start, interval.stop) for interval in box] for box in boxes]
    return np.array(ends, dtype=np.int64).reshape(len(boxes), dims, 2)


def as_box(array: Boxes) -> Box:
    """``[dims, 2]`` as a box."""
    return tuple(Interval(start, stop) for start, stop in array.tolist())


def volumes(boxes: Boxes) -> Counts:
    """Elements of each box."""
    sizes: Counts = np.maximum(boxes[..., 1] - boxes[..., 0], 0).prod(axis=-1, dtype=np.float64)
    return sizes


def equal_ranks(boxes: Boxes) -> tuple[Members, ...]:
    """The ranks by equal boxes (``[ranks, dims, 2]``), in order of their first."""
    by_box: dict[bytes, list[int]] = {}
    for member, box in enumerate(boxes):
        by_box.setdefault(box.tobytes(), []).append(member)
    return tuple(tuple(members) for members in by_box.values())


def sources(owned: Boxes) -> NDArray[np.bool_]:
    """``[..., destination, owner]``: the owner of each distinct box that a destination takes from, as ``transfers``.

    Args:
        owned: ``[..., ranks, dims, 2]``, pairwise disjoint or identical.
    """
    ranks = owned.shape[-3]
    alike = (owned[..., :, None, :, :] == owned[..., None, :, :, :]).all(axis=(-1, -2))
    replicas = alike.sum(axis=-1)
    number = np.tril(np.broadcast_to(alike, alike.shape), -1).sum(axis=-1)
    turn = np.arange(ranks)[:, None] % replicas[..., None, :] == number[..., None, :]
    own = np.eye(ranks, dtype=bool)
    takes_from: NDArray[np.bool_] = np.where(alike, own, turn)
    return takes_from


def moved(owned: Boxes, held: Boxes, needed: Boxes) -> Counts:
    """``[options of the maker, options of the reader, source, destination]``: elements that move, by layouts.

    Args:
        owned: ``[options of the maker, ranks, dims, 2]``: who is asked for which elements.
        held: of the same shape: what each rank has without asking, at least what it owns.
        needed: ``[options of the reader, ranks, dims, 2]``.
    """
    # What the destination holds of a piece is an intersection as well; owned boxes being disjoint, it is subtracted.
    apart = sources(owned).swapaxes(-1, -2) & ~np.eye(owned.shape[1], dtype=bool)
    shared = [_shared(owned[..., dim, :], needed[..., dim, :]) for dim in range(owned.shape[2])]
    overlap = np.empty((len(owned), len(needed), *apart.shape[1:]))
    for option, apart_of in enumerate(apart):
        overlap[option] = apart_of
        for lengths, of_owned, of_needed in shared:
            overlap[option] *= lengths[of_owned[option]][of_needed] if lengths.ndim else lengths
    if held is owned:
        return overlap
    already = np.repeat(apart[:, None].astype(np.float64), len(needed), axis=1)
    for dim in range(owned.shape[2]):
        start = np.maximum(owned[:, None, :, None, dim, 0], needed[None, :, None, :, dim, 0])
        stop = np.minimum(owned[:, None, :, None, dim, 1], needed[None, :, None, :, dim, 1])
        start = np.maximum(start, held[:, None, None, :, dim, 0])
        stop = np.minimum(stop, held[:, None, None, :, dim, 1])
        already *= np.maximum(stop - start, 0)
    return overlap - already


def _shared(owned: Boxes, needed: Boxes) -> tuple[Counts, NDArray[np.intp], NDArray[np.intp]]:
    """What each pair of intervals shares along one dim, ``[way, way, source, destination]``, and each option's way.

    Few options cut a dim in a way of their own, so that each pair of ways is looked at once; one number where all share
    as much.
    """
    (a, of_a), (b, of_b) = _distinct(owned), _distinct(needed)
    start = np.maximum(a[:, None, :, None, 0], b[None, :, None, :, 0])
    stop = np.minimum(a[:, None, :, None, 1], b[None, :, None, :, 1])
    lengths = np.maximum(stop - start, 0).astype(np.float64)
    if lengths.size and (lengths == lengths.flat[0]).all():
        lengths = np.array(lengths.flat[0])
    return lengths, of_a, of_b


def _distinct(intervals: Boxes) -> tuple[Boxes, NDArray[np.intp]]:
    """Distinct ways to cut a dim ``[number, ranks, 2]``, and which of them each option has."""
    flat = intervals.reshape(len(intervals), -1)
    ways, place = np.unique(flat, axis=0, return_inverse=True)
    return ways.reshape(len(ways), *intervals.shape[1:]), place.ravel()
