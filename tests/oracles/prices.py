"""Prices that the oracles take as given: of layers and their parts, messages, sums over ranks, preparations.

The cost model (:mod:`planner.costs`) says what one layer or one link costs.  What a stage, a rank and a step make of
that is added up by themselves: of stages whose layers have layouts of their own here, else in ``action_times``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from planner.costs.communication.resharding import Resharding, exposed, resharding_of, scattered_s
from planner.costs.cost_model import CostModel
from planner.costs.layers.cost_table import Array
from planner.costs.shards.partial_sums import Sums, pending_s, reduction_rate, sums_of
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.ir.graph import BYTES_PER_ELEMENT, Layer, output_of, producer
from planner.ir.plan import Block, Placement
from planner.ir.profile import BACKWARD, FORWARD
from planner.layers import is_convolution, takes_statistics
from planner.layers.division import Division
from planner.layers.shards import Shards, shards_of
from planner.layers.sized import SizedLayer
from tests.oracles.parts import Reading, inputs_saved, levels_of_part

if TYPE_CHECKING:
    from tests.planner.extras.tiles.plain_blocks import BlockAccount

SECONDS = ("forward_s", "backward_s", "backward_input_s", "backward_weight_s")
QUANTITIES = (*SECONDS, "saved_bytes", "workspace_bytes")


class LayerPrices:
    """What layers of a profile cost, by name."""

    def __init__(self, cost_model: CostModel) -> None:
        self.cost_model = cost_model
        self.index = {layer.name: number for number, layer in enumerate(cost_model.profile.graph.layers)}
        self._columns: dict[tuple[str, float, bool], dict[str, Array]] = {}
        self._exchanges: dict[tuple[tuple[int, ...], int, bool], tuple[Array, Array]] = {}

    def columns(self, kind: str, samples: float, shared: bool) -> Mapping[str, Array]:
        """By quantity, of all layers."""
        key = (kind, samples, shared)
        if key not in self._columns:
            table = self.cost_model.at(kind, samples, shared)
            seconds_and_bytes = {what: np.maximum(0.0, np.diff(getattr(table, what))) for what in QUANTITIES[:-1]}
            self._columns[key] = {**seconds_and_bytes, "workspace_bytes": table.workspace_bytes}
        return self._columns[key]

    def update_s(self, layer: Layer, kind: str) -> float:
        """Of the update of the layer's parameters."""
        return self._of_parameters(layer, self.cost_model.tables.parameters(kind).update_s)

    def accumulate_s(self, layer: Layer, kind: str, shared: bool) -> float:
        """Of adding one more micro-batch's gradients."""
        return self._of_parameters(layer, self.cost_model.accumulate_s(kind, shared))

    def exchange_s(
        self, layer: Layer, ranks: tuple[int, ...], samples: int, *, backward: bool, trains: bool = True
    ) -> float:
        """What ranks that share samples exchange in the layer: statistics, halos of sites."""
        if len(ranks) < 2:
            return 0.0
        key = (ranks, samples, trains)
        if key not in self._exchanges:
            forward_s, backward_s = self.cost_model.exchanges_s(ranks, samples, trains=trains)
            self._exchanges[key] = (np.diff(forward_s), np.diff(backward_s))
        return float(self._exchanges[key][backward][self.index[layer.name]])

    def gradients(self, kind: str, sizes: Sequence[float]) -> dict[float, list[tuple[str, str, float]]]:
        """Of values, by samples: (whose backward makes one, whose is the last to be given it, bytes)."""
        by_samples = {}
        for samples in set(sizes):
            if len((pairs := self.cost_model.levels.pairs_at("gradients_made", kind, samples))[0]):
                by_samples[samples] = [
                    (self._names[a], self._names[b], float(size)) for a, b, size in zip(*pairs, strict=True)
                ]
        return by_samples

    def inputs_left(self, kind: str, samples: float, index: int) -> dict[str, float]:
        """What the weight gradients of a layer need of other layers' values, by their makers."""
        return self._of_reader(self.cost_model.levels.pairs_at("inputs_left", kind, samples), index)

    def gradients_left(self, kind: str, samples: float, index: int) -> dict[str, float]:
        """The same of gradients that other layers' backward made."""
        return self._of_reader(self.cost_model.levels.pairs_at("gradients_left_from", kind, samples), index)

    def _of_reader(self, pairs: tuple[NDArray[np.int64], NDArray[np.int64], Array], index: int) -> dict[str, float]:
        readers, makers, sizes = pairs
        return {self._names[makers[place]]: float(sizes[place]) for place in np.flatnonzero(readers == index)}

    @cached_property
    def _names(self) -> list[str]:
        return list(self.index)

    def _of_parameters(self, layer: Layer, sums: Array) -> float:
        at = self.index[layer.name]
        return float(sums[at + 1] - sums[at])


