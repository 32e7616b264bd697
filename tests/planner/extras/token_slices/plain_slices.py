"""A stage of one rank, slice by slice of its tokens: the same questions as of a stage whose layers have layouts.

Prices are those of the cost model, as in ``prices``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.extras.token_slices.prices import SliceTable
from planner.ir.graph import Layer
from tests.oracles.parts import Reading, inputs_saved, levels_of_part
from tests.oracles.prices import QUANTITIES, LayerPrices


@dataclass(frozen=True, eq=False)
class Sliced:
    """A stage of one rank, for one token slice of micro-batches of ``samples``; the same questions as of a ``LaidOut``.

    Attributes:
        layers: of the stage, in the graph's order.
        table: what each layer costs for that slice.
    """

    prices: LayerPrices
    layers: Sequence[Layer]
    table: SliceTable
    kind: str
    samples: int
    recompute: bool

    def action_s(self, what: str, accumulates: bool) -> float:
        """Seconds of a forward or backward (one of ``SECONDS``)."""
        total = sum(self._of(layer, what) for layer in self.layers)
        if what in ("backward_s", "backward_input_s") and self.recompute:
            total += sum(self._of(layer, "forward_s") for layer in self.layers)
        if accumulates:
            total += sum(self.prices.accumulate_s(layer, self.kind, shared=False) for layer in self.layers)
        return total

    def exchanged_s(self, what: str) -> float:
        """Slices are on one rank."""
        return 0.0

    def update_s(self) -> float:
        """Seconds of the update."""
        return sum(self.prices.update_s(layer, self.kind) for layer in self.layers)

    def reduction_s(self) -> float:
        """One rank sums with nobody."""
        return 0.0

    def parameter_bytes(self, member: int) -> float:
        """Bytes of the parameters of the stage."""
        return sum(self.made_bytes(member))

    def saved_bytes(self, member: int) -> list[float]:
        """What each layer saves for the backward, and what it keeps of other slices' tokens and for other slices."""
        beyond = (self._received(layer) if self.recompute else self._inputs_saved(layer)[0] for layer in self.layers)
        return [self._of(layer, "saved_bytes") + more for layer, more in zip(self.layers, beyond, strict=True)]

    def made_bytes(self, member: int) -> list[float]:
        """Parameters of each layer, those that an earlier one uses too left out."""
        sums = self.prices.cost_model.tables.graph.parameter_bytes
        places = [self.prices.index[layer.name] for layer in self.layers]
        return [float(sums[at + 1] - sums[at]) for at in places]

    def summed(self, member: int) -> dict[str, tuple[tuple[int, ...], int]]:
        """One rank sums with nobody."""
        return {}

    def always_bytes(self) -> float:
        """What later slices read is kept, although activations are computed again."""
        return sum(self._received(layer) for layer in self.layers)

    def standing_bytes(self, member: int) -> float:
        """No exchange stands ready."""
        return 0.0

    def levels(self, member: int) -> list[list[float]] | None:
        """How high memory rises in each layer; None if that was not measured."""
        by_layer = []
        cost_model = self.prices.cost_model
        for layer in self.layers:
            at = self.prices.index[layer.name]
            share = float(self.table.share[at])
            whole = float(cost_model.tables.at(self.kind, self.samples).workspace_bytes[at])
            needs = self._of(layer, "workspace_bytes") - share * whole
            sums = cost_model.tables.graph.parameter_bytes
            size = float(sums[at + 1] - sums[at])
            weights = 1.0 if size else 0.0, size
            levels = (cost_model.levels.at(self.kind, samples) for samples in (self.samples, 0.0))
            one = levels_of_part(*levels, at, self._reading(layer), needs, weights)
            if one is None:
                return None
            by_layer.append(one)
        return by_layer

    def parts(self, member: int) -> list[tuple[float, float]]:
        """Of the samples of a micro-batch which share each layer of a slice is."""
        return [(float(self.samples), float(self.table.share[self.prices.index[layer.name]])) for layer in self.layers]

    def reads(self, member: int) -> list[tuple[float, float, bool]]:
        """By layer, of how many samples a slice reads, what it saves of these where they lie, and if it has a copy."""
        shares = [share for _, share in self.parts(member)]
        return [
            (self.samples * share, self._inputs_saved(layer)[1], False)
            for layer, share in zip(self.layers, shares, strict=True)
        ]

    def own_bytes(self, member: int) -> list[float]:
        """What each layer saves of a slice's own tokens."""
        return [self._of(layer, "saved_bytes") for layer in self.layers]

    def _inputs_saved(self, layer: Layer) -> tuple[float, float]:
        levels = self.prices.cost_model.levels
        return inputs_saved(levels.at(self.kind, self.samples), self.prices.index[layer.name], self._reading(layer))

    def _reading(self, layer: Layer) -> Reading:
        share = float(self.table.share[self.prices.index[layer.name]])
        return Reading(self.samples, share, 0.0, self._received(layer), stays=True)

    def unrecorded_bytes(self, member: int) -> int:
        """Slices have no blocks."""
        return 0

    def workspace_bytes(self, member: int) -> float:
        """What the hungriest layer needs while it runs."""
        return max(self._of(layer, "workspace_bytes") for layer in self.layers)

    def _of(self, layer: Layer, what: str) -> float:
        return float(self.table.costs[QUANTITIES.index(what), self.prices.index[layer.name]])

    def _received(self, layer: Layer) -> float:
        return float(self.table.received[self.prices.index[layer.name]])
