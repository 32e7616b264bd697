"""How quiet the machine was: a fixed kernel, and how long this process waited for its core."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

_SIZE = 512
_SCHEDSTAT = Path("/proc/self/schedstat")

MOST_RUN_DELAY = 0.01
MOST_DRIFT = 0.05


def canary_s() -> float:
    """Median thread CPU time of a product of two 512 x 512 matrices."""
    left = torch.full((_SIZE, _SIZE), 0.5)
    times = []
    for _ in range(20):
        start_s = time.thread_time()
        torch.mm(left, left)
        times.append(time.thread_time() - start_s)
    return statistics.median(times)


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