@dataclass(frozen=True, eq=False)
class LaidOut:
    """A stage whose layers have layouts of their own, for micro-batches of ``samples``; all its ranks go at one pace.

    Attributes:
        layers: of the stage, in the graph's order.
        placements: by layer.
        again: names of layers that alone are computed again.
        blocks: of a forward plan, layers that are run in blocks.
        evaluates: whether the plan has forward passes alone.
    """

    prices: LayerPrices
    layers: Sequence[Layer]
    placements: Mapping[str, Placement]
    ranks: tuple[int, ...]
    samples: int
    recompute: bool
    again: frozenset[str] = frozenset()
    blocks: tuple[Block, ...] = ()
    evaluates: bool = False

    def action_s(self, what: str, accumulates: bool) -> float:
        """Seconds of a forward or backward (one of ``SECONDS``)."""
        total = sum(self._slowest_s(layer, what) for layer in self._apart)
        if what == "forward_s" and self.blocks:
            from tests.planner.extras.tiles.plain_blocks import tile_seconds  # goes with the extra

            total += sum(tile_seconds(self._tile_costs, block) for block in self._account.division.blocks)
        if what in ("backward_s", "backward_input_s"):
            total += sum(self._slowest_s(layer, "forward_s") for layer in self.layers if self._runs_twice(layer))
        if accumulates:
            added = partial(self.prices.accumulate_s, shared=len(self.ranks) > 1)
            total += sum(self._by_bytes_s(layer, [added(layer, kind) for kind in self._kinds]) for layer in self.layers)
        return total + self.exchanged_s(what)

    def exchanged_s(self, what: str) -> float:
        """The part of a forward or backward in which the ranks exchange something."""
        if what == "backward_weight_s":
            return 0.0
        forward_s, backward_s = self._waited_s
        if what == "forward_s":
            return forward_s
        return backward_s + (forward_s if self.recompute else self._waited_again_s)

    def _runs_twice(self, layer: Layer) -> bool:
        return self.recompute or layer.name in self.again

    def update_s(self) -> float:
        """Seconds of the update."""
        price = self.prices.update_s
        return sum(self._by_bytes_s(layer, [price(layer, kind) for kind in self._kinds]) for layer in self.layers)

    def reduction_s(self) -> float:
        """Seconds of summing gradients over ranks that use equal parts."""
        return sum(float(sums.reduction_s[0]) for sums in self._sums.values())

    def parameter_bytes(self, member: int) -> float:
        """Bytes of the parameters that a member uses."""
        return sum(float(sums.held_bytes[0, member]) for sums in self._sums.values())

    def saved_bytes(self, member: int) -> list[float]:
        """What each layer of a member saves for the backward, also of inputs that it reads whole or was sent."""
        by_layer = []
        for layer in self.layers:
            own = float(self._costs[layer.name]["saved_bytes"][member])
            beyond = self._received(layer, member) if self.recompute else self._inputs_saved(layer, member)[0]
            by_layer.append(own + beyond)
        return by_layer

    def _inputs_saved(self, layer: Layer, member: int) -> tuple[float, float]:
        """A price: what is saved of inputs beyond the part's share, and what of all that lies where it was."""
        at = self.prices.index[layer.name]
        part = self._reading(layer, member)
        return inputs_saved(self._cost_model.levels.at(self._kinds[member], part.samples), at, part)

    def _reading(self, layer: Layer, member: int) -> Reading:
        shards = self._shards[layer.name]
        samples = float(shards.samples[0, member])
        share = float(shards.share[0, member])
        received, copied = (self._received(layer, member, copied=each) for each in (False, True))
        return Reading(samples, share, float(shards.read_share(0)[member]), received, copied)

    def made_bytes(self, member: int) -> list[float]:
        """Parameters of each layer that a member uses."""
        return [float(self._sums[layer.name].held_bytes[0, member]) for layer in self.layers]

    def part(self, layer: Layer, member: int) -> float:
        """A member's samples of a layer, times its share of the work of as many whole ones."""
        shards = self._shards[layer.name]
        return float(shards.samples[0, member]) * float(shards.share[0, member])

    def summed(self, member: int) -> dict[str, tuple[tuple[int, ...], int]]:
        """By parameter: the members that have the same part as this one, and its bytes, where others have it."""
        members = dict[str, tuple[tuple[int, ...], int]]()
        for layer in self.layers:
            shards = self._shards[layer.name]
            for name, spec, boxes in zip(layer.parameters, shards.sized.parameters, shards.weights, strict=True):
                own = boxes[0, member]
                alike = tuple(np.flatnonzero((boxes[0] == own).all(axis=(1, 2))).tolist())
                size = int(np.prod(own[:, 1] - own[:, 0])) * BYTES_PER_ELEMENT[spec.dtype]
                if size > 0 and len(alike) > 1:
                    members.setdefault(name, (alike, size))
        return members

    def always_bytes(self) -> float:
        """What a stage keeps although it computes its activations again: nothing."""
        return 0.0

    def standing_bytes(self, member: int) -> float:
        """What exchanges keep ready on a member."""
        apart = {layer.name for layer in self._apart}
        pairs = self._crossings.items()
        of_sums = 0.0
        for name in apart:
            of_sums += 0.0 if self._is_running(name) else float(self._sums[name].standing_bytes[0, member])
        return of_sums + sum(float(one.standing_bytes[0, 0, member]) for (_, reader), one in pairs if reader in apart)

    def puts_off(self) -> list[bool]:
        """By layer, whether ranks make its weight gradients while they wait for statistics."""
        norms = {layer.name for layer in self.layers if self._is_norm(layer)}
        users = [name for layer in self.layers for name in layer.parameters]
        return [
            is_convolution(layer.kind)
            and self._shards[layer.name].options[0].ways < 2
            and bool(norms - {layer.name})
            and all(users.count(name) == 1 for name in layer.parameters)
            for layer in self.layers
        ]

    def meets(self, member: int) -> list[bool]:
        """By layer, whether a member waits for statistics in its backward."""
        standing = (self._sums[layer.name].standing_bytes[0, member] for layer in self.layers)
        return [self._is_norm(layer) and bool(size > 0) for layer, size in zip(self.layers, standing, strict=True)]

    def _is_running(self, name: str) -> bool:
        """Whether the layer normalises by running statistics, and exchanges none."""
        layer = self._shards[name].sized.layer
        return self._is_norm(layer) and not takes_statistics(layer, not self.evaluates)

    def _is_norm(self, layer: Layer) -> bool:
        return self._shards[layer.name].sized.relation.REDUCTION == "statistics"

    def levels(self, member: int) -> list[list[float]] | None:
        """How high memory rises in each layer; None if that was not measured."""
        by_layer = []
        sums = self._cost_model.tables.graph.parameter_bytes
        for layer in self.layers:
            part = self._reading(layer, member)
            index = self.prices.index[layer.name]
            kind = self._kinds[member]
            whole = float(self._cost_model.tables.at(kind, part.samples).workspace_bytes[index])
            needs = float(self._costs[layer.name]["workspace_bytes"][member]) - part.share * whole
            size = float(sums[index + 1] - sums[index])
            weights = float(self._sums[layer.name].held_bytes[0, member]) / size if size else 0.0
            levels = (self._cost_model.levels.at(kind, samples) for samples in (part.samples, 0.0))
            one = levels_of_part(*levels, index, part, needs, (weights, size))
            if one is None:
                return None
            by_layer.append(one)
        return by_layer

    def parts(self, member: int) -> list[tuple[float, float]]:
        """Of how many samples a member has which share of each layer."""
        shards = [self._shards[layer.name] for layer in self.layers]
        return [(float(one.samples[0, member]), float(one.share[0, member])) for one in shards]

    def reads(self, member: int) -> list[tuple[float, float, bool]]:
        """By layer, of how many samples a member reads, what it saves of these where they lie, and if it has a copy."""
        by_layer = []
        for layer, (samples, share) in zip(self.layers, self.parts(member), strict=True):
            read = max(share, float(self._shards[layer.name].read_share(0)[member]))
            is_copy = self._received(layer, member, copied=True) > 0
            by_layer.append((samples * read, self._inputs_saved(layer, member)[1], is_copy))
        return by_layer

    def own_bytes(self, member: int) -> list[float]:
        """What each layer of a member saves, its share of the inputs included."""
        return [float(self._costs[layer.name]["saved_bytes"][member]) for layer in self.layers]

    def unrecorded_bytes(self, member: int) -> int:
        """With blocks: the most that a forward pass holds of values."""
        return self._account.peak_bytes(member, self._cost_model.profile.graph)

    @cached_property
    def _apart(self) -> list[Layer]:
        """The layers that are in no block."""
        inside = {name for block in self.blocks for name in block.layers}
        return [layer for layer in self.layers if layer.name not in inside]

    @cached_property
    def _account(self) -> BlockAccount:
        from tests.planner.extras.tiles.plain_blocks import BlockAccount  # goes with the extra

        graph = self._cost_model.profile.graph
        division = Division.placed(graph, self.placements, len(self.ranks), self.samples, self.blocks)
        sized = {name: shards.sized for name, shards in self._shards.items()}
        return BlockAccount(self._cost_model, division, sized, self.ranks)

    @cached_property
    def _tile_shards(self) -> dict[str, Shards]:
        """By layer of a block, with its tiles as options."""
        return {
            name: replace(block.shards[name], sized=self._shards[name].sized)
            for block in self._account.division.blocks
            for name in block.layers
        }

    @cached_property
    def _tile_costs(self) -> dict[str, Array]:
        """Seconds of a forward, ``[tiles, ranks]``."""
        return {name: self._costs_of(name, shards)[0] for name, shards in self._tile_shards.items()}

    def workspace_bytes(self, member: int) -> float:
        """What the hungriest layer needs while it runs."""
        return max(float(cost["workspace_bytes"][member]) for cost in self._costs.values())

    def _received(self, layer: Layer, member: int, *, copied: bool = False) -> float:
        """Bytes from other ranks; ``copied``: those that no convolution adds up as they come."""
        adds_up = copied and is_convolution(layer.kind)
        into = (one for one in self._into.get(layer.name, ()) if not (adds_up and one.is_halo[0, 0]))
        return sum(float(one.received_bytes[0, 0, member]) for one in into)

    @cached_property
    def _into(self) -> dict[str, list[Resharding]]:
        """By layer, what crosses on the way to it."""
        by_reader: dict[str, list[Resharding]] = {}
        for (_, reader), one in self._crossings.items():
            by_reader.setdefault(reader, []).append(one)
        return by_reader

    @property
    def _cost_model(self) -> CostModel:
        return self.prices.cost_model

    @cached_property
    def _kinds(self) -> list[str]:
        return [self._cost_model.main_kind(rank) for rank in self.ranks]

    @cached_property
    def _shards(self) -> dict[str, Shards]:
        graph = self._cost_model.profile.graph
        values = graph.values()
        by_layer = {}
        for layer in self.layers:
            sized = SizedLayer.of(graph, layer, values, self.samples, mixes_samples=False)
            by_layer[layer.name] = shards_of(sized, (ShardingSpec.placed(self.placements[layer.name]),))
        return by_layer

    @cached_property
    def _costs(self) -> dict[str, dict[str, Array]]:
        """By layer and quantity, of each member's part."""
        return {
            name: dict(zip(QUANTITIES, self._costs_of(name, shards)[:, 0], strict=True))
            for name, shards in self._shards.items()
        }

    def _costs_of(self, name: str, shards: Shards) -> Array:
        """``[quantities, options, members]`` of each part: as measured or modelled, else its share of whole samples."""
        index = self.prices.index[name]
        shared = len(self.ranks) > 1
        cost = np.zeros((len(QUANTITIES), len(shards.options), len(self.ranks)))
        for member, kind in enumerate(self._kinds):  # what corrections add comes after the parts that were measured
            for option in range(len(shards.options)):
                table = self._cost_model.tables.at(kind, int(shards.samples[option, member]))
                whole = [getattr(table, what)[index + 1] - getattr(table, what)[index] for what in QUANTITIES[:-1]]
                share = float(shards.share[option, member])
                cost[:, option, member] = np.maximum(0.0, [*whole, table.workspace_bytes[index]]) * share
        self._cost_model.tables.parts.put_in(cost, name, self._kinds, shards)
        for member, kind in enumerate(self._kinds):
            cost[0, :, member] *= self._cost_model.excess(FORWARD, kind, shared)
            cost[1:4, :, member] *= self._cost_model.excess(BACKWARD, kind, shared)
        return cost

    @cached_property
    def _sums(self) -> dict[str, Sums]:
        """By layer: its sums over ranks; a tied parameter is its first user's."""
        graph = self._cost_model.profile.graph
        rate = partial(reduction_rate, self._cost_model)
        first: dict[str, str] = {}
        for layer in graph.layers:
            for name in layer.parameters:
                first.setdefault(name, layer.name)
        return {
            layer.name: sums_of(
                self._shards[layer.name],
                tuple(first[name] == layer.name for name in layer.parameters),
                self.ranks,
                rate,
                self._cost_model.profile.cluster,
            )
            for layer in self.layers
        }

    @cached_property
    def _crossings(self) -> dict[tuple[str, str], Resharding]:
        """What passes between two layers of the stage, by (maker, reader)."""
        values: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for reader in self.layers:
            for position, name in enumerate(reader.inputs):
                maker, output = output_of(name)
                if maker in self._shards and reader.inputs.index(name) == position:
                    values.setdefault((maker, reader.name), []).append((output, position))
        return {
            (maker, reader): resharding_of(
                self._shards[maker], self._shards[reader], tuple(passing), self.ranks, self._cost_model.network
            )
            for (maker, reader), passing in values.items()
        }

    @cached_property
    def _waited_s(self) -> tuple[float, float]:
        """What ranks wait for one another, forward and backward."""
        kinds = {layer.name: layer.kind for layer in self.layers}
        apart = {layer.name for layer in self._apart}
        own = [self._sums[name].statistics_s for name in apart if not self._is_running(name)]
        forward_s, backward_s = (sum(float(seconds[way, 0]) for seconds in own) for way in range(2))
        for (_, reader), moving in self._crossings.items():
            if reader not in apart:
                continue
            ahead, behind = (self._costs[reader][what][None] for what in ("forward_s", "backward_s"))
            there, back = exposed(moving, kinds[reader], ahead, behind, self._cost_model.profile.cluster)
            forward_s = forward_s + float(there[0, 0])
            backward_s = backward_s + float(back[0, 0])
        if self.blocks:
            forward_s += self._account.fetched_s()
            for shards in self._tile_shards.values():
                if shards.sized.relation.REDUCTION == "sum":
                    forward_s += float(pending_s(shards, self.ranks, self._cost_model.profile.cluster)[0].sum())
        for layer in self._apart:  # partial sums of what is read from outside
            if layer.inputs and producer(layer.inputs[0]) not in self._shards:
                seconds = float(scattered_s(self._shards[layer.name], self.ranks, self._cost_model.network)[0])
                forward_s = forward_s + seconds
                backward_s = backward_s + seconds
        return forward_s, backward_s

    @cached_property
    def _waited_again_s(self) -> float:
        """The part of a forward's waits that is in layers that alone are computed again."""
        total = 0.0
        for layer in (each for each in self.layers if each.name in self.again):
            total += float(self._sums[layer.name].statistics_s[0, 0])
            if layer.inputs and producer(layer.inputs[0]) not in self._shards:
                total += float(scattered_s(self._shards[layer.name], self.ranks, self._cost_model.network)[0])
            ahead, behind = (self._costs[layer.name][what][None] for what in ("forward_s", "backward_s"))
            for moving in self._into.get(layer.name, ()):
                total += float(exposed(moving, layer.kind, ahead, behind, self._cost_model.profile.cluster)[0][0, 0])
        return total

    def _slowest_s(self, layer: Layer, what: str) -> float:
        return float(self._costs[layer.name][what].max())

    def _by_bytes_s(self, layer: Layer, seconds: Sequence[float]) -> float:
        """In proportion to the bytes held, on the slowest member; ``seconds``: by member, of all of the layer's own."""
        sums = self._cost_model.tables.graph.parameter_bytes
        index = self.prices.index[layer.name]
        own = float(sums[index + 1] - sums[index])
        held = self._sums[layer.name].held_bytes[0]
        return max(s * float(size) / own for s, size in zip(seconds, held, strict=True)) if own else 0.0
