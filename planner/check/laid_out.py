"""A stage whose layers have layouts of their own, reckoned a second time: loops over layers, ranks and messages.

Boxes come from the layers' access relations and what moves from ``planner.ir.box.transfers``; the rest follows the
module docstrings of ``planner.costs`` and none of its code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from planner.check.parts import Part, Pieces, part_of, ways_to_contract
from planner.check.reading import from_points
from planner.ir.box import Box, Interval, transfers, volume
from planner.ir.cluster import ALL_REDUCE, STATISTICS
from planner.ir.graph import BYTES_PER_ELEMENT, Layer, producer
from planner.ir.layout import Layout
from planner.ir.profile import Profile
from planner.layers import kind

CostOf = Callable[[str, Layer, int, str], float]
"""Seconds or bytes of (device kind, layer, samples, quantity)."""
SumOver = Callable[[tuple[int, ...], int, tuple[str, ...]], float]
"""Seconds of a sum of so many bytes over ranks, by the first of the operations that was measured."""
ROUNDING = 1e-9
"""Of ways to contract that differ by less, the one with fewest ranks that share input channels is taken."""


@dataclass(frozen=True, eq=False)
class LaidOut:
    """A stage for micro-batches of ``samples``; all of its ranks go at one pace.

    Attributes:
        layers: of the stage, in the graph's order.
        layouts: by layer.
    """

    profile: Profile
    layers: tuple[Layer, ...]
    layouts: Mapping[str, Layout]
    ranks: tuple[int, ...]
    samples: int
    recompute: bool
    cost: CostOf = field(repr=False)
    sum_s: SumOver = field(repr=False)

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The layers' boxes."""
        return {
            layer.name: part_of(self.profile, layer, self.layouts[layer.name], self.samples) for layer in self.layers
        }

    def action_s(self, what: str, accumulates: bool) -> float:
        """Seconds of a forward or backward (``forward_s``, ``backward_s``, ``backward_input_s``, ...)."""
        total = sum(self._slowest(layer, what) for layer in self.layers)
        if what in ("backward_s", "backward_input_s") and self.recompute:
            total += sum(self._slowest(layer, "forward_s") for layer in self.layers)
        if accumulates:
            total += sum(self._parameters_s(layer, "accumulate_s") for layer in self.layers)
        if what == "backward_weight_s":
            return total
        forward_s = self._statistics_s(0) + sum(seconds for seconds, _, _ in self.crossings)
        if what == "forward_s":
            return total + forward_s
        backward_s = self._statistics_s(1) + sum(seconds for _, seconds, _ in self.crossings)
        return total + backward_s + (forward_s if self.recompute else 0.0)

    def update_s(self) -> float:
        """Seconds of the update."""
        return sum(self._parameters_s(layer, "update_s") for layer in self.layers)

    def reduction_s(self) -> float:
        """Seconds of summing gradients over members that use equal parts, each as one part of a sum of them all."""
        total = 0.0
        whole_bytes = self.profile.graph.parameter_bytes()
        for layer in self.layers:
            for position, name in self._own_parameters(layer):
                size = BYTES_PER_ELEMENT[self.profile.graph.parameters[name].dtype]
                slowest = 0.0
                boxes = [weights[position] for weights in self.parts[layer.name].weights]
                for box in set(boxes):
                    group = tuple(rank for rank, mine in zip(self.ranks, boxes, strict=True) if mine == box)
                    if len(group) > 1 and whole_bytes:
                        rate = self.sum_s(group, whole_bytes, (ALL_REDUCE,)) / whole_bytes
                        slowest = max(slowest, rate * volume(box) * size)
                total += slowest
        return total

    def parameter_bytes(self, member: int) -> float:
        """Bytes of the parameters that a member uses."""
        return sum(self._held_bytes(layer, member) for layer in self.layers)

    def saved_bytes(self, member: int) -> float:
        """What layers of a member save for the backward, and what it received from its group."""
        own = sum(
            max(0.0, self._cost(layer, member, "saved_bytes")) * self.parts[layer.name].share(member)
            for layer in self.layers
        )
        got = sum(
            size for _, _, pieces in self.crossings for (_, dst), size in pieces.items() if dst == self.ranks[member]
        )
        return own + got

    def workspace_bytes(self, member: int) -> float:
        """What the hungriest layer needs while it runs."""
        return max(
            self._cost(layer, member, "workspace_bytes") * self.parts[layer.name].share(member) for layer in self.layers
        )

    @cached_property
    def crossings(self) -> list[tuple[float, float, Pieces]]:
        """Each value that a layer of the stage reads from another: seconds forward, backward, and what is received."""
        made = {layer.name for layer in self.layers}
        found = []
        for layer in self.layers:
            for position, name in enumerate(layer.inputs):
                if producer(name) in made and layer.inputs.index(name) == position:
                    found.append(self._crossing(self.parts[producer(name)], self.parts[layer.name], name, position))
        return found

    def _crossing(self, maker: Part, reader: Part, name: str, position: int) -> tuple[float, float, Pieces]:
        spec = maker.outputs[int(name.partition(":")[2] or 0)]
        element = BYTES_PER_ELEMENT[spec.dtype]
        owned = dict(zip(self.ranks, maker.layout.boxes(spec, self.samples), strict=True))
        needed = [self._hull(reader, member, name) for member in range(len(self.ranks))]
        ways = [(needed, {})] if position else ways_to_contract(reader, needed, self.ranks)
        found = []
        for reads, sums in ways:
            pieces = _moved(owned, dict(zip(self.ranks, reads, strict=True)), element)
            found.append((self._exchange_s(pieces) + self._exchange_s(sums), pieces))
        least = min(seconds for seconds, _ in found)
        seconds, pieces = next(each for each in found if each[0] <= least * (1 + ROUNDING))
        return seconds, seconds if spec.is_float else 0.0, pieces

    def _hull(self, reader: Part, member: int, name: str) -> Box:
        boxes = [box for read, box in zip(reader.layer.inputs, reader.reads[member], strict=True) if read == name]
        return tuple(
            Interval(min(i.start for i in each), max(i.stop for i in each)) for each in zip(*boxes, strict=True)
        )

    def _exchange_s(self, pieces: Pieces) -> float:
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
        link = self.profile.cluster.link(src, dst)
        if size <= 0:
            return 0.0
        return from_points(link.points, size) if link.points else link.latency_s + size / link.bandwidth_bytes_per_s

    def _statistics_s(self, way: int) -> float:
        """Sums of a normalisation over the members that have equal channels and not all samples and space."""
        total = 0.0
        for layer in self.layers:
            if kind(layer.kind).REDUCTION != "statistics":
                continue
            part = self.parts[layer.name]
            spec = part.outputs[0]
            channel = spec.dims.index("channel") if "channel" in spec.dims else 1
            boxes = part.layout.boxes(spec, self.samples)
            slowest = 0.0
            for interval in {box[channel] for box in boxes}:
                mine = [(rank, box) for rank, box in zip(self.ranks, boxes, strict=True) if box[channel] == interval]
                extents = [e for dim, e in enumerate(spec.shape) if dim != channel]
                has_all = all([len(i) for d, i in enumerate(box) if d != channel] == extents for _, box in mine)
                if len(mine) < 2 or has_all:
                    continue
                group = tuple(rank for rank, _ in mine)
                numbers = (len(group) * (1 + 2 * len(interval)) * 8, 2 * len(interval) * BYTES_PER_ELEMENT[spec.dtype])
                slowest = max(slowest, self.sum_s(group, numbers[way], (STATISTICS, ALL_REDUCE)))
            total += slowest
        return total

    def _slowest(self, layer: Layer, what: str) -> float:
        part = self.parts[layer.name]
        return max(max(0.0, self._cost(layer, member, what)) * part.share(member) for member in range(len(self.ranks)))

    def _cost(self, layer: Layer, member: int, what: str) -> float:
        device = self.profile.cluster.devices[self.ranks[member]]
        return self.cost(device.kind, layer, self.parts[layer.name].samples_of(member), what)

    def _parameters_s(self, layer: Layer, what: str) -> float:
        """In proportion to the bytes held, on the slowest member."""
        own = sum(self.profile.graph.parameters[name].num_bytes for _, name in self._own_parameters(layer))
        slowest = 0.0
        for member, rank in enumerate(self.ranks):
            costs = self.profile.parameters.get(self.profile.cluster.devices[rank].kind, {})
            if own and layer.name in costs:
                seconds = float(getattr(costs[layer.name], what))
                slowest = max(slowest, seconds * self._held_bytes(layer, member) / own)
        return slowest

    def _held_bytes(self, layer: Layer, member: int) -> float:
        boxes = self.parts[layer.name].weights[member]
        parameters = self.profile.graph.parameters
        return float(
            sum(volume(boxes[k]) * BYTES_PER_ELEMENT[parameters[n].dtype] for k, n in self._own_parameters(layer))
        )

    def _own_parameters(self, layer: Layer) -> list[tuple[int, str]]:
        """Position and name of the parameters that count here: a tied one is its first user's."""
        return [
            (position, name) for position, name in enumerate(layer.parameters) if self._first_user[name] == layer.name
        ]

    @cached_property
    def _first_user(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for layer in self.profile.graph.layers:
            for name in layer.parameters:
                found.setdefault(name, layer.name)
        return found


def _moved(owned: dict[int, Box], needed: dict[int, Box], element: int) -> Pieces:
    found: Pieces = {}
    for move in transfers(owned, needed):
        if move.src != move.dst:
            found[move.src, move.dst] = found.get((move.src, move.dst), 0) + volume(move.box) * element
    return found
