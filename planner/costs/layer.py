"""What a layer costs at any number of samples: an exact hit, else read between measurements of one back end.

    0 samples                            nothing
    a measured number                    that measurement
    between two measured ones            a straight line in log-log, if both ran on the same back end (``key``)
    beyond, or across a change of key    the straight line through the two nearest of one key; for a part of a sample
                                         (its sites shared by ranks) no less than that part of the smaller of the two

Convolutions change their back end with the batch and jump by a factor of two there, hence the keys.  Ignored: that a
layer's time depends on what ran before it (caches).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

from planner.costs.evidence import weakest
from planner.ir.cluster import INTERPOLATED, MEASURED, Evidence
from planner.ir.errors import MissingMeasurementError
from planner.ir.profile import Measurement

QUANTITIES = ("forward_s", "backward_s", "backward_input_s", "backward_weight_s", "saved_bytes", "workspace_bytes")


@dataclass(frozen=True, slots=True)
class LayerCost:
    """``values`` in the order of ``QUANTITIES``: seconds, and bytes (fractions of a byte where read between)."""

    values: tuple[float, ...]
    evidence: Evidence


def layer_cost(measured: Sequence[Measurement], samples: float) -> LayerCost:
    """What the layer costs at ``samples`` samples.

    Args:
        measured: of one layer on one kind of device, at least one, by growing number of samples.

    Raises:
        MissingMeasurementError: the measurements say nothing about this size.
    """
    if samples == 0:
        return LayerCost((0.0,) * len(QUANTITIES), MEASURED)
    sizes = [measurement.samples for measurement in measured]
    position = bisect_left(sizes, samples)
    if position < len(sizes) and sizes[position] == samples:
        return LayerCost(_values(measured[position]), measured[position].evidence)
    low, high = _neighbours(measured, samples, position)
    inside = low.samples < samples < high.samples
    read = _log_log if inside else _affine
    values = tuple(
        read(low.samples, a, high.samples, b, samples) for a, b in zip(_values(low), _values(high), strict=True)
    )
    if samples < 1 and not inside:
        values = tuple(max(a, b * samples / low.samples) for a, b in zip(values, _values(low), strict=True))
    return LayerCost(values, weakest((INTERPOLATED, low.evidence, high.evidence)))


def _neighbours(measured: Sequence[Measurement], samples: float, position: int) -> tuple[Measurement, Measurement]:
    """The two measurements to draw a line through: around ``samples``, or the nearest two of a neighbour's key."""
    below, above = measured[:position], measured[position:]
    if below and above and below[-1].key == above[0].key:
        return below[-1], above[0]
    if below:
        alike = [m for m in below if m.key == below[-1].key]
        if len(alike) > 1:
            return alike[-2], alike[-1]
    if above:
        alike = [m for m in above if m.key == above[0].key]
        if len(alike) > 1:
            return alike[0], alike[1]
    raise MissingMeasurementError(
        f"the profile does not say what {measured[0].layer} costs at {samples} samples",
        [f"measured at {', '.join(_where(m) for m in measured)}"],
        [f"measure this size too: halopipe profile ... --sizes {samples}"],
    )


def _where(measurement: Measurement) -> str:
    return f"{measurement.samples} ({measurement.key})" if measurement.key else f"{measurement.samples}"


def _values(measurement: Measurement) -> tuple[float, ...]:
    return tuple(float(getattr(measurement, name)) for name in QUANTITIES)


def _affine(x0: int, y0: float, x1: int, y1: float, x: float) -> float:
    return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))


def _log_log(x0: int, y0: float, x1: int, y1: float, x: float) -> float:
    if y0 <= 0 or y1 <= 0:
        return _affine(x0, y0, x1, y1, x)
    return exp(log(y0) + (log(y1) - log(y0)) * (log(x) - log(x0)) / (log(x1) - log(x0)))
