"""What a layer costs at any number of samples: an exact hit, else read between measurements of one back end.

    0 samples                            nothing
    a measured number                    that measurement
    between two measured ones            a straight line in log-log, if both ran on the same back end (``key``)
    beyond, or across a change of key    the straight line through the two nearest of one key; for a part of a sample
                                         (its sites shared by ranks) no less than that part of the smaller of the two
    no two of one key                    what layers like it say (``costs.layers.regression``), then a datasheet

Convolutions change their back end with the batch and jump by a factor of two there, hence the keys.  Ignored: that a
layer's time depends on what ran before it (caches).

Where all layers were measured at the same sizes on one back end each, :class:`MeasuredAlike` reads them all at once by
the same rule: a long network is priced at many sizes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil

import numpy as np
from numpy.typing import NDArray

from planner.costs.layers.confidence import weakest
from planner.ir.cluster import INTERPOLATED, MEASURED, Evidence
from planner.ir.errors import MissingMeasurementError
from planner.ir.profile import Measurement

Array = NDArray[np.float64]

QUANTITIES = ("forward_s", "backward_s", "backward_input_s", "backward_weight_s", "saved_bytes", "workspace_bytes")


@dataclass(frozen=True, slots=True)
class LayerCost:
    """``values`` in the order of ``QUANTITIES``: seconds, and bytes (fractions of a byte where read between).

    Attributes:
        low, high: factors on forward and backward together, between which four of five such figures turned out.
    """

    values: tuple[float, ...]
    evidence: Evidence
    low: float = 1.0
    high: float = 1.0


@dataclass(frozen=True, slots=True)
class SizeNeighbours:
    """Two measurements to draw a line through.

    Attributes:
        inside: whether the asked size lies between them.
    """

    low: Measurement
    high: Measurement
    inside: bool


def layer_cost(
    measured: Sequence[Measurement], samples: float, otherwise: Callable[[], tuple[LayerCost, ...]] = tuple
) -> LayerCost:
    """What the layer costs at ``samples`` samples; ``low`` and ``high`` are those of ``otherwise``, else 1.

    Args:
        measured: of one layer on one kind of device, by growing number of samples.
        otherwise: asked where there is no line to draw.

    Raises:
        MissingMeasurementError: nothing says what this size costs.
    """
    if samples == 0:
        return LayerCost((0.0,) * len(QUANTITIES), MEASURED)
    exact = hit(measured, samples)
    if exact is not None:
        return LayerCost(values_of(exact), exact.evidence)
    line = neighbours(measured, samples)
    if line is not None:
        return _read(line, samples)
    for fallback in otherwise():
        return fallback
    layer = measured[0].layer if measured else "a layer"
    raise MissingMeasurementError(
        f"the profile does not say what {layer} costs at {samples} samples",
        [f"measured at {', '.join(_where(m) for m in measured) or 'no size'}"],
        measured_together([samples, *(m.samples for m in measured)]),
    )


def measured_together(sizes: Iterable[float]) -> list[str]:
    """What to do about a size that no measurement tells of: of two sizes on, all others are read from a line."""
    texts = ",".join(map(str, sorted(set(map(ceil, sizes)))))
    return [f"halopipe profile ... --sizes {texts}: all in one profile", "profile without --sizes, which finds them"]


def hit(measured: Sequence[Measurement], samples: float) -> Measurement | None:
    """The measurement of that size."""
    position = bisect_left(measured, samples, key=_size)
    return measured[position] if position < len(measured) and measured[position].samples == samples else None


def neighbours(measured: Sequence[Measurement], samples: float) -> SizeNeighbours | None:
    """The two measurements to draw a line through: around ``samples``, or the nearest two of a neighbour's key."""
    position = bisect_left(measured, samples, key=_size)
    below = measured[:position]
    above = measured[position:]
    if below and above and below[-1].key == above[0].key:
        return SizeNeighbours(below[-1], above[0], True)
    if below:
        alike = [m for m in below if m.key == below[-1].key]
        if len(alike) > 1:
            return SizeNeighbours(alike[-2], alike[-1], False)
    if above:
        alike = [m for m in above if m.key == above[0].key]
        if len(alike) > 1:
            return SizeNeighbours(alike[0], alike[1], False)
    return None


