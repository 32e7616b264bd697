"""Boxes as arrays, ``[..., dims, 2]``, start and stop in the last axis: what each rank has of a tensor, and what moves.

A halo exchange, a redistribution between layouts and the hand-over between pipeline stages ask the same question:
which box does each rank own, which box does it need, and hence who sends which box to whom.

        owned:   rank 0 [0, 4)   rank 1 [4, 8)
        needed:  rank 0 [0, 5)   rank 1 [3, 8)          (a 3-wide window)
        moved:   1 -> 0 [4, 5)   0 -> 1 [3, 4)          and each keeps its own part

    boxes_of     the box of each part of a layout
    sources      who is asked for a box that several ranks own
    moved        how many elements move, between any layouts of two layers: what is priced
    transfers    which boxes move, of one layout each: what is sent

Planner and runtime read the same arrays; a box as a tuple of intervals (``planner.ir.box``) is a view of one row.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import starmap

import numpy as np
from numpy.typing import NDArray

from planner.ir.box import Box, Boxes, Interval, Transfer
from planner.ir.graph import SAMPLE, TensorSpec, is_sites
from planner.ir.layout import Layout, scaled_intervals

BoxArray = NDArray[np.int64]
"""``[..., dims, 2]``."""
Array = NDArray[np.float64]
"""Numbers of elements; floats are exact up to 2**53."""
Flags = NDArray[np.bool_]
Members = tuple[int, ...]
"""Positions of ranks in their group."""
_interval = functools.lru_cache(2**14)(Interval)  # the same few ends come again and again


def boxes_of(layout: Layout, spec: TensorSpec, samples: int) -> BoxArray:
    """``[parts, dims, 2]``: the box of each part, in rank order, of a tensor made for ``samples`` samples.

    A part may be empty where cut points coincide.  A sample dim of extent ``k * samples`` is cut between samples.
    """
    axes, places = grid_of(layout)
    boxes = np.zeros((places.shape[1], len(spec.dims), 2), dtype=np.int64)
    boxes[..., 1] = spec.shape
    for position, (dim, extent) in enumerate(zip(spec.dims, spec.shape, strict=True)):
        axis, units = (SAMPLE, extent) if is_sites(dim) else (dim, samples if dim == SAMPLE else extent)
        if axis in axes and units and (extent > 1 or axis == SAMPLE):
            parts = as_boxes((scaled_intervals(layout.cuts.get(dim) or layout.cuts[axis], units),))[0]
            boxes[:, position] = parts[places[axes.index(axis)]] * (extent // units)
    return boxes


def grid_of(layout: Layout) -> tuple[list[str], NDArray[np.int64]]:
    """The dims of the grid of ranks, and the place of each rank along them, ``[dims of the grid, ranks]``."""
    axes = {dim: len(points) - 1 for dim, points in layout.cuts.items() if not is_sites(dim)}
    shape = tuple(axes.values())
    places = np.indices(shape).reshape(len(shape), -1) if shape else np.zeros((0, 1), dtype=np.int64)
    return list(axes), places


def as_boxes(boxes: Sequence[Box]) -> BoxArray:
    """``[number, dims, 2]``."""
    ends = [[(interval.start, interval.stop) for interval in box] for box in boxes]
    return np.array(ends, dtype=np.int64).reshape(len(boxes), len(boxes[0]) if boxes else 0, 2)


def as_tuples(boxes: BoxArray) -> Boxes:
    """The boxes of ``[number, dims, 2]``."""
    return tuple(tuple(starmap(_interval, ends)) for ends in boxes.tolist())


def volumes(boxes: BoxArray) -> Array:
    """Elements of each box."""
    sizes: Array = np.maximum(boxes[..., 1] - boxes[..., 0], 0).prod(axis=-1, dtype=np.float64)
    return sizes


def shared(a: BoxArray, b: BoxArray) -> BoxArray:
    """What each pair of boxes shares; it stops where it starts or before where that is nothing."""
    return np.stack([np.maximum(a[..., 0], b[..., 0]), np.minimum(a[..., 1], b[..., 1])], axis=-1)


def filled(boxes: BoxArray) -> Flags:
    """Whether a box holds an element."""
    return np.asarray((boxes[..., 1] > boxes[..., 0]).all(axis=-1))


def inside(boxes: BoxArray, shape: Sequence[int]) -> BoxArray:
    """What of the boxes lies in a tensor of ``shape``: zeros where nothing does."""
    clipped = shared(boxes, np.array([(0, extent) for extent in shape], dtype=np.int64).reshape(len(shape), 2))
    return np.where(filled(clipped)[..., None, None], clipped, 0)


def are_apart(boxes: BoxArray) -> bool:
    """Whether each of ``[ranks, dims, 2]`` holds an element, and no two the same."""
    return bool((filled(shared(boxes[:, None], boxes[None])) == np.eye(len(boxes), dtype=bool)).all())


def distinct(arrays: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[int]]:
    """The distinct ones of arrays along the first axis, in order, and which of them each is."""
    first: dict[bytes, int] = {}
    rows = [first.setdefault(array.tobytes(), row) for row, array in enumerate(arrays)]
    number = {row: place for place, row in enumerate(first.values())}
    return arrays[list(number)], [number[row] for row in rows]


def equal_ranks(boxes: BoxArray) -> tuple[Members, ...]:
    """The ranks by equal boxes (``[ranks, dims, 2]``), in order of their first."""
    by_box: dict[bytes, list[int]] = {}
    for member, box in enumerate(boxes):
        by_box.setdefault(box.tobytes(), []).append(member)
    return tuple(tuple(members) for members in by_box.values())


def sources(owned: BoxArray, own: Flags | None = None) -> Flags:
    """``[..., destination, owner]``: the owner of each distinct box that a destination takes from.

    Of identical owners a rank takes from itself if it is one of them, else from owner ``k mod n`` for the ``k``-th
    destination, so that load is spread and every element arrives exactly once.  Hence the adjoint (send back along the
    same list and add) is exact as well.

    Args:
        owned: ``[..., ranks, dims, 2]``, pairwise disjoint or identical.
        own: ``[destination, owner]``: whether they are the same rank; None: both are the ranks of one group.
    """
    is_own = np.eye(owned.shape[-3], dtype=bool) if own is None else own
    alike = (owned[..., :, None, :, :] == owned[..., None, :, :, :]).all(axis=(-1, -2))
    replicas = alike.sum(axis=-1)
    if (replicas == 1).all():
        return np.ones((*owned.shape[:-3], *is_own.shape), dtype=bool)
    number = np.tril(alike, -1).sum(axis=-1)
    turn = np.arange(len(is_own))[:, None] % replicas[..., None, :] == number[..., None, :]
    takes_from: Flags = np.where(is_own @ alike, is_own, turn)
    return takes_from


def transfers(owned: Mapping[int, Box], needed: Mapping[int, Box]) -> tuple[Transfer, ...]:
    """Every piece of ``needed`` with the one owner it comes from (:func:`sources`), own pieces included.

    Ordered by destination, then by box.

    Args:
        owned: by rank, pairwise disjoint or identical (a replicated tensor).
    """
    owners = sorted(owned, key=owned.__getitem__)
    readers = list(needed)
    boxes = as_boxes([owned[rank] for rank in owners])
    pieces = shared(boxes[None], as_boxes(list(needed.values()))[:, None])
    own = np.array(readers)[:, None] == np.array(owners)
    return tuple(
        Transfer(owners[src], readers[dst], as_tuples(pieces[dst, src][None])[0])
        for dst, src in np.argwhere(sources(boxes, own) & filled(pieces)).tolist()
    )


def moved(owned: BoxArray, held: BoxArray, needed: BoxArray) -> Array:
    """``[options of the maker, options of the reader, source, destination]``: elements that move, by layouts.

    Args:
        owned: ``[options of the maker, ranks, dims, 2]``: who is asked for which elements.
        held: of the same shape: what each rank has without asking, at least what it owns.
        needed: ``[options of the reader, ranks, dims, 2]``.
    """
    # What the destination holds of a piece is an intersection as well; owned boxes being disjoint, it is subtracted.
    apart = sources(owned).swapaxes(-1, -2) & ~np.eye(owned.shape[1], dtype=bool)
    lengths_along = [_lengths(owned[..., dim, :], needed[..., dim, :]) for dim in range(owned.shape[2])]
    overlap = np.empty((len(owned), len(needed), *apart.shape[1:]))
    for option, apart_of in enumerate(apart):
        overlap[option] = apart_of
        for lengths, of_owned, of_needed in lengths_along:
            overlap[option] *= lengths[of_owned[option]][of_needed] if lengths.ndim else lengths
    if held is owned:
        return overlap
    already = np.repeat(apart[:, None].astype(np.float64), len(needed), axis=1)
    for dim in range(owned.shape[2]):
        pieces = shared(owned[:, None, :, None, dim], needed[None, :, None, :, dim])
        pieces = shared(pieces, held[:, None, None, :, dim])
        already *= np.maximum(pieces[..., 1] - pieces[..., 0], 0)
    return overlap - already


def _lengths(owned: BoxArray, needed: BoxArray) -> tuple[Array, list[int], list[int]]:
    """What each pair of intervals shares along one dim, ``[way, way, source, destination]``, and each option's way.

    Few options cut a dim in a way of their own, so that each pair of ways is looked at once; one number where all share
    as much.
    """
    a, of_a = distinct(owned)
    b, of_b = distinct(needed)
    pieces = shared(a[:, None, :, None], b[None, :, None])
    lengths = np.maximum(pieces[..., 1] - pieces[..., 0], 0).astype(np.float64)
    if lengths.size and (lengths == lengths.flat[0]).all():
        lengths = np.array(lengths.flat[0])
    return lengths, of_a, of_b
