"""Convolutions and linear layers over channels and filters: who contracts what (Dryden et al., SC 2019).

A layer whose output is cut into p parts along its channels may be computed in several ways, all of which use the same
share of the work and of the weight:

    c = 1  (y-stationary)    each rank gathers all input channels and makes its own filters
    c = p  (x-stationary)    each rank reads 1/p of the input channels, makes partial sums of all filters, and these are
                             summed and scattered
    between (w-stationary)   c ranks share the input channels of p / c blocks of filters

so what decides is what moves: input channels are gathered for small c, partial sums are scattered for large c.  The
backward pass is the adjoint, with the same messages the other way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.costs.shards.boxes import Boxes, Counts, boxes_of, volumes
from planner.costs.shards.shapes import SizedLayer
from planner.ir.layout import Layout, scaled_intervals
from planner.layers.contraction import contracted_dims


@dataclass(frozen=True, slots=True, eq=False)
class PartialSums:
    """One way to contract.

    Attributes:
        ways: c, ranks that share the input channels.
        needed: ``[ranks, dims, 2]`` of the first input.
        scattered: ``[source, destination]`` elements of partial sums that move.
    """

    ways: int
    needed: Boxes
    scattered: Counts


def partial_sums(sized: SizedLayer, layout: Layout, needed: Boxes, ways: int = 0) -> tuple[PartialSums, ...]:
    """Every way to contract under ``layout``, ``c = 1`` first.

    Args:
        needed: what the ranks read of the first input if each gathers all channels.
        ways: the only c wanted (1 where there is no such way); 0: any.
    """
    ranks = len(needed)
    none = PartialSums(1, needed, np.zeros((ranks, ranks)))
    dims = contracted_dims(sized.layer, sized.inputs, sized.parameters)
    if dims is None:
        return (none,)
    filters = sized.work.dims[dims.filters]
    parts = len(layout.cuts.get(filters, (0, 1))) - 1
    channels = sized.inputs[0].shape[dims.channels]
    dims_of = (filters, dims.channels)
    if ways:
        is_shared = ways > 1 and _fits(ways, parts, channels)
        return (_shared(sized, layout, needed, dims_of, ways) if is_shared else none,)
    several = (c for c in range(2, parts + 1) if _fits(c, parts, channels))
    return (none, *(_shared(sized, layout, needed, dims_of, c) for c in several))


def _shared(sized: SizedLayer, layout: Layout, needed: Boxes, dims: tuple[str, int], ways: int) -> PartialSums:
    """The way of ``ways`` ranks.

    Args:
        dims: name of the filters, and position of the channels in the first input.
    """
    filters, channels_dim = dims
    points = layout.cuts[filters]
    parts = len(points) - 1
    place = _places(layout, filters)
    block, turn = place // ways, place % ways
    channels = sized.inputs[0].shape[channels_dim]
    even = points if ways == parts else tuple(range(ways + 1))
    shares = np.array([(part.start, part.stop) for part in scaled_intervals(even, channels)])
    read = needed.copy()
    read[:, channels_dim] = shares[turn]
    own = boxes_of(layout, sized.work, sized.samples)
    # Ranks alike but for their turn sum their parts; each then holds its own filters.
    names = [name for name in layout.cuts if name != filters]
    others = np.array([_places(layout, name) for name in names]).reshape(len(names), len(place))
    group = np.vstack([others, block[None]])
    together = (group[:, :, None] == group[:, None, :]).all(axis=0)
    apart = together & ~np.eye(len(place), dtype=bool)
    return PartialSums(ways, read, np.where(apart, volumes(own)[None, :], 0.0))


def _places(layout: Layout, name: str) -> NDArray[np.int64]:
    """The position of each rank along one dim of the grid."""
    parts = [len(points) - 1 for points in layout.cuts.values()]
    found: NDArray[np.int64] = np.indices(parts).reshape(len(parts), -1)[list(layout.cuts).index(name)]
    return found


def _fits(ways: int, parts: int, channels: int) -> bool:
    return parts % ways == 0 and channels >= ways
