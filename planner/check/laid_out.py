"""A stage whose layers have layouts of their own, reckoned a second time: loops over layers, ranks and messages.

Boxes come from the layers' access relations and what moves from ``planner.ir.box.transfers``; the rest follows the
module docstrings of ``planner.costs`` and none of its code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from planner.check.families import SECONDS, Modelled
from planner.check.measured_parts import cost_of_part
from planner.check.moving import Moving
from planner.check.parts import Part, part_of, shared_channels
from planner.ir.box import volume
from planner.ir.cluster import ALL_REDUCE, STATISTICS
from planner.ir.graph import BYTES_PER_ELEMENT, Layer, producer
from planner.ir.plan import Placement
from planner.ir.profile import Profile
from planner.layers import kind

CostOf = Callable[[str, Layer, int, str], float]
"""Seconds or bytes of (device kind, layer, samples, quantity)."""
SumOver = Callable[[tuple[int, ...], int, tuple[str, ...]], float]
"""Seconds of a sum of so many bytes over ranks, by the first of the operations that was measured."""


@dataclass(frozen=True, eq=False)
class LaidOut:
    """A stage for micro-batches of ``samples``; all of its ranks go at one pace.

    Attributes:
        layers: of the stage, in the graph's order.
        placements: by layer.
        modelled: by device kind: models of what was not measured.
        left: what corrections add to (device kind, quantity) on this stage, as a factor.
    """

    profile: Profile
    layers: tuple[Layer, ...]
    placements: Mapping[str, Placement]
    ranks: tuple[int, ...]
    samples: int
    recompute: bool
    cost: CostOf = field(repr=False)
    sum_s: SumOver = field(repr=False)
    modelled: Callable[[str], Modelled] = field(repr=False)
    left: Callable[[str, str], float] = field(repr=False)

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The layers' boxes."""
        return {
            layer.name: part_of(self.profile, layer, self.placements[layer.name], self.samples) for layer in self.layers
        }

    def action_s(self, what: str, accumulates: bool) -> float:
        """Seconds of a forward or backward (``forward_s``, ``backward_s``, ``backward_input_s``, ...)."""
        total = sum(self._slowest(layer, what) for layer in self.layers)
        if what in ("backward_s", "backward_input_s") and self.recompute:
            total += sum(self._slowest(layer, "forward_s") for layer in self.layers)
        if accumulates:
            total += sum(self._parameters_s(layer, "accumulate_s") for layer in self.layers)
        return total + self.exchanged_s(what)

    def exchanged_s(self, what: str) -> float:
        """The part of a forward or backward in which the ranks exchange something."""
        if what == "backward_weight_s":
            return 0.0
        forward_s = self._statistics_s(0) + self._pending_s(0) + sum(waits[0] for waits in self._waits)
        if what == "forward_s":
            return forward_s
        backward_s = self._statistics_s(1) + self._pending_s(1) + sum(waits[1] for waits in self._waits)
        return backward_s + (forward_s if self.recompute else 0.0)

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
        own = sum(self._cost(layer, member, "saved_bytes") for layer in self.layers)
        got = sum(
            size
            for crossing in self.moving.crossings
            for (_, dst), size in crossing.pieces.items()
            if dst == self.ranks[member]
        )
        return own + got

    def workspace_bytes(self, member: int) -> float:
        """What the hungriest layer needs while it runs."""
        return max(self._cost(layer, member, "workspace_bytes") for layer in self.layers)

    @cached_property
    def moving(self) -> Moving:
        """What passes between the layers."""
        return Moving(self.profile, self.placements, self.ranks, self.samples, self.parts)

    @cached_property
    def _waits(self) -> list[tuple[float, float]]:
        """Forward and backward, by pair of layers: what is moved, less what a convolution computes meanwhile."""
        found = []
        pairs = dict.fromkeys((crossing.maker, crossing.reader) for crossing in self.moving.crossings)
        for maker, reader in pairs:
            values = [c for c in self.moving.crossings if (c.maker, c.reader) == (maker, reader)]
            moved = [sum(c.forward_s for c in values), sum(c.backward_s for c in values)]
            layer = self.parts[reader].layer
            if layer.kind in ("conv", "transposed_conv") and all(crossing.is_halo for crossing in values):
                hidden = [self._slowest(layer, what) for what in ("forward_s", "backward_s")]
                moved = [max(0.0, seconds - computing) for seconds, computing in zip(moved, hidden, strict=True)]
            found.append((moved[0], moved[1]))
        for layer in self.layers:  # partial sums of what is read from outside
            if layer.inputs and producer(layer.inputs[0]) not in self.parts:
                part = self.parts[layer.name]
                _, sums = shared_channels(part, [box[0] for box in part.reads], self.ranks)
                found.append((self.moving.exchange_s(sums), self.moving.exchange_s(sums)))
        return found

    def _statistics_s(self, way: int) -> float:
        """Sums of a normalisation over the members that have equal channels."""
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
                group = tuple(r for r, box in zip(self.ranks, boxes, strict=True) if box[channel] == interval)
                if len(group) < 2:
                    continue
                numbers = (len(group) * (1 + 2 * len(interval)) * 8, 2 * len(interval) * BYTES_PER_ELEMENT[spec.dtype])
                slowest = max(slowest, self.sum_s(group, numbers[way], (STATISTICS, ALL_REDUCE)))
            total += slowest
        return total

    def _pending_s(self, way: int) -> float:
        """Sums of what members with one output made of it (the loss's come with gradients)."""
        total = 0.0
        for layer in self.layers:
            if kind(layer.kind).REDUCTION != "sum" or layer.kind == "loss":
                continue
            part, slowest = self.parts[layer.name], 0.0
            for output, spec in enumerate(part.outputs):
                boxes = part.owned(output)
                for box in set(boxes) if spec.is_float or way == 0 else ():
                    group = tuple(rank for rank, other in zip(self.ranks, boxes, strict=True) if other == box)
                    if len(group) > 1:
                        size = volume(box) * max(4, BYTES_PER_ELEMENT[spec.dtype])
                        slowest = max(slowest, self.sum_s(group, size, (STATISTICS, ALL_REDUCE)))
            total += slowest
        return total

    def _slowest(self, layer: Layer, what: str) -> float:
        return max(self._cost(layer, member, what) for member in range(len(self.ranks)))

    def _cost(self, layer: Layer, member: int, what: str) -> float:
        """Of the member's part: as measured, else by its family, else its share of as many whole samples."""
        part = self.parts[layer.name]
        device_kind = self.profile.cluster.devices[self.ranks[member]].kind
        samples = part.samples_of(member)
        extents, whole = part.extents(member)
        left, share = self.left(device_kind, what), part.share(member)
        over_sites = any(spec.has_sites for spec in (*part.inputs, *part.outputs))
        modelled = None if over_sites or extents == whole or not samples else self.modelled(device_kind)
        shares = {} if modelled is None else self._shares(device_kind, layer, samples, share)
        found = cost_of_part(self.profile, device_kind, layer.name, samples, extents, whole, what, modelled, shares)
        if found is not None:
            return found * left
        return max(0.0, self.cost(device_kind, layer, samples, what)) * share * left

    def _shares(self, device_kind: str, layer: Layer, samples: int, share: float) -> dict[str, float]:
        return {name: max(0.0, self.cost(device_kind, layer, samples, name)) * share for name in SECONDS}

    def _parameters_s(self, layer: Layer, what: str) -> float:
        """In proportion to the bytes held, on the slowest member."""
        own = sum(self.profile.graph.parameters[name].num_bytes for _, name in self._own_parameters(layer))
        slowest = 0.0
        for member, rank in enumerate(self.ranks):
            device_kind = self.profile.cluster.devices[rank].kind
            costs = self.profile.parameters.get(device_kind, {})
            if own and layer.name in costs:
                seconds = float(getattr(costs[layer.name], what)) * self.left(device_kind, what)
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
