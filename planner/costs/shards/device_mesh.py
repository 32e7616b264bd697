"""How the ranks of a group may be laid out as a grid over the dims of a layer, and how much each rank takes."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from planner.ir.graph import SAMPLE, Graph
from planner.ir.layout import Layout, Shares, cut_points
from planner.layers.boxes import boxes_of
from planner.layers.sized import AXES, REPLICA, SPACE, SizedLayer


def axes_of(graph: Graph, allow: Collection[str]) -> tuple[str, ...]:
    """The axes that the graph's tensors have and that may be cut."""
    dims = {dim for layer in graph.layers for spec in layer.outputs for dim in spec.dims}
    dims.update(dim for spec in graph.inputs.values() for dim in spec.dims)
    return tuple(name for name, (family, along) in AXES.items() if family in allow and dims.intersection(along))


def candidate_layouts(sized: SizedLayer, speeds: tuple[float, ...], axes: tuple[str, ...]) -> tuple[Layout, ...]:
    """Every grid of the ranks over ``axes`` and replication, as far as the layer can be cut; no two alike.

    Along an axis that the layer cannot be cut along, its ranks hold the same.  More axes only add layouts.

    Args:
        speeds: of each rank; along each axis shares are in proportion to them.
    """
    by_boxes: dict[bytes, Layout] = {}
    for grid in factorisations(len(speeds), len(axes) + 1):
        layout = layout_on(sized, speeds, dict(zip((*axes, REPLICA), grid, strict=True)))
        if layout is not None:
            by_boxes.setdefault(boxes_of(layout, sized.work, sized.samples).tobytes(), layout)
    return tuple(by_boxes.values())


def proportional(extent: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """``extent`` in shares in proportion to ``speeds``, rounded by the largest remainder, ties to the first."""
    exact = [extent * speed / sum(speeds) for speed in speeds]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda k: (round(shares[k] - exact[k], 9), k))
    for k in by_remainder[: extent - sum(shares)]:
        shares[k] += 1
    return tuple(shares)


def at_least_one(shares: Shares) -> tuple[int, ...]:
    """Shares with what the empty ones need taken from the largest; as they are if there is too little."""
    filled = list(shares)
    while 0 in filled and max(filled) > 1:
        filled[filled.index(max(filled))] -= 1
        filled[filled.index(0)] += 1
    return tuple(filled)


def most_margin(sized: SizedLayer, layout: Layout) -> int:
    """Most rows by which ranks may work beyond their parts: those of the smallest part, so that neighbours have them.

    0 where margins make no sense: the work is not the output, or it is cut along channels or not along space.
    """
    parts = {dim: len(points) - 1 for dim, points in layout.cuts.items()}
    if sized.work != sized.layer.outputs[0] or any(parts.get(dim, 1) > 1 for dim in AXES["channel"][1]):
        return 0
    own = boxes_of(layout, sized.work, sized.samples)
    lengths = own[..., 1] - own[..., 0]
    along = [position for position, dim in enumerate(sized.work.dims) if dim in SPACE and parts.get(dim, 1) > 1]
    return int(lengths[:, along].min()) if along else 0


def layout_on(sized: SizedLayer, speeds: tuple[float, ...], grid: Mapping[str, int]) -> Layout | None:
    """The grid (parts by axis of ``AXES``, or ``REPLICA``) as cut points; None if a part would be empty."""
    extents = dict(zip(sized.work.dims, sized.work.shape, strict=True))
    by_place = np.array(speeds).reshape([parts for parts in grid.values() if parts > 1] or [1])
    cuts: dict[str, tuple[int, ...]] = {}
    was_replica = ""
    place = 0
    for axis, parts in grid.items():
        if parts == 1:
            continue
        dim = next((d for d in AXES.get(axis, ("", ()))[1] if d in sized.divisible), None)
        if dim is None:
            name = was_replica or _unused(cuts)
            cuts[name] = cut_points((1,) * (parts * (len(cuts[name]) - 1 if was_replica else 1)))
            was_replica = name
        else:
            others = tuple(k for k in range(by_place.ndim) if k != place)
            extent = sized.samples if dim == SAMPLE else extents[dim]
            shares = at_least_one(proportional(extent, by_place.sum(axis=others).tolist()))
            if 0 in shares:
                return None
            cuts[dim] = cut_points(shares)
            was_replica = ""
        place += 1
    return Layout(cuts)


def _unused(cuts: Mapping[str, tuple[int, ...]]) -> str:
    number = sum(name.startswith(REPLICA) for name in cuts)
    return f"{REPLICA}{number + 1}" if number else REPLICA


@functools.cache
def factorisations(size: int, axes: int) -> tuple[tuple[int, ...], ...]:
    """Every way to write ``size`` as a product of ``axes`` ordered factors.

    Those with many parts along the first axes come first, and win ties: a cut of samples, then of height, leaves pieces
    that lie together in memory.
    """
    if axes == 1:
        return ((size,),)
    return tuple(
        (first, *rest)
        for first in range(size, 0, -1)
        if size % first == 0
        for rest in factorisations(size // first, axes - 1)
    )
