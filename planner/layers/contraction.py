"""Layers whose input channels are shared: who reads, makes, sums and keeps what.  Pure integers.

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

Ranks that differ along another dim of the grid (samples, space, replicas) have blocks of their own.  The planner's
arrays (``planner.costs.shards.contraction``) say the same for many layouts at once; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from planner.ir.box import Box, Interval, Transfer, volume
from planner.ir.errors import UnsupportedModelError
from planner.ir.graph import SAMPLE, Layer, TensorSpec
from planner.ir.layout import Layout, scaled_intervals
from planner.layers import is_convolution, kind

Specs = tuple[TensorSpec, ...]
Boxes = tuple[Box, ...]


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


@dataclass(frozen=True, slots=True)
class Contraction:
    """How the ranks of a stage, by position, contract the first input of a layer.

    Attributes:
        along: the dim of the work whose parts are a block's: the filters, or another one.
        needed: of the first input: some of its channels; may reach outside the tensor along space.
        made: the box of the work of which a rank makes partial sums: its part, but all that its block has ``along``.
        groups: the ranks that make partial sums of the same box, this one included, by growing position.
        weights: what each rank uses, by parameter.
        transfers: partial sums that move; the box is the destination's own part.
    """

    dims: ContractedDims
    along: int
    needed: Boxes
    made: Boxes
    groups: tuple[tuple[int, ...], ...]
    weights: tuple[Boxes, ...]
    transfers: tuple[Transfer, ...]


def contracted_dims(layer: Layer, inputs: Specs, parameters: Specs) -> ContractedDims | None:
    """The dims of a layer that contracts all its input channels at once with a weight of its own; None for others.

    The channels of an embedding are the entries of its table.
    """
    if not inputs or not parameters:
        return None
    data, weight, output = inputs[0].shape, parameters[0].shape, layer.outputs[0].shape
    if layer.kind == "linear":
        dims = ContractedDims(len(output) - 1, len(data) - 1, 0, 1, data[:-1] == output[:-1])
        return dims if weight == (output[-1], data[-1]) else None
    if layer.kind == "embedding":
        return ContractedDims(len(output) - 1, None, 1, 0, True) if len(weight) == 2 and output[:-1] == data else None
    kernel = layer.attributes.get("kernel")
    if not is_convolution(layer.kind) or not isinstance(kernel, tuple):
        return None
    filters, channels = len(output) - len(kernel) - 1, len(data) - len(kernel) - 1
    of_weight = (0, 1) if layer.kind == "conv" else (1, 0)
    dims = ContractedDims(filters, channels, *of_weight)
    extents = (output[filters], data[channels])
    is_whole = tuple(weight[dim] for dim in of_weight) == extents and weight[2:] == kernel
    return dims if is_whole and layer.attributes.get("groups", 1) == 1 else None


def contraction_of(
    layer: Layer, inputs: Specs, parameters: Specs, layout: Layout, ways: int, own: Boxes
) -> Contraction:
    """How ``ways`` ranks share the input channels of ``layer``.

    Args:
        layer, inputs: with specs for the same number of samples.
        own: the part of the work that ``layout`` gives each rank.

    Raises:
        UnsupportedModelError: the layer cannot be computed so.
    """
    dims = contracted_dims(layer, inputs, parameters)
    if dims is None:
        raise _refusal(layer, "it is no linear map, embedding or convolution (of one group) with a weight of its own")
    channels = num_channels(dims, inputs, parameters)
    along = dims.shared(layer, layout, ways) if ways >= 1 else None
    if along is None or ways > channels or (ways > 1 and layer.outputs[0].shape[along] == 1):
        grid = ", ".join(f"{len(points) - 1} along {dim}" for dim, points in layout.cuts.items())
        raise _refusal(layer, f"{ways} ranks would share {channels} channels, and its parts are {grid or 'one'}")
    name = layer.outputs[0].dims[along]
    points = layout.cuts.get(name, (0, 1))
    parts = len(points) - 1
    places = tuple(_place(place, tuple(layout.cuts), name) for place in _grid(layout))
    shares = scaled_intervals(points if ways == parts else tuple(range(ways + 1)), channels)
    blocks = [(others, place // ways) for others, place in places]
    groups = tuple(tuple(at for at, other in enumerate(blocks) if other == block) for block in blocks)
    joined = [_joined([own[member][along] for member in group]) for group in groups]
    made = tuple(_with(box, along, of_block) for box, of_block in zip(own, joined, strict=True))
    mine = [shares[place % ways] for _, place in places]
    relation = kind(layer.kind)
    read = [relation.input_boxes(layer, inputs, box)[0] for box in made]
    used = [relation.weight_boxes(layer, parameters, box) for box in own]
    first = [relation.weight_boxes(layer, parameters, box)[0] for box in made]
    if dims.channels is not None:
        read = [_with(box, dims.channels, share) for box, share in zip(read, mine, strict=True)]
    return Contraction(
        dims,
        along,
        tuple(read),
        made,
        groups,
        tuple(
            (_with(box, dims.weight_channels, share), *others[1:])
            for box, share, others in zip(first, mine, used, strict=True)
        ),
        tuple(
            Transfer(src, dst, own[dst])
            for dst, group in enumerate(groups)
            for src in group
            if src != dst and volume(own[dst])
        ),
    )


def num_channels(dims: ContractedDims, inputs: Specs, parameters: Specs) -> int:
    """How many channels there are to share."""
    return parameters[0].shape[dims.weight_channels] if dims.channels is None else inputs[0].shape[dims.channels]


def _grid(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """The place of each rank in the grid, by position."""
    return tuple(product(*(range(len(points) - 1) for points in layout.cuts.values())))


def _place(place: tuple[int, ...], dims: tuple[str, ...], name: str) -> tuple[tuple[int, ...], int]:
    """The place along all dims but ``name``, and along that one."""
    if name not in dims:
        return place, 0
    at = dims.index(name)
    return (*place[:at], *place[at + 1 :]), place[at]


def _joined(intervals: list[Interval]) -> Interval:
    """From the first to the last; the empty ones do not count, unless all are."""
    filled = [interval for interval in intervals if len(interval)] or intervals[:1]
    return Interval(min(interval.start for interval in filled), max(interval.stop for interval in filled))


def _with(box: Box, dim: int, interval: Interval) -> Box:
    return (*box[:dim], interval, *box[dim + 1 :])


def _refusal(layer: Layer, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"layer {layer.name} ({layer.kind}) cannot be computed with shared input channels",
        [why],
        ["ways = 1 for that layer: each rank then reads all channels", "cut it along samples or space instead"],
    )
