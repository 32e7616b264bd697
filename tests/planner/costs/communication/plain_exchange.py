"""What passes between the layers of a stage, written a second time, by loops over ranks and boxes: an oracle for tests.

Boxes come from the layers' access relations and what moves from ``tests.oracles.boxes.transfers``; the rest follows the
module docstring of ``planner.costs.communication.resharding`` and none of its code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from planner.ir.box import Box, Interval, Transfer, intersect, volume, whole
from planner.ir.graph import BYTES_PER_ELEMENT, Layer, TensorSpec, producer
from planner.ir.layout import Layout, scaled_intervals
from planner.ir.plan import Placement
from planner.ir.profile import Profile
from planner.layers import is_convolution, kind
from planner.layers.backward_halo import backward_halo
from planner.layers.contraction import contracted_dims
from planner.layers.division import LayerDivision
from tests.oracles.boxes import SPACE, grown, parts, transfers
from tests.planner.costs.plain_prices import message_s

Pieces = dict[tuple[int, int], int]
"""Bytes by (source, destination)."""


@dataclass(frozen=True, eq=False)
class Part:
    """One layer for one number of samples, by member of the group.

    Attributes:
        placement: its layout, ways to contract, and margin.
        inputs, parameters, work: specs at that number of samples; outputs are the layer's.
        own: boxes of the work; ``reads``: of each input, of the work with its margin.
    """

    layer: Layer
    placement: Placement
    inputs: tuple[TensorSpec, ...]
    parameters: tuple[TensorSpec, ...]
    work: TensorSpec
    samples: int
    own: tuple[Box, ...]
    reads: tuple[tuple[Box, ...], ...]

    @property
    def layout(self) -> Layout:
        return self.placement.layout

    def owned(self, output: int) -> tuple[Box, ...]:
        """What each member answers for of an output."""
        return parts(self.layout, self.layer.outputs[output], self.samples)

    def held(self, output: int) -> tuple[Box, ...]:
        """What each member makes of an output."""
        spec = self.layer.outputs[output]
        return tuple(grown(box, spec, self.layout, self.placement.margin) for box in self.owned(output))


def part_of(profile: Profile, layer: Layer, placement: Placement, samples: int) -> Part:
    """The boxes of a layer."""
    graph = profile.graph
    layout = placement.layout
    values = graph.values()
    sized = replace(layer, outputs=tuple(spec.at(samples, graph.samples) for spec in layer.outputs))
    inputs = tuple(values[name].at(samples, graph.samples) for name in layer.inputs)
    relation = kind(layer.kind)
    work = relation.work(sized, inputs)
    own = parts(layout, work, samples)
    nothing = [tuple(Interval(0, 0) for _ in spec.shape) for spec in inputs]
    reads = []
    for box in own:
        asked = relation.input_boxes(sized, inputs, grown(box, work, layout, placement.margin))
        inside = [intersect(one, whole(spec.shape)) for one, spec in zip(asked, inputs, strict=True)]
        reads.append(tuple(none if one is None else one for one, none in zip(inside, nothing, strict=True)))
    parameters = tuple(graph.parameters[name] for name in layer.parameters)
    return Part(sized, placement, inputs, parameters, work, samples, own, tuple(reads))


def shared_channels(reader: Part, needed: list[Box], ranks: tuple[int, ...]) -> tuple[list[Box], Pieces]:
    """How a layer that is cut along its filters shares its input channels: what is read, and partial sums that move."""
    dims = contracted_dims(reader.layer, reader.inputs, reader.parameters) if reader.placement.ways > 1 else None
    if dims is None:
        return needed, {}
    name = reader.work.dims[dims.filters]
    points = reader.layout.cuts[name]
    channels = reader.inputs[0].shape[dims.channels]
    element = BYTES_PER_ELEMENT[reader.layer.outputs[0].dtype]
    places = _grid_places(reader.layout)
    ways = reader.placement.ways
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


@dataclass(frozen=True)
class Crossing:
    """A value that passes between two layers: seconds, what is received, and whether it is the rim of each part."""

    maker: str
    reader: str
    forward_s: float
    backward_s: float
    pieces: Pieces
    is_halo: bool


@dataclass(frozen=True, eq=False)
class Moving:
    """The messages inside a stage for micro-batches of ``samples``.

    Attributes:
        parts: of its layers, by name, in the graph's order.
    """

    profile: Profile
    placements: Mapping[str, Placement]
    ranks: tuple[int, ...]
    samples: int
    parts: Mapping[str, Part]

    @cached_property
    def crossings(self) -> list[Crossing]:
        """Each value that a layer of the stage reads from another."""
        found = []
        for reader in self.parts.values():
            for position, name in enumerate(reader.layer.inputs):
                if producer(name) in self.parts and reader.layer.inputs.index(name) == position:
                    found.append(self._crossing(self.parts[producer(name)], reader, name, position))
        return found

    def _crossing(self, maker: Part, reader: Part, name: str, position: int) -> Crossing:
        output = int(name.partition(":")[2] or 0)
        spec = maker.layer.outputs[output]
        owned = maker.owned(output)
        held = maker.held(output)
        reads = [self._hull(reader, member, name) for member in range(len(self.ranks))]
        sums: Pieces = {}
        if position == 0:
            reads, sums = shared_channels(reader, reads, self.ranks)
        pieces = self._moved(owned, held, reads, BYTES_PER_ELEMENT[spec.dtype])
        grids = [[(dim, len(points)) for dim, points in part.layout.cuts.items()] for part in (maker, reader)]
        is_halo = grids[0] == grids[1] and (reader.placement.ways == 1 or position > 0)
        for has, wants in zip(held, reads, strict=True):
            for dim, there, wanted in zip(spec.dims, has, wants, strict=True):
                inside = there.start <= wanted.start and wanted.stop <= there.stop
                is_halo = is_halo and (dim in SPACE or inside or not volume(wants))
        seconds = self.exchange_s(pieces) + self.exchange_s(sums)
        back_s = seconds if spec.is_float else 0.0
        if is_halo and position == 0 and pieces:
            halo_s = self._halo_of_dy_s(maker, reader, held, transfers(dict(enumerate(owned)), dict(enumerate(reads))))
            back_s = back_s if halo_s is None else halo_s
        return Crossing(maker.layer.name, reader.layer.name, seconds, back_s, pieces, is_halo)

    def _halo_of_dy_s(
        self, maker: Part, reader: Part, held: tuple[Box, ...], needed: tuple[Transfer, ...]
    ) -> float | None:
        """Seconds of a convolution's halo of dy; None where that of dx is what moves backward."""
        names = [name for name in reader.layer.inputs if producer(name) == maker.layer.name]
        if not is_convolution(reader.layer.kind) or len(names) > 1:
            return None
        placement = self.placements[reader.layer.name]
        division = LayerDivision.of(reader.layer, reader.inputs, reader.parameters, placement, self.samples)
        moves = [move for move in needed if move.src != move.dst and intersect(move.box, held[move.dst]) is None]
        halo = backward_halo(division, held, moves)
        if halo is None or not halo.is_dy:
            return None
        element = BYTES_PER_ELEMENT[reader.layer.outputs[0].dtype]
        pieces: Pieces = {}
        for move in halo.moves:
            pair = (self.ranks[move.src], self.ranks[move.dst])
            pieces[pair] = pieces.get(pair, 0) + volume(move.box) * element
        return self.exchange_s(pieces)

    def _moved(self, owned: tuple[Box, ...], held: tuple[Box, ...], needed: list[Box], element: int) -> Pieces:
        """Bytes by (source, destination) of what members need and do not hold."""
        found: Pieces = {}
        for move in transfers(dict(enumerate(owned)), dict(enumerate(needed))):
            there = intersect(move.box, held[move.dst])
            size = volume(move.box) - (volume(there) if there is not None else 0)
            if move.src != move.dst and size:
                pair = (self.ranks[move.src], self.ranks[move.dst])
                found[pair] = found.get(pair, 0) + size * element
        return found

    def _hull(self, reader: Part, member: int, name: str) -> Box:
        boxes = [box for read, box in zip(reader.layer.inputs, reader.reads[member], strict=True) if read == name]
        return tuple(
            Interval(min(i.start for i in each), max(i.stop for i in each)) for each in zip(*boxes, strict=True)
        )

    def exchange_s(self, pieces: Pieces) -> float:
        """Until all messages have arrived; those of a rank follow one another."""
        cluster = self.profile.cluster
        pairs = [(a, b) for a in self.ranks for b in self.ranks if a != b]
        duplex = all(cluster.link(a, b).duplex for a, b in pairs)
        slowest = 0.0
        for rank in self.ranks:
            sent = sum(self._message_s(a, b, size) for (a, b), size in pieces.items() if a == rank)
            received = sum(self._message_s(a, b, size) for (a, b), size in pieces.items() if b == rank)
            slowest = max(slowest, max(sent, received) if duplex else sent + received)
        return slowest

    def _message_s(self, src: int, dst: int, size: int) -> float:
        return message_s(self.profile.cluster.link(src, dst), size)
