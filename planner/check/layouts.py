"""Whether layers can be divided as a plan says.

A stage whose layers have layouts of their own, reckoned a second time: loops over layers, ranks and messages.

Boxes come from the layers' access relations and what moves from ``planner.ir.box.transfers``; the rest follows the
module docstrings of ``planner.costs`` and none of its code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from planner.check.communication import Moving
from planner.check.layer_costs import SECONDS, Modelled, cost_of_part
from planner.check.parts import SPACE, Part, part_of, shared_channels
from planner.ir.box import Box, Interval, intersect, volume, whole
from planner.ir.cluster import ALL_REDUCE, STATISTICS
from planner.ir.errors import CorruptFileError, operator_of, remedies
from planner.ir.graph import BYTES_PER_ELEMENT, SAMPLE, Graph, Layer, TensorSpec, producer
from planner.ir.plan import Decision, Placement
from planner.ir.profile import Profile
from planner.layers import (
    batch_wide_layers,
    check_samples_apart,
    is_convolution,
    kind,
    over_sites,
    require_whole_batches,
)
from planner.layers.contraction import contracted_dims

REPLICA = "replica"
"""Begins the name of a dim that no tensor has: ranks along it hold the same."""

_CHANNELS = ("channel", "head", "feature")


def has_layouts(decision: Decision, stage: int) -> bool:
    """Whether the layers of ``stage`` are not all cut alike along samples."""
    placed = [decision.layers[name] for name in decision.layers_of(stage)]
    cuts = [tuple(each.cuts.items()) for each in placed]
    return (
        len(set(cuts)) > 1
        or any(dim != SAMPLE for each in cuts for dim, _ in each)
        or any(each.ways != 1 or each.margin for each in placed)
    )


def require_possible(decision: Decision, graph: Graph) -> None:
    """Refuses a decision that ``graph`` cannot be run by.

    Raises:
        UnsupportedModelError: the loss needs the whole batch, and the decision cuts it into micro-batches.
        CorruptFileError: layers cannot be divided as the decision says.
    """
    require_whole_batches(decision, graph)
    faults = list(layer_faults(decision, graph))
    if faults:
        raise CorruptFileError("the plan's layers cannot be divided so", faults[:20])


def layer_faults(decision: Decision, graph: Graph) -> Iterator[str]:
    """What is wrong with the layouts of single layers, in stages that give each layer its own."""
    return (fault for _, fault in named_layer_faults(decision, graph))


def named_layer_faults(decision: Decision, graph: Graph) -> Iterator[tuple[str, str]]:
    """As :func:`layer_faults`, each with the layer's name."""
    mixing, wide = frozenset(check_samples_apart(graph)), batch_wide_layers(graph)
    if wide and len(decision.micro_batches) > 1:
        yield wide[0], f"layer {wide[0]} needs the whole batch, which is in {len(decision.micro_batches)} micro-batches"
    for stage in range(len(decision.stages)):
        own = [name for name in decision.layers_of(stage) if name in mixing]
        if own and _shares_samples(decision, stage):
            yield own[0], f"layer {own[0]} mixes samples, and the ranks of stage {stage} share them out"
    laid_out = [stage for stage in range(len(decision.stages)) if has_layouts(decision, stage)]
    values, sites = graph.values(), over_sites(graph)
    for layer in graph.layers:
        placed = decision.layers[layer.name]
        if placed.stage in laid_out and layer.name in sites:
            text = f"layer {layer.name} is over sites, which ranks share as they do samples and nothing else"
            yield layer.name, f"{text}: cut all layers of stage {placed.stage} alike, along samples"
        elif placed.stage in laid_out:
            found = _faults_of(
                decision, graph, layer, tuple(values[name] for name in layer.inputs), layer.name in mixing
            )
            yield from ((layer.name, fault) for fault in found)


def _faults_of(
    decision: Decision, graph: Graph, layer: Layer, captured: tuple[TensorSpec, ...], mixes: bool
) -> Iterator[str]:
    """Of a layer with a layout of its own; ``captured``: its inputs."""
    placed = decision.layers[layer.name]
    if SAMPLE in _cut_dims(placed) and mixes:
        yield f"layer {layer.name} mixes samples and is cut along them"
    for samples in sorted(set(decision.micro_batches)):
        sized = replace(layer, outputs=tuple(spec.at(samples, graph.samples) for spec in layer.outputs))
        inputs = tuple(spec.at(samples, graph.samples) for spec in captured)
        work = kind(layer.kind).work(sized, inputs)
        yield from _cut_faults(graph, sized, inputs, placed, work, samples)
        ranks = decision.stages[placed.stage].ranks
        empty = [
            rank
            for rank, box in zip(ranks, placed.layout.boxes(work, samples), strict=True)
            if not volume(box) and volume(whole(work.shape))
        ]
        if empty:
            yield f"layer {layer.name} leaves rank {empty[0]} none of a micro-batch of {samples}"
    yield from _ways_faults(graph, layer, placed)
    yield from _margin_faults(graph, layer, placed)


