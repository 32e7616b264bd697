"""Reading measurements between the measured sizes, written a second time for the checker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from planner.ir.cluster import Link
from planner.ir.profile import Measurement


def at_samples(measured: Sequence[Measurement], samples: float, what: str) -> float:
    """The measurement, or the line through two of one key: log-log between neighbours, straight elsewhere.

    Raises:
        LookupError: there are no two (``planner.check.layer_costs`` may know more).
    """
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
    raise LookupError(f"no line to read {what} at {samples} samples")


def _samples(measurement: Measurement) -> int:
    return measurement.samples


def _line(low: Measurement, high: Measurement, samples: float, what: str) -> float:
    a, b = float(getattr(low, what)), float(getattr(high, what))
    least = a * samples / low.samples if samples < 1 else 0.0  # a part of a sample takes that part of the time
    return max(least, a + (b - a) * (samples - low.samples) / (high.samples - low.samples))


def from_points(points: Sequence[tuple[int, float]], size: float, bytes_per_s: float | None = None) -> float:
    """Log-log between the points, the first one's time below; beyond, the bytes that remain at a rate.

    Args:
        bytes_per_s: that rate; None: the one between the last two points.
    """
    if size <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if size <= x1:
            return float(y0 * (y1 / y0) ** (math.log(size / x0) / math.log(x1 / x0)))
    x1, y1 = points[-1]
    if bytes_per_s is not None:
        return y1 + (size - x1) / bytes_per_s
    if len(points) == 1:
        return y1 * size / x1
    x0, y0 = points[-2]
    return y1 + max(0.0, (size - x1) * (y1 - y0) / (x1 - x0))


def message_s(link: Link, size: float) -> float:
    """A message of ``size`` bytes on an idle link."""
    if size <= 0:
        return 0.0
    if link.points:
        return from_points(link.points, size, link.bandwidth_bytes_per_s)
    return link.latency_s + size / link.bandwidth_bytes_per_s


def delay_s(points: Sequence[tuple[int, float]], size: float) -> float:
    """What a rank loses by a message: straight between the points, the first one's below, in proportion beyond."""
    if size <= 0 or not points:
        return 0.0
    if size <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if size <= x1:
            return y0 + (y1 - y0) * (size - x0) / (x1 - x0)
    x1, y1 = points[-1]
    return y1 / x1 * size
