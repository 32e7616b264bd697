"""What passes between the layers of a stage and how long that takes, for the checker: loops over ranks and messages.

What sharing sites costs inside a stage, for the checker; ``planner.costs.communication.halo`` says the model.

Sums over several ranks, for the checker: a table, or a ring as much slower than theory as measured rings are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from planner.check.parts import SPACE, Part, Pieces, shared_channels
from planner.check.reading import delay_s, from_points, message_s
from planner.ir.box import Box, Interval, Transfer, intersect, transfers, volume
from planner.ir.cluster import ALL_REDUCE, Cluster, Collective
from planner.ir.graph import BYTES_PER_ELEMENT, Layer, TensorSpec, producer
from planner.ir.plan import Placement
from planner.ir.profile import Profile
from planner.ir.schedule import Op
from planner.layers import is_convolution
from planner.layers.backward_halo import backward_halo
from planner.layers.division import LayerDivision


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
        spec = maker.outputs[output]
        owned, held = maker.owned(output), maker.held(output)
        reads = [self._hull(reader, member, name) for member in range(len(self.ranks))]
        sums: Pieces = {}
        if position == 0:
            reads, sums = shared_channels(reader, reads, self.ranks)
        pieces = self._moved(owned, held, reads, BYTES_PER_ELEMENT[spec.dtype])
        grids = [[(dim, len(points)) for dim, points in part.layout.cuts.items()] for part in (maker, reader)]
        is_halo = grids[0] == grids[1] and (reader.ways == 1 or position > 0)
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
        element = BYTES_PER_ELEMENT[reader.outputs[0].dtype]
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


def site_exchange_s(
    profile: Profile,
    layer: Layer,
    x: TensorSpec,
    group: tuple[int, ...],
    op: Op,
    samples: int,
    sum_s: Callable[[int], float],
) -> float:
    """Of one layer in a forward or backward (for inputs).

    Args:
        x: the layer's first input.
        sum_s: seconds of a sum of so many bytes over the group.
    """
    if layer.kind in ("segment", "segment_expand"):
        spec = layer.outputs[0]
        return sum_s(samples * spec.shape[-1] * BYTES_PER_ELEMENT[spec.dtype])
    if layer.kind not in ("sparse_conv", "sparse_pool"):
        return 0.0
    if op is not Op.FORWARD and layer.inputs[0] in profile.graph.inputs:
        return 0.0
    cluster, others = profile.cluster, len(group) - 1
    size = _rows(profile, layer, x, len(group), samples) * x.shape[-1] * BYTES_PER_ELEMENT[x.dtype] / others
    if size <= 0:
        return 0.0
    between = cluster.group_link_class(group)
    links = [cluster.link(a, b) for a in group for b in group if a != b and cluster.link_class(a, b) == between]
    each = max(message_s(link, size) for link in links)
    return others * each if all(link.duplex for link in links) else 2 * others * each


def _rows(profile: Profile, layer: Layer, x: TensorSpec, parts: int, samples: int) -> float:
    points = sorted((h.parts / h.samples, max(1e-9, h.rows)) for h in profile.site_halos if h.layer == layer.name)
    if not points:
        total = x.shape[0] * samples / profile.graph.samples
        return float(min(total * (1 - 1 / parts), 6 * (total / parts) ** (2 / 3)))
    cut = parts / samples
    if cut <= points[0][0]:
        return float(points[0][1])
    for (a, low), (b, high) in pairwise(points):
        if cut <= b:
            return float(low * (high / low) ** (math.log(cut / a) / math.log(b / a)))
    return float(points[-1][1] * (points[-1][0] / cut) ** (2 / 3))


def sum_s(cluster: Cluster, operation: str, group: tuple[int, ...], size: float) -> float:
    """Seconds of a sum of ``size`` bytes a rank over ``group``, all of whose ranks are there."""
    if size <= 0 or len(group) < 2:
        return 0.0
    count, hosts = len(group), len({cluster.devices[rank].host for rank in group})
    tables = _tables(cluster, operation, group)
    for table in tables:
        if table.num_ranks == count and table.num_hosts in (0, hosts):
            return from_points(table.points, size)
    smaller = [table for table in tables if table.num_ranks <= count]
    larger = [table for table in tables if table.num_ranks >= count]
    ratio = 1.0
    if smaller:
        low = max(smaller, key=lambda table: table.num_ranks)
        ratio = _slowness(cluster, group, low, size)
    if larger:
        high = min(larger, key=lambda table: table.num_ranks)
        above = _slowness(cluster, group, high, size)
        if not smaller:
            ratio = above
        elif high.num_ranks > low.num_ranks:
            ratio += (above - ratio) * (count - low.num_ranks) / (high.num_ranks - low.num_ranks)
    return ratio * _ring_s(cluster, group, count, size)


def moving_s(cluster: Cluster, group: tuple[int, ...], size: int) -> float:
    """What the rank that loses most loses of its core by a sum: as much as by the messages of a ring."""
    around, moved = sorted(group), round(2 * (len(group) - 1) / len(group) * size)
    lost = [0.0] * len(around)
    for position, rank in enumerate(around):
        following = (position + 1) % len(around)
        link = cluster.link(rank, around[following])
        lost[position] += delay_s(link.sender_core, moved)
        lost[following] += delay_s(link.receiver_core, moved)
    return max(s * cluster.devices[rank].core_share for s, rank in zip(lost, around, strict=True))


def _slowness(cluster: Cluster, group: tuple[int, ...], table: Collective, size: float) -> float:
    found = from_points(table.points, size) / _ring_s(cluster, group, table.num_ranks, size)
    return max(1.0, found) if table.num_ranks == 2 and len(group) > 2 else found


def _ring_s(cluster: Cluster, group: tuple[int, ...], count: int, size: float) -> float:
    """Each rank hands on a part of ``size`` 2 (n - 1) times, to the next rank by number."""
    around = sorted(group)
    is_split = len({cluster.devices[rank].host for rank in group}) > 1
    slowest = 0.0
    for position, rank in enumerate(around):
        following = around[(position + 1) % len(around)]
        if not is_split or cluster.devices[rank].host != cluster.devices[following].host:
            slowest = max(slowest, message_s(cluster.link(rank, following), size / count))
    return 2 * (count - 1) * slowest


def _tables(cluster: Cluster, operation: str, group: tuple[int, ...]) -> Sequence[Collective]:
    hosts, link = {cluster.devices[rank].host for rank in group}, cluster.group_link_class(group)
    found = [each for each in cluster.collectives if each.operation == operation and each.link == link and each.points]
    if not found and operation != ALL_REDUCE:
        return _tables(cluster, ALL_REDUCE, group)
    one_a_host = len(hosts) == len(group)
    alike = [each for each in found if one_a_host == (each.num_hosts == 0 or each.num_hosts == each.num_ranks)]
    return alike if alike else found
