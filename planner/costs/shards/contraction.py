"""Convolutions and linear layers over channels and filters: who contracts what (Dryden et al., SC 2019).

A layer whose output is cut into p parts along its channels may be computed in several ways, all of which use the same
share of the work and of the weight:

    c = 1  (y-stationary)    each rank gathers all input channels and makes its own filters
    c = p  (x-stationary)    each rank reads 1/p of the input channels, makes partial sums of all filters, and these are
                             summed and scattered
    between (w-stationary)   c ranks share the input channels of p / c blocks of filters

so what decides is what moves: input channels are gathered for small c, partial sums are scattered for large c.  The
backward pass is the adjoint, with the same messages the other way.  Linear layers and embeddings whose filters are not
cut may share channels along another dim (``planner.layers.contraction``) where a plan says so; no search tries it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.costs.shards.boxes import Boxes, Counts, boxes_of, volumes
from planner.ir.layout import Layout, scaled_intervals
from planner.layers.contraction import ContractedDims, contracted_dims, num_channels
from planner.layers.sized import SizedLayer


@dataclass(frozen=True, slots=True, eq=False)
class PartialSums:
    """One way to contract.

    Attributes:
        ways: c, ranks that share the input channels.
        needed: ``[ranks, dims, 2]`` of the first input.
        scattered: ``[source, destination]`` elements of partial sums that move.
        weight: ``[ranks, dims, 2]`` of the weight, where that is another than each rank would use alone; else None.
    """

    ways: int
    needed: Boxes
    scattered: Counts
    weight: Boxes | None = None


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
    channels = num_channels(dims, sized.inputs, sized.parameters)
    if ways:
        along = dims.shared(sized.layer, layout, ways)
        is_shared = ways > 1 and along is not None and channels >= ways
        return (_shared(sized, layout, needed, dims, ways) if is_shared else none,)
    parts = len(layout.cuts.get(sized.work.dims[dims.filters], (0, 1))) - 1
    if dims.channels is None:
        return (none,)  # an embedding has every filter of any entry without a message
    several = (c for c in range(2, parts + 1) if parts % c == 0 and channels >= c)
    return (none, *(_shared(sized, layout, needed, dims, c) for c in several))


def _shared(sized: SizedLayer, layout: Layout, needed: Boxes, dims: ContractedDims, ways: int) -> PartialSums:
    """The way of ``ways`` ranks, which there is."""
    shared = dims.shared(sized.layer, layout, ways)
    along = dims.filters if shared is None else shared
    name = sized.work.dims[along]
    points = layout.cuts[name]
    parts = len(points) - 1
    place = _places(layout, name)
    block, turn = place // ways, place % ways
    channels = num_channels(dims, sized.inputs, sized.parameters)
    even = points if ways == parts else tuple(range(ways + 1))
    shares = np.array([(part.start, part.stop) for part in scaled_intervals(even, channels)])
    read = needed.copy()
    own = boxes_of(layout, sized.work, sized.samples)
    # Ranks alike but for their turn sum their parts; each then holds its own filters.
    names = [other for other in layout.cuts if other != name]
    others = np.array([_places(layout, other) for other in names]).reshape(len(names), len(place))
    group = np.vstack([others, block[None]])
    together = (group[:, :, None] == group[:, None, :]).all(axis=0)
    apart = together & ~np.eye(len(place), dtype=bool)
    weight = None
    if along != dims.filters:
        weight = np.tile(np.array([[0, extent] for extent in sized.parameters[0].shape]), (len(place), 1, 1))
        weight[:, dims.weight_channels] = shares[turn]
        read = _of_block(read, along, together)
    if dims.channels is not None:
        read[:, dims.channels] = shares[turn]
    return PartialSums(ways, read, np.where(apart, volumes(own)[None, :], 0.0), weight)


def _places(layout: Layout, name: str) -> NDArray[np.int64]:
    """The position of each rank along one dim of the grid."""
    parts = [len(points) - 1 for points in layout.cuts.values()]
    places: NDArray[np.int64] = np.indices(parts).reshape(len(parts), -1)[list(layout.cuts).index(name)]
    return places


def _of_block(read: Boxes, along: int, together: NDArray[np.bool_]) -> Boxes:
    """What the ranks of each block read along a dim that places keep, by rank; ranks that read nothing do not count."""
    of_block = read.copy()
    reads = volumes(read) > 0
    for rank, members in enumerate(together):
        some = members & reads
        if some.any():
            of_block[rank] = read[some][0]
            of_block[rank, along] = read[some, along, 0].min(), read[some, along, 1].max()
    return of_block
