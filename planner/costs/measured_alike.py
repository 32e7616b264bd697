"""The costs of all layers at once, where all were measured at the same sizes on one back end each.

The same reading as :func:`planner.costs.layer.layer_cost`, which a test compares it with, in one numpy expression: a
long network is priced at many sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.costs.evidence import weakest
from planner.costs.layer import QUANTITIES
from planner.ir.cluster import INTERPOLATED, MEASURED, Evidence
from planner.ir.profile import Measurement

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredAlike:
    """Measurements of all layers.

    Attributes:
        sizes: samples, ascending, at least two.
        values: (size, layer, quantity).
        evidence: by size, then by layer.
    """

    sizes: tuple[int, ...]
    values: Array
    evidence: tuple[tuple[Evidence, ...], ...]

    def at(self, samples: float) -> tuple[Array, tuple[Evidence, ...]]:
        """(layer, quantity) at ``samples`` samples, and how well each layer's are known."""
        if samples == 0:
            return np.zeros_like(self.values[0]), (MEASURED,) * self.values.shape[1]
        if samples in self.sizes:
            position = self.sizes.index(int(samples))
            return self.values[position], self.evidence[position]
        above = sum(size < samples for size in self.sizes)
        high = min(max(above, 1), len(self.sizes) - 1)
        low = high - 1
        x0, x1, y0, y1 = self.sizes[low], self.sizes[high], self.values[low], self.values[high]
        read = np.maximum(0.0, y0 + (y1 - y0) * (samples - x0) / (x1 - x0))
        if samples < min(1, x0):
            read = np.maximum(read, y0 * samples / x0)
        if x0 < samples < x1:
            positive = (y0 > 0) & (y1 > 0)
            logs = np.log(np.where(positive, y0, 1.0)), np.log(np.where(positive, y1, 1.0))
            share = (np.log(samples) - np.log(x0)) / (np.log(x1) - np.log(x0))
            read = np.where(positive, np.exp(logs[0] + (logs[1] - logs[0]) * share), read)
        pairs = zip(self.evidence[low], self.evidence[high], strict=True)
        return read, tuple(weakest((INTERPOLATED, *pair)) for pair in pairs)


def measured_alike(by_layer: Sequence[Sequence[Measurement]]) -> tuple[MeasuredAlike, ...]:
    """The measurements as arrays; nothing if layers differ in sizes or change their back end, or have one size."""
    sizes = tuple(m.samples for m in by_layer[0]) if by_layer else ()
    uniform = len(sizes) > 1 and all(
        tuple(m.samples for m in found) == sizes and len({m.key for m in found}) == 1 for found in by_layer
    )
    if not uniform or len(set(sizes)) < len(sizes):
        return ()
    values = np.array(
        [[[float(getattr(m, name)) for name in QUANTITIES] for m in found] for found in by_layer], dtype=np.float64
    )
    evidence = tuple(tuple(found[k].evidence for found in by_layer) for k in range(len(sizes)))
    return (MeasuredAlike(sizes, values.transpose(1, 0, 2), evidence),)
