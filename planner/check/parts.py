"""The parts of a layer that the ranks of a group do, read off its access relation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.ir.box import Box, Interval, intersect, volume, whole
from planner.ir.graph import BYTES_PER_ELEMENT, SAMPLE, Layer, TensorSpec
from planner.ir.layout import Layout, scaled_intervals
from planner.ir.profile import Profile
from planner.layers import kind

Pieces = dict[tuple[int, int], int]
"""Bytes by (source, destination)."""


@dataclass(frozen=True, eq=False)
class Part:
    """One layer for one number of samples, by member of the group.

    Attributes:
        outputs, inputs, work: specs at that number of samples.
        own: boxes of the work.
        reads: box of each input.
        weights: box of each parameter; ``parameters``: their shapes.
    """

    layer: Layer
    layout: Layout
    outputs: tuple[TensorSpec, ...]
    inputs: tuple[TensorSpec, ...]
    work: TensorSpec
    samples: int
    own: tuple[Box, ...]
    reads: tuple[tuple[Box, ...], ...]
    weights: tuple[tuple[Box, ...], ...]
    parameters: tuple[tuple[int, ...], ...]

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
            return volume(self.own[member]) * max(1, self.samples) / whole_work / max(1, self.samples_of(member))
        return volume(self.own[member]) / whole_work


def part_of(profile: Profile, layer: Layer, layout: Layout, samples: int) -> Part:
    """The boxes of a layer."""
    graph = profile.graph
    values = graph.values()
    outputs = tuple(spec.at(samples, graph.samples) for spec in layer.outputs)
    sized = replace(layer, outputs=outputs)
    inputs = tuple(values[name].at(samples, graph.samples) for name in layer.inputs)
    parameters = tuple(graph.parameters[name] for name in layer.parameters)
    relation = kind(layer.kind)
    work = relation.work(sized, inputs)
    own = layout.boxes(work, samples)
    reads = []
    for box in own:
        asked = relation.input_boxes(sized, inputs, box)
        inside = [intersect(one, whole(spec.shape)) for one, spec in zip(asked, inputs, strict=True)]
        nothing = [tuple(Interval(0, 0) for _ in spec.shape) for spec in inputs]
        reads.append(tuple(one if one is not None else none for one, none in zip(inside, nothing, strict=True)))
    weights = tuple(relation.weight_boxes(sized, parameters, box) for box in own)
    return Part(
        sized,
        layout,
        outputs,
        inputs,
        work,
        samples,
        own,
        tuple(reads),
        weights,
        tuple(spec.shape for spec in parameters),
    )


def ways_to_contract(reader: Part, needed: list[Box], ranks: tuple[int, ...]) -> list[tuple[list[Box], Pieces]]:
    """Every way to share the input channels of a convolution or linear layer that is cut along its filters.

    Returns:
        For each number of ranks that share them (1 first): what each rank reads, and the partial sums that move.
    """
    found: list[tuple[list[Box], Pieces]] = [(needed, {})]
    dims = _contracted(reader)
    if dims is None:
        return found
    filters, channels_dim = dims
    name = reader.work.dims[filters]
    points = reader.layout.cuts.get(name, ())
    parts, channels = len(points) - 1, reader.inputs[0].shape[channels_dim]
    element = BYTES_PER_ELEMENT[reader.outputs[0].dtype]
    places = _grid_places(reader.layout)
    for ways in range(2, parts + 1):
        if parts % ways or channels < ways:
            continue
        shares = scaled_intervals(points if ways == parts else tuple(range(ways + 1)), channels)
        reads = []
        for place, box in zip(places, needed, strict=True):
            reads.append((*box[:channels_dim], shares[place[name] % ways], *box[channels_dim + 1 :]))
        sums: Pieces = {}
        for a, at in enumerate(places):
            for b, other in enumerate(places):
                same = all(at[d] == other[d] for d in at if d != name) and at[name] // ways == other[name] // ways
                if a != b and same:
                    sums[ranks[a], ranks[b]] = volume(reader.own[b]) * element
        found.append((reads, sums))
    return found


def _contracted(reader: Part) -> tuple[int, int] | None:
    """(dim of the work that is filters, dim of the first input that is contracted), where all channels are."""
    layer, work = reader.layer, reader.work
    if not layer.parameters or not layer.inputs:
        return None
    if layer.kind in ("conv", "transposed_conv"):
        kernel = layer.attributes.get("kernel")
        if layer.attributes.get("groups", 1) != 1 or not isinstance(kernel, tuple):
            return None
        return len(work.shape) - len(kernel) - 1, len(reader.inputs[0].shape) - len(kernel) - 1
    if layer.kind == "linear" and reader.parameters[0] == (work.shape[-1], reader.inputs[0].shape[-1]):
        return len(work.shape) - 1, len(reader.inputs[0].shape) - 1
    return None


def _grid_places(layout: Layout) -> list[dict[str, int]]:
    """The place of each member along each dim of the grid, the last dim running fastest."""
    found: list[dict[str, int]] = [{}]
    for dim, points in layout.cuts.items():
        found = [{**place, dim: k} for place in found for k in range(len(points) - 1)]
    return found