def _shares_samples(decision: Decision, stage: int) -> bool:
    """Whether the stage is on several ranks that have other samples, its layers cut alike."""
    placed = decision.layers[decision.layers_of(stage)[0]]
    return len(decision.stages[stage].ranks) > 1 and SAMPLE in placed.cuts and not has_layouts(decision, stage)


def _cut_dims(placed: Placement) -> list[str]:
    return [dim for dim, points in placed.cuts.items() if len(points) > 2 and not dim.startswith(REPLICA)]


def _cut_faults(
    graph: Graph, layer: Layer, inputs: tuple[TensorSpec, ...], placed: Placement, work: TensorSpec, samples: int
) -> Iterator[str]:
    """Dims that the layer cannot be cut along."""
    for dim in _cut_dims(placed):
        why = ""
        if work.dims.count(dim) != 1:
            why = f"and has {', '.join(work.dims) or 'no dims'}"
        elif not _narrows(graph, layer, inputs, work, work.dims.index(dim), samples):
            why = "and each part would do all of its work"
        if why:
            helps = "; ".join(remedies(layer, dim))
            yield f"layer {layer.name} is cut along {dim}, {why}: {operator_of(layer)} cannot be cut so ({helps})"


def _ways_faults(graph: Graph, layer: Layer, placed: Placement) -> Iterator[str]:
    """How many ranks share the input channels."""
    ways = placed.ways
    if ways == 1:
        return
    values, words = graph.values(), f"layer {layer.name} ({operator_of(layer)}) has ways {ways}"
    inputs = tuple(values[name] for name in layer.inputs)
    dims = contracted_dims(layer, inputs, tuple(graph.parameters[name] for name in layer.parameters))
    if ways < 1:
        yield f"{words}; it is 1 or more"
    elif dims is None:
        yield f"{words}, and is no linear layer or convolution of one group: it shares no input channels"
    else:
        name, channels = layer.outputs[0].dims[dims.filters], inputs[0].shape[dims.channels]
        parts = len(placed.cuts.get(name, (0, 1))) - 1
        if parts % ways:
            yield f"{words}, which do not divide its {parts} parts along {name}"
        elif ways > channels:
            yield f"{words} to share {channels} input channels"
        if placed.margin:
            yield f"{words} and margin {placed.margin}; it can have one of them"


def _margin_faults(graph: Graph, layer: Layer, placed: Placement) -> Iterator[str]:
    """Rows beyond the part, which are the neighbour's."""
    margin, words = placed.margin, f"layer {layer.name} has margin {placed.margin}"
    if margin < 0:
        yield f"{words}; it is 0 or more"
    if margin <= 0:
        return
    values = graph.values()
    inputs = tuple(values[name] for name in layer.inputs)
    work, cut = kind(layer.kind).work(layer, inputs), _cut_dims(placed)
    in_space = [dim for dim in cut if dim in SPACE and dim in work.dims]
    channels = [dim for dim in cut if dim in _CHANNELS]
    if channels:
        yield f"{words} and is cut along {channels[0]}: margins are for layers cut along space alone"
    elif not in_space:
        yield f"{words} and is not cut along space"
    elif work != layer.outputs[0]:
        yield f"{words}, and what its parts make is no part of its output"
    else:
        boxes = placed.layout.boxes(work, graph.samples)
        least = min(len(box[work.dims.index(dim)]) for box in boxes for dim in in_space)
        if margin > least:
            yield f"{words}, and its smallest part has {least} rows"


def _narrows(
    graph: Graph, layer: Layer, inputs: tuple[TensorSpec, ...], work: TensorSpec, at: int, samples: int
) -> bool:
    """Whether half of the work along a dim reads less of a parameter, or of each of the largest inputs."""
    extent = work.shape[at]
    unit = extent // samples if work.dims[at] == SAMPLE and samples else 1
    middle = extent // unit // 2 * unit if unit else 0
    if not 0 < middle < extent:
        return False
    everything = whole(work.shape)
    halves = [
        (*everything[:at], part, *everything[at + 1 :]) for part in (Interval(0, middle), Interval(middle, extent))
    ]
    parameters = tuple(graph.parameters[name] for name in layer.parameters)
    relation = kind(layer.kind)
    weights = [
        [volume(box) for box in relation.weight_boxes(layer, parameters, part)] for part in (everything, *halves)
    ]
    if any(first + second < 2 * full for full, first, second in zip(*weights, strict=True)):
        return True
    reads = [_elements(relation.input_boxes(layer, inputs, part), inputs) for part in (everything, *halves)]
    largest = max(reads[0], default=0)
    return bool(reads[0]) and all(
        first + second < 2 * full for full, first, second in zip(*reads, strict=True) if full == largest
    )


def _elements(boxes: tuple[Box, ...], inputs: tuple[TensorSpec, ...]) -> list[int]:
    inside = [intersect(box, whole(spec.shape)) for box, spec in zip(boxes, inputs, strict=True)]
    return [volume(box) if box is not None else 0 for box in inside]


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
            if is_convolution(layer.kind) and all(crossing.is_halo for crossing in values):
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
