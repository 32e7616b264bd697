"""What a message takes, and tables of (bytes, seconds): read between and beyond what was measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.ir.cluster import INTERPOLATED, Evidence, Link

TimesBySize = Sequence[tuple[int, float]]
Array = NDArray[np.float64]


def transfer_s(link: Link, num_bytes: ArrayLike) -> Array:
    """Seconds from the start of a message of ``num_bytes`` to its arrival; elementwise, 0 for nothing."""
    size = np.asarray(num_bytes, dtype=np.float64)
    if link.points:
        seconds = read_points(link.points, size, 1.0 / link.bandwidth_bytes_per_s)
    else:
        seconds = link.latency_s + size / link.bandwidth_bytes_per_s
    return np.where(size > 0, seconds, 0.0)


def read_points(points: TimesBySize, size: Array, beyond_s_per_byte: float | None = None) -> Array:
    """(bytes, seconds) by growing bytes, read in log-log; clamped below.

    Args:
        beyond_s_per_byte: what each byte beyond the last point takes; None: as between the last two.
    """
    x = np.log([float(at) for at, _ in points])
    y = np.log([seconds for _, seconds in points])
    inside = np.exp(np.interp(np.log(np.maximum(size, points[0][0])), x, y))
    slope = last_slope(points) if beyond_s_per_byte is None else beyond_s_per_byte
    return np.asarray(inside + np.maximum(size - points[-1][0], 0.0) * slope)


def read_delays(points: TimesBySize, num_bytes: ArrayLike) -> Array:
    """(bytes, seconds) read straight, as seconds may be 0; clamped below, in proportion beyond; 0 without points."""
    size = np.asarray(num_bytes, dtype=np.float64)
    if not points:
        return np.zeros_like(size)
    last_bytes, last_s = points[-1]
    inside = np.interp(size, [at for at, _ in points], [seconds for _, seconds in points])
    seconds = np.where(size > last_bytes, last_s * size / last_bytes, inside)
    return np.where(size > 0, seconds, 0.0)


def table_evidence(evidence: Evidence, points: TimesBySize, num_bytes: float) -> tuple[Evidence, ...]:
    """A reading inside a measured table is as good as the table; beyond it, it is not."""
    return (evidence, INTERPOLATED) if points and num_bytes > points[-1][0] else (evidence,)


def last_slope(points: TimesBySize) -> float:
    """Seconds a byte beyond the last point: as between the last two."""
    if len(points) == 1:
        return points[0][1] / points[0][0]
    (low, low_s), (high, high_s) = points[-2:]
    return max(0.0, (high_s - low_s) / (high - low))
