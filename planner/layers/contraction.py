"""Layers whose input channels are shared: who reads, makes, sums and keeps what.

A layer that is cut into p parts along its filters may be computed in several ways (Dryden et al., SC 2019).  With
``ways`` = c, blocks of c neighbouring parts share the input channels:

    c = 2, p = 4        filters    0 1 2 3   4 5 6 7          rank 1 (block 0, turn 1)
    made by             ranks      { 0  1 }  { 2  3 }         reads   the second half of the input channels
    kept by             ranks      0   1     2   3            makes   partial sums of the filters 0 to 3
                                                              sends   those of 0 and 1 to rank 0
                                                              adds    rank 0's of 2 and 3 to its own, and keeps them

A linear map or an embedding that is not cut along its filters may share its input channels along another dim (time):
partial sums of all filters and of the block's places are made, and each rank keeps its own places.  That is the second
product of a tensor-parallel pair under sequence parallelism (Korthikanti et al. 2022, section 4.2.2), its scatter the
reduce-scatter; and of an embedding, whose channels are the entries of its table, the vocabulary-parallel one (Shoeybi
et al. 2019, section 3).

Ranks that differ along another dim of the grid (samples, space, replicas) have blocks of their own.  All ways use the
same share of the work and of the weight, so what decides is what moves: input channels are gathered for small c,
partial sums are scattered for large c.  The backward pass is the adjoint, with the same messages the other way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.ir.errors import UnsupportedModelError
from planner.ir.graph import SAMPLE, Layer
from planner.ir.layout import Layout, scaled_intervals
from planner.layers._kinds import is_convolution
from planner.layers._rules import Specs
from planner.layers.boxes import Array, BoxArray, Flags, as_boxes, grid_of, volumes
from planner.layers.sized import SizedLayer


@dataclass(frozen=True, slots=True)
class ContractedDims:
    """The dims that a contraction is about.

    Attributes:
        filters: of the work.
        channels: of the first input; None: its elements choose among the channels (an embedding's indices).
        weight_filters, weight_channels: of the weight, the layer's first parameter.
        others: whether places are apart, so that channels may be shared along another dim of the work than the filters.
    """

    filters: int
    channels: int | None
    weight_filters: int
    weight_channels: int
    others: bool = False

    def shared(self, layer: Layer, layout: Layout, ways: int) -> int | None:
        """The dim of the work along which blocks of ``ways`` parts share the channels; None: there is none.

        The filters where they are cut, else the last dim of the grid, samples aside, that ``ways`` divide.
        """
        names = layer.outputs[0].dims
        parts = {dim: len(points) - 1 for dim, points in layout.cuts.items() if len(points) > 2}
        if names[self.filters] in parts or not self.others:
            return self.filters if parts.get(names[self.filters], 1) % ways == 0 else None
        fit = [dim for dim, count in parts.items() if dim in names and dim != SAMPLE and count % ways == 0]
        return names.index(fit[-1]) if fit else None


@dataclass(frozen=True, slots=True, eq=False)
class Contraction:
    """How the ranks of a stage, by position, contract the first input of a layer.

    Attributes:
        ways: c, ranks that share the input channels.
        along: the dim of the work whose parts are a block's: the filters, or another one.
        own: ``[ranks, dims, 2]``: the part of the work that each rank keeps.
        made: that of which it makes partial sums: its part, but all that its block has ``along``.
        needed: of the first input: some of its channels; may reach outside the tensor along space.
        weight: what each rank uses of the weight.
        together: ``[ranks, ranks]``: who makes partial sums of the same box.
    """

    dims: ContractedDims
    ways: int
    along: int
    own: BoxArray
    made: BoxArray
    needed: BoxArray
    weight: BoxArray
    together: Flags

    @property
    def scattered(self) -> Array:
        """``[source, destination]`` elements of partial sums that move: each destination gets its own part."""
        return np.where(self.together & ~np.eye(len(self.own), dtype=bool), volumes(self.own)[None, :], 0.0)

    def pairs(self) -> list[tuple[int, int]]:
        """(source, destination) of partial sums that move, ordered by destination."""
        return [(src, dst) for dst, src in np.argwhere(self.scattered.T).tolist()]


def contracted_dims(layer: Layer, inputs: Specs, parameters: Specs) -> ContractedDims | None:
    """The dims of a layer that contracts all its input channels at once with a weight of its own; None for others.

    The channels of an embedding are the entries of its table.
    """
    if not inputs or not parameters:
        return None
    data = inputs[0].shape
    weight = parameters[0].shape
    output = layer.outputs[0].shape
    if layer.kind == "linear":
        dims = ContractedDims(len(output) - 1, len(data) - 1, 0, 1, data[:-1] == output[:-1])
        return dims if weight == (output[-1], data[-1]) else None
    if layer.kind == "embedding":
        return ContractedDims(len(output) - 1, None, 1, 0, True) if len(weight) == 2 and output[:-1] == data else None
    kernel = layer.attributes.get("kernel")
    if not is_convolution(layer.kind) or not isinstance(kernel, tuple):
        return None
    filters = len(output) - len(kernel) - 1
    channels = len(data) - len(kernel) - 1
    of_weight = (0, 1) if layer.kind == "conv" else (1, 0)
    dims = ContractedDims(filters, channels, *of_weight)
    extents = (output[filters], data[channels])
    whole_weight = (
        *(extents if layer.kind == "conv" else extents[::-1]),
        *kernel,
    )  # one may be computed
    return dims if weight == whole_weight and layer.attributes.get("groups", 1) == 1 else None


def num_channels(dims: ContractedDims, inputs: Specs, parameters: Specs) -> int:
    """How many channels there are to share."""
    return parameters[0].shape[dims.weight_channels] if dims.channels is None else inputs[0].shape[dims.channels]


def contractions_of(sized: SizedLayer, layout: Layout, own: BoxArray, ways: int = 0) -> tuple[Contraction, ...]:
    """The ways to share input channels under ``layout``, beside each rank reading them all.

    Args:
        own: ``[ranks, dims, 2]``: the part of the work that each rank keeps.
        ways: the only c wanted; 0: any, along the filters (an embedding has these of any entry without a message).
    """
    dims = contracted_dims(sized.layer, sized.inputs, sized.parameters)
    if dims is None:
        return ()
    parts = 0 if dims.channels is None else len(layout.cuts.get(sized.work.dims[dims.filters], (0, 1))) - 1
    channels = num_channels(dims, sized.inputs, sized.parameters)
    several = (c for c in ((ways,) if ways else range(2, parts + 1)) if 1 < c <= channels)
    return tuple(
        _contraction(sized, layout, own, dims, c, along)
        for c in several
        if (along := dims.shared(sized.layer, layout, c)) is not None and sized.work.shape[along] > 1
    )


def _contraction(
    sized: SizedLayer, layout: Layout, own: BoxArray, dims: ContractedDims, ways: int, along: int
) -> Contraction:
    name = sized.work.dims[along]
    axes, block = grid_of(layout)
    turn = block[axes.index(name)] % ways
    block[axes.index(name)] //= ways
    together = (block[:, :, None] == block[:, None, :]).all(axis=0)
    points = layout.cuts[name] if ways == len(layout.cuts[name]) - 1 else tuple(range(ways + 1))
    channels = num_channels(dims, sized.inputs, sized.parameters)
    shares = as_boxes((scaled_intervals(points, channels),))[0][turn]
    made = own.copy()
    made[:, along, 0] = np.where(together, own[:, along, 0], sized.work.shape[along]).min(axis=1)
    made[:, along, 1] = np.where(together, own[:, along, 1], 0).max(axis=1)
    needed = sized.read(made)[0][0]
    if dims.channels is not None:
        needed[:, dims.channels] = shares
    weight = np.array([[(0, extent) for extent in sized.parameters[0].shape]] * len(own), dtype=np.int64)
    weight[:, dims.weight_filters] = made[:, dims.filters]
    weight[:, dims.weight_channels] = shares
    return Contraction(dims, ways, along, own, made, needed, weight, together)


def refused(sized: SizedLayer, layout: Layout, ways: int) -> UnsupportedModelError:
    """The refusal of a layer of which ``ways`` ranks cannot share the input channels."""
    dims = contracted_dims(sized.layer, sized.inputs, sized.parameters)
    layer = sized.layer
    if dims is None:
        why = "it is no linear map, embedding or convolution (of one group) with a weight of its own"
    else:
        grid = ", ".join(f"{len(points) - 1} along {dim}" for dim, points in layout.cuts.items())
        channels = num_channels(dims, sized.inputs, sized.parameters)
        why = f"{ways} ranks would share {channels} channels, and its parts are {grid or 'one'}"
    return UnsupportedModelError(
        f"layer {layer.name} ({layer.kind}) cannot be computed with shared input channels",
        [why],
        ["ways = 1 for that layer: each rank then reads all channels", "cut it along samples or space instead"],
    )
