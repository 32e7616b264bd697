"""How far repeated measurements can be trusted: their mean and spread, and how quiet the machine was.

How long a process waited for its core, by how much a fixed kernel's time drifted, and the processor's clock as far as
the operating system tells it.  Nothing here needs torch: the command that waits for measuring processes reads it too.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_TRIMMED = 0.2


def trimmed_mean(values: Sequence[float]) -> float:
    """The mean without the least and the greatest fifth of ``values``."""
    dropped = int(len(values) * _TRIMMED)
    kept = sorted(values)[dropped : len(values) - dropped]
    return statistics.fmean(kept)


def trimmed_mean_variance(values: Sequence[float]) -> float:
    """Of the trimmed mean: from the values with those that it drops pulled in (Tukey and McLaughlin 1963).

    Infinite for a single value.
    """
    ordered = sorted(values)
    dropped = int(len(values) * _TRIMMED)
    kept = len(values) - 2 * dropped
    if kept < 2:
        return math.inf
    low = ordered[dropped]
    high = ordered[-1 - dropped]
    pulled_in = [min(max(value, low), high) for value in values]
    return statistics.variance(pulled_in) * (len(values) - 1) / (kept * (kept - 1))


def spread(values: Sequence[float]) -> float:
    """Interquartile range over the median; 0 for fewer than 4 values."""
    middle = statistics.median(values)
    if len(values) < 4 or middle <= 0:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / middle


_SM = "sm"
_SCHEDSTAT = Path("/proc/self/schedstat")

MOST_RUN_DELAY = 0.01
MOST_DRIFT = 0.05


def is_throttled(before: Mapping[str, float], after: Mapping[str, float]) -> bool:
    """Whether a GPU's clock changed between two readings at work, by more than canaries may drift; not if unknown."""
    if not before.get(_SM) or not after.get(_SM):
        return False
    return abs(after[_SM] / before[_SM] - 1) > MOST_DRIFT


class RunDelay:
    """Watches how much of the time since it was made this process was ready and had no core (0 outside Linux)."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._waited_s = _waited_s()

    def share(self) -> float:
        """Waiting time over wall-clock time."""
        return (_waited_s() - self._waited_s) / max(1e-9, time.perf_counter() - self._start_s)


def is_contended(run_delay: float, before_s: float, after_s: float) -> bool:
    """Whether the measurements between two canaries are to be trusted less."""
    return run_delay > MOST_RUN_DELAY or abs(after_s / before_s - 1) > MOST_DRIFT


def _waited_s() -> float:
    try:
        return int(_SCHEDSTAT.read_text(encoding="ascii").split()[1]) / 1e9
    except OSError:
        return 0.0


_FOLDER = Path("/sys/devices/system/cpu")
_INFO = Path("/proc/cpuinfo")
_KHZ = {"now": "scaling_cur_freq", "least": "scaling_min_freq", "most": "scaling_max_freq"}


def clocks(core: int | None, folder: Path = _FOLDER, info: Path = _INFO) -> dict[str, float]:
    """Hertz of ``core`` (None: the first): ``now``, ``least``, ``most``; what cannot be read is left out."""
    of_core = folder / f"cpu{core or 0}" / "cpufreq"
    hertz = {}
    for name, file in _KHZ.items():
        with contextlib.suppress(OSError, ValueError):
            hertz[name] = int((of_core / file).read_text(encoding="ascii")) * 1e3
    if "now" not in hertz:
        with contextlib.suppress(OSError, ValueError, IndexError):
            lines = info.read_text(encoding="utf-8").splitlines()
            speeds = [line.partition(":")[2] for line in lines if line.startswith("cpu MHz")]
            hertz["now"] = float(speeds[core or 0]) * 1e6
    return hertz


def governor(core: int | None, folder: Path = _FOLDER) -> str:
    """What chooses the clock of ``core``, such as ``performance``; empty where that cannot be read."""
    try:
        return (folder / f"cpu{core or 0}" / "cpufreq" / "scaling_governor").read_text(encoding="ascii").strip()
    except OSError:
        return ""
