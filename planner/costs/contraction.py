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

from planner.costs.boxes import Boxes, Counts, boxes_of, volumes
from planner.costs.sized import SizedLayer
from planner.ir.layout import Layout, scaled_intervals


@dataclass(frozen=True, slots=True)
class Contracted:
    """Which dim of the work makes filters, and which dim of the first input is contracted."""

    filters: str
    filters_dim: int
    input_dim: int


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


def contracted(sized: SizedLayer) -> Contracted | None:
    """The dims of a layer that contracts all input channels at once; None for others (grouped convolutions too)."""
    work, layer = sized.work, sized.layer
    if not sized.parameters or not sized.inputs:
        return None
    if layer.kind in ("conv", "transposed_conv"):
        kernel, groups = layer.attributes.get("kernel"), layer.attributes.get("groups", 1)
        if groups != 1 or not isinstance(kernel, tuple):
            return None
        filters = len(work.shape) - len(kernel) - 1
        return Contracted(work.dims[filters], filters, len(sized.inputs[0].shape) - len(kernel) - 1)
    if layer.kind == "linear" and _is_matrix(sized):
        last = len(work.shape) - 1
        return Contracted(work.dims[last], last, len(sized.inputs[0].shape) - 1)
    return None


def partial_sums(sized: SizedLayer, layout: Layout, needed: Boxes) -> tuple[PartialSums, ...]:
    """Every way to contract under ``layout``, ``c = 1`` first.

    Args:
        needed: what the ranks read of the first input if each gathers all channels.
    """
    ranks = len(needed)
    none = PartialSums(1, needed, np.zeros((ranks, ranks)))
    dims = contracted(sized)
    parts = len(layout.cuts.get(dims.filters, ())) - 1 if dims else 1
    if dims is None or parts < 2:
        return (none,)
    channels = sized.inputs[0].shape[dims.input_dim]
    return (none, *(_shared(sized, layout, needed, dims, c) for c in range(2, parts + 1) if _fits(c, parts, channels)))


def _shared(sized: SizedLayer, layout: Layout, needed: Boxes, dims: Contracted, ways: int) -> PartialSums:
    points = layout.cuts[dims.filters]
    parts = len(points) - 1
    place = _places(layout, dims.filters)
    block, turn = place // ways, place % ways
    channels = sized.inputs[0].shape[dims.input_dim]
    even = points if ways == parts else tuple(range(ways + 1))
    shares = np.array([(part.start, part.stop) for part in scaled_intervals(even, channels)])
    read = needed.copy()
    read[:, dims.input_dim] = shares[turn]
    own = boxes_of(layout, sized.work, sized.samples)
    # Ranks alike but for their turn sum their parts; each then holds its own filters.
    names = [name for name in layout.cuts if name != dims.filters]
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


def _is_matrix(sized: SizedLayer) -> bool:
    """Whether the layer is a product with its own weight ``[out, in]``."""
    weight = sized.parameters[0].shape
    return weight == (sized.work.shape[-1], sized.inputs[0].shape[-1])
