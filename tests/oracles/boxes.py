"""Boxes one at a time, by loops over ranks and dims: an oracle for the arrays of ``planner.layers``."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from planner.ir.box import Box, Interval, Transfer, intersect
from planner.ir.graph import SAMPLE, TensorSpec, is_sites
from planner.ir.layout import Layout, scaled_intervals

SPACE = ("depth", "height", "width")


def parts(layout: Layout, spec: TensorSpec, samples: int) -> tuple[Box, ...]:
    """The box of each part, in rank order, of a tensor made for ``samples`` samples."""
    axes = {dim: points for dim, points in layout.cuts.items() if not is_sites(dim)}
    numbers = {dim: number for number, dim in enumerate(axes)}
    along = [
        (numbers.get(SAMPLE if is_sites(dim) else dim, 0), _intervals(layout, dim, extent, samples))
        for dim, extent in zip(spec.dims, spec.shape, strict=True)
    ]
    grid = product(*(range(len(points) - 1) for points in axes.values()))
    return tuple(
        tuple(intervals[place[axis]] if len(intervals) > 1 else intervals[0] for axis, intervals in along)
        for place in grid
    )


def _intervals(layout: Layout, dim: str, extent: int, samples: int) -> tuple[Interval, ...]:
    """The interval of each part along ``dim``; one for all where the tensor is whole along it."""
    if is_sites(dim):
        points = layout.cuts.get(dim) or layout.cuts.get(SAMPLE)
        return scaled_intervals(points, extent) if points and extent else (Interval(0, extent),)
    units = samples if dim == SAMPLE else extent
    if dim not in layout.cuts or units == 0 or (extent == 1 and dim != SAMPLE):
        return (Interval(0, extent),)
    rows = extent // units
    return tuple(Interval(part.start * rows, part.stop * rows) for part in scaled_intervals(layout.cuts[dim], units))


def grown(box: Box, spec: TensorSpec, layout: Layout, margin: int) -> Box:
    """``box`` with ``margin`` more rows on each side along the dims of space that are cut, inside the tensor."""
    if not margin or not all(map(len, box)):
        return box
    return tuple(
        Interval(max(0, interval.start - margin), min(extent, interval.stop + margin))
        if dim in SPACE and dim in layout.cuts
        else interval
        for dim, interval, extent in zip(spec.dims, box, spec.shape, strict=True)
    )


def transfers(owned: Mapping[int, Box], needed: Mapping[int, Box]) -> tuple[Transfer, ...]:
    """Every piece of ``needed`` with the one owner it comes from, own pieces included."""
    replicas: dict[Box, list[int]] = {}
    for rank, box in owned.items():
        replicas.setdefault(box, []).append(rank)
    moves = []
    for position, (dst, need) in enumerate(needed.items()):
        for box, owners in sorted(replicas.items()):
            piece = intersect(box, need)
            if piece is not None:
                src = dst if dst in owners else owners[position % len(owners)]
                moves.append(Transfer(src, dst, piece))
    return tuple(moves)
