"""Reading measurements between the measured sizes, written a second time for the checker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from planner.ir.profile import Measurement


def at_samples(measured: Sequence[Measurement], samples: float, what: str) -> float:
    """The measurement, or the line through two of one key: log-log between neighbours, straight elsewhere."""
    for measurement in measured:
        if measurement.samples == samples:
            return float(getattr(measurement, what))
    if samples == 0:
        return 0.0
    low = max((m for m in measured if m.samples < samples), key=lambda m: m.samples, default=None)
    high = min((m for m in measured if m.samples > samples), key=lambda m: m.samples, default=None)
    if low is not None and high is not None and low.key == high.key:
        a, b = float(getattr(low, what)), float(getattr(high, what))
        if a > 0 and b > 0:
            share = math.log(samples / low.samples) / math.log(high.samples / low.samples)
            return float(a * (b / a) ** share)
        return _line(low, high, samples, what)
    below = sorted((m for m in measured if low and m.samples <= low.samples and m.key == low.key), key=_samples)
    above = sorted((m for m in measured if high and m.samples >= high.samples and m.key == high.key), key=_samples)
    if len(below) > 1:
        return _line(below[-2], below[-1], samples, what)
    if len(above) > 1:
        return _line(above[0], above[1], samples, what)
    raise LookupError(f"{measured[0].layer} at {samples} samples")


def _samples(measurement: Measurement) -> int:
    return measurement.samples


def _line(low: Measurement, high: Measurement, samples: float, what: str) -> float:
    a, b = float(getattr(low, what)), float(getattr(high, what))
    least = a * samples / low.samples if samples < 1 else 0.0  # a part of a sample takes that part of the time
    return max(least, a + (b - a) * (samples - low.samples) / (high.samples - low.samples))


def from_points(points: Sequence[tuple[int, float]], size: float) -> float:
    """Log-log between the points; the first one's time below; the last slope, if it rises, beyond."""
    if size <= points[0][0]:
        return points[0][1]
    if len(points) == 1:
        return points[0][1] * size / points[0][0]
    for (x0, y0), (x1, y1) in pairwise(points):
        if size <= x1:
            return float(y0 * (y1 / y0) ** (math.log(size / x0) / math.log(x1 / x0)))
    (x0, y0), (x1, y1) = points[-2:]
    slope = max(0.0, math.log(y1 / y0) / math.log(x1 / x0))
    return float(y1 * (size / x1) ** slope)