def values_of(measurement: Measurement) -> tuple[float, ...]:
    """In the order of ``QUANTITIES``."""
    return tuple(float(getattr(measurement, name)) for name in QUANTITIES)


def _read(line: SizeNeighbours, samples: float) -> LayerCost:
    low = line.low
    high = line.high
    values = read_line(low.samples, np.array(values_of(low)), high.samples, np.array(values_of(high)), samples)
    return LayerCost(tuple(values.tolist()), weakest((INTERPOLATED, low.evidence, high.evidence)))


def read_line(low: int, at_low: Array, high: int, at_high: Array, samples: float) -> Array:
    """Figures at ``samples``, given those of two sizes: in log-log between them where both are positive, else straight.

    None is below 0; of a part of a sample, none below that part of what the smaller size takes.
    """
    read = np.maximum(0.0, at_low + (at_high - at_low) * (samples - low) / (high - low))
    if samples < 1:
        return np.asarray(np.maximum(read, at_low * samples / low))
    if low < samples < high:
        positive = (at_low > 0) & (at_high > 0)
        y0 = np.log(np.where(positive, at_low, 1.0))
        y1 = np.log(np.where(positive, at_high, 1.0))
        share = (np.log(samples) - np.log(low)) / (np.log(high) - np.log(low))
        read = np.where(positive, np.exp(y0 + (y1 - y0) * share), read)
    return np.asarray(read)


def _size(measurement: Measurement) -> int:
    return measurement.samples


def _where(measurement: Measurement) -> str:
    return f"{measurement.samples} ({measurement.key})" if measurement.key else f"{measurement.samples}"


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredAlike:
    """Measurements of all layers.

    Attributes:
        first: of the first layer, at least two by growing size: those of other layers are at the same sizes.
        values: (size, layer, quantity).
        evidence: by size, then by layer.
    """

    first: Sequence[Measurement]
    values: Array
    evidence: tuple[tuple[Evidence, ...], ...]

    def at(self, samples: float) -> tuple[Array, tuple[Evidence, ...]]:
        """(layer, quantity) at ``samples`` samples, and how well each layer's are known."""
        if samples == 0:
            return np.zeros_like(self.values[0]), (MEASURED,) * self.values.shape[1]
        exact = hit(self.first, samples)
        if exact is not None:
            position = self.first.index(exact)
            return self.values[position], self.evidence[position]
        line = neighbours(self.first, samples)
        if line is None:
            raise ValueError("of one size alone there is no line")
        low = self.first.index(line.low)
        high = self.first.index(line.high)
        read = read_line(line.low.samples, self.values[low], line.high.samples, self.values[high], samples)
        return read, _between(self.evidence[low], self.evidence[high])


@cache
def _between(low: tuple[Evidence, ...], high: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
    """By layer, how well a figure between two sizes is known."""
    return tuple(weakest((INTERPOLATED, *pair)) for pair in zip(low, high, strict=True))


def measured_alike(by_layer: Sequence[Sequence[Measurement]]) -> tuple[MeasuredAlike, ...]:
    """The measurements as arrays; nothing if layers differ in sizes or change their back end, or have one size."""
    sizes = tuple(m.samples for m in by_layer[0]) if by_layer else ()
    uniform = len(sizes) > 1 and all(
        tuple(m.samples for m in of_layer) == sizes and len({m.key for m in of_layer}) == 1 for of_layer in by_layer
    )
    if not uniform or len(set(sizes)) < len(sizes):
        return ()
    values = np.array(
        [[[float(getattr(m, name)) for name in QUANTITIES] for m in of_layer] for of_layer in by_layer],
        dtype=np.float64,
    )
    evidence = tuple(tuple(of_layer[k].evidence for of_layer in by_layer) for k in range(len(sizes)))
    return (MeasuredAlike(by_layer[0], values.transpose(1, 0, 2), evidence),)
