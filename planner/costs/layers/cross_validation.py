"""How far off reading between measurements was, for each measurement as if it had not been made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.costs.layers.confidence import INTERPOLATED_RANGE, Range, range_of
from planner.costs.layers.interpolation import layer_cost, neighbours
from planner.costs.layers.regression import family_names
from planner.ir.graph import Graph
from planner.ir.profile import Measurement

_Name = tuple[object, ...]


@dataclass(slots=True, eq=False)
class HeldBack:
    """Ranges of interpolated figures on one kind of device, by family, between measured sizes or beyond them.

    A family of few measurements has the range of all.  Nothing is computed before the first question.

    Attributes:
        by_layer: the measurements of each layer of ``graph``, by growing number of samples.
    """

    graph: Graph
    by_layer: Sequence[Sequence[Measurement]]
    _ratios: dict[tuple[_Name, bool], list[float]] = field(init=False, default_factory=dict, repr=False)
    _ranges: dict[tuple[_Name, bool], Range] = field(init=False, default_factory=dict, repr=False)

    def range(self, index: int, key: str, inside: bool) -> Range:
        """Of layer number ``index``, read on back end ``key``."""
        if not self._ratios:
            self._hold_back()
        name = family_names(self.graph, self.graph.layers[index], key)[0]
        found = self._ranges.get((name, inside))
        if found is None:
            of_all = range_of(self._ratios.get(((), inside), ()), INTERPOLATED_RANGE)
            found = self._ranges[name, inside] = range_of(self._ratios.get((name, inside), ()), of_all)
        return found

    def _hold_back(self) -> None:
        self._ratios[(), True] = []
        for layer, measured in zip(self.graph.layers, self.by_layer, strict=True):
            for position, one in enumerate(measured):
                others = (*measured[:position], *measured[position + 1 :])
                line = neighbours(others, one.samples)
                actual_s = one.forward_s + one.backward_s
                if line is None or actual_s <= 0:
                    continue
                predicted_s = sum(layer_cost(others, one.samples).values[:2])
                if predicted_s > 0:
                    name = family_names(self.graph, layer, line.low.key)[0]
                    for each in (name, ()):
                        self._ratios.setdefault((each, line.inside), []).append(actual_s / predicted_s)
