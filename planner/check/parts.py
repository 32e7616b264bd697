"""The parts of a layer that the ranks of a group do, read off its access relation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.ir.box import Box, Interval, intersect, volume, whole
from planner.ir.graph import BYTES_PER_ELEMENT, SAMPLE, Layer, TensorSpec
from planner.ir.layout import Layout, scaled_intervals
from planner.ir.plan import Placement
from planner.ir.profile import Profile
from planner.layers import kind
from planner.layers.contraction import contracted_dims

SPACE = ("depth", "height", "width")
Pieces = dict[tuple[int, int], int]
"""Bytes by (source, destination)."""


@dataclass(frozen=True, eq=False)
class Part:
    """One layer for one number of samples, by member of the group.

    Attributes:
        ways, margin: as in :class:`Placement`.
        outputs, inputs, work: specs at that number of samples.
        own: boxes of the work; ``done``: with the margin.
        reads: box of each input.
        weights: box of each parameter; ``parameters``: their specs.
    """

    layer: Layer
    layout: Layout
    ways: int
    margin: int
    outputs: tuple[TensorSpec, ...]
    inputs: tuple[TensorSpec, ...]
    work: TensorSpec
    samples: int
    own: tuple[Box, ...]
    done: tuple[Box, ...]
    reads: tuple[tuple[Box, ...], ...]
    weights: tuple[tuple[Box, ...], ...]
    parameters: tuple[TensorSpec, ...]

    def samples_of(self, member: int) -> int:
        """Samples of the member's part."""
        if SAMPLE not in self.work.dims or not self.samples:
            return self.samples
        dim = self.work.dims.index(SAMPLE)
        return len(self.own[member][dim]) // max(1, self.work.shape[dim] // self.samples)

    def share(self, member: int) -> float:
        """The member's work over that of as many whole samples."""
        whole_work = volume(whole(self.work.shape)) or 1
        if SAMPLE in self.work.dims:
            return volume(self.done[member]) * max(1, self.samples) / whole_work / max(1, self.samples_of(member))
        return volume(self.done[member]) / whole_work

    def extents(self, member: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of what the member does, and of all of the work; without those of samples."""
        apart = [dim for dim, name in enumerate(self.work.dims) if name != SAMPLE]
        return tuple(len(self.done[member][dim]) for dim in apart), tuple(self.work.shape[dim] for dim in apart)

    def owned(self, output: int) -> tuple[Box, ...]:
        """What each member answers for of an output."""
        return self.layout.boxes(self.outputs[output], self.samples)

    def held(self, output: int) -> tuple[Box, ...]:
        """What each member makes of an output."""
        return tuple(wider(box, self.outputs[output], self.layout, self.margin) for box in self.owned(output))


def wider(box: Box, spec: TensorSpec, layout: Layout, margin: int) -> Box:
    """``box`` with ``margin`` rows more on both sides along each dim of space that is cut, inside the tensor."""
    found = []
    for dim, interval, extent in zip(spec.dims, box, spec.shape, strict=True):
        rows = margin if dim in SPACE and dim in layout.cuts and volume(box) else 0
        found.append(Interval(max(0, interval.start - rows), min(extent, interval.stop + rows)) if rows else interval)
    return tuple(found)


def part_of(profile: Profile, layer: Layer, placement: Placement, samples: int) -> Part:
    """The boxes of a layer."""
    graph, layout = profile.graph, placement.layout
    values = graph.values()
    outputs = tuple(spec.at(samples, graph.samples) for spec in layer.outputs)
    sized = replace(layer, outputs=outputs)
    inputs = tuple(values[name].at(samples, graph.samples) for name in layer.inputs)
    parameters = tuple(graph.parameters[name] for name in layer.parameters)
    relation = kind(layer.kind)
    work = relation.work(sized, inputs)
    own = layout.boxes(work, samples)
    done = tuple(wider(box, work, layout, placement.margin) for box in own)
    reads = []
    for box in done:
        asked = relation.input_boxes(sized, inputs, box)
        inside = [intersect(one, whole(spec.shape)) for one, spec in zip(asked, inputs, strict=True)]
        nothing = [tuple(Interval(0, 0) for _ in spec.shape) for spec in inputs]
        reads.append(tuple(one if one is not None else none for one, none in zip(inside, nothing, strict=True)))
    weights = tuple(relation.weight_boxes(sized, parameters, box) for box in done)
    return Part(
        sized,
        layout,
        placement.ways,
        placement.margin,
        outputs,
        inputs,
        work,
        samples,
        own,
        done,
        tuple(reads),
        weights,
        parameters,
    )


def shared_channels(reader: Part, needed: list[Box], ranks: tuple[int, ...]) -> tuple[list[Box], Pieces]:
    """How a layer that is cut along its filters shares its input channels: what is read, and partial sums that move."""
    dims = contracted_dims(reader.layer, reader.inputs, reader.parameters) if reader.ways > 1 else None
    if dims is None:
        return needed, {}
    name = reader.work.dims[dims.filters]
    points, channels = reader.layout.cuts[name], reader.inputs[0].shape[dims.channels]
    element = BYTES_PER_ELEMENT[reader.outputs[0].dtype]
    places, ways = _grid_places(reader.layout), reader.ways
    shares = scaled_intervals(points if ways == len(points) - 1 else tuple(range(ways + 1)), channels)
    reads = []
    for place, box in zip(places, needed, strict=True):
        reads.append((*box[: dims.channels], shares[place[name] % ways], *box[dims.channels + 1 :]))
    sums: Pieces = {}
    for a, at in enumerate(places):
        for b, other in enumerate(places):
            same = all(at[d] == other[d] for d in at if d != name) and at[name] // ways == other[name] // ways
            if a != b and same:
                sums[ranks[a], ranks[b]] = volume(reader.own[b]) * element
    return reads, sums


def _grid_places(layout: Layout) -> list[dict[str, int]]:
    """The place of each member along each dim of the grid, the last dim running fastest."""
    found: list[dict[str, int]] = [{}]
    for dim, points in layout.cuts.items():
        found = [{**place, dim: k} for place in found for k in range(len(points) - 1)]
    return found
