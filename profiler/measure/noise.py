"""How quiet the machine was: a fixed kernel, how long this process waited for its core, and a GPU's clock.

Clocks: how long a stretch of work took, on the processor or on a GPU.

On a GPU the work goes on after the call that started it.  So a lap is only noted while a pass runs, and its seconds are
read once the clock has settled, at the end of the pass: timing a layer does not make the next one wait for it.

    started = clock.start()
    ...                           the work
    lap = clock.stop(started)
    ...                           more laps
    clock.settle()
    clock.seconds(lap)

The processor's clock, as far as the operating system tells it.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch


class LapClock(Protocol):
    """Times the work of the calling thread, in laps that do not overlap."""

    def start(self) -> Any:
        """The beginning of a lap, for ``stop``."""
        ...

    def stop(self, started: Any) -> Any:
        """The lap from ``started`` to here, for ``seconds``."""
        ...

    def settle(self) -> None:
        """Return once all that was timed is done."""
        ...

    def seconds(self, lap: Any) -> float:
        """Seconds of a lap, once the clock has settled; asked once a lap."""
        ...


class ThreadClock:
    """Processor time of the calling thread: what other programs do on the machine is not in it."""

    def start(self) -> float:
        """See :class:`LapClock`, also for the others."""
        return time.thread_time()

    def stop(self, started: float) -> float:
        return time.thread_time() - started

    def settle(self) -> None:
        """Nothing: work is done when its call returns."""

    def seconds(self, lap: float) -> float:
        return lap


@dataclass(frozen=True, slots=True)
class _Lap:
    """Events around the work in the order of the stream, and the host's seconds between them."""

    start: torch.cuda.Event
    stop: torch.cuda.Event
    host_s: float


class CudaClock:
    """Time of a GPU between events on the current stream, or of the host that starts the work, whichever is longer.

    Where the GPU has work waiting, the time between events is that of the kernels alone; where it waits for the host,
    it is that of the calls.  A rank has the GPU do one action after another, and waits for each; so of small operators
    the time of the calls counts, also where the pass happened to hide it behind an earlier layer's kernels.

    It is too long where the host had to wait within the lap: for an operator that reads from the GPU, and where about a
    thousand launches were waiting already.

    Args:
        device: ``cuda:0``; its current stream is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spare: list[torch.cuda.Event] = []  # a new event is created at its first record, which takes a while

    def start(self) -> tuple[torch.cuda.Event, float]:
        """See :class:`LapClock`, also for the others."""
        return self._recorded(), time.perf_counter()

    def stop(self, started: tuple[torch.cuda.Event, float]) -> _Lap:
        event, start_s = started
        host_s = time.perf_counter() - start_s
        return _Lap(event, self._recorded(), host_s)

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def seconds(self, lap: _Lap) -> float:
        device_s: float = lap.start.elapsed_time(lap.stop) / 1e3  # CUDA says milliseconds
        self._spare += (lap.start, lap.stop)
        return max(device_s, lap.host_s)

    def _recorded(self) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch does not type its constructor
        event.record(torch.cuda.current_stream(self._device))
        return event


def clock_for(device: torch.device | str = "cpu") -> LapClock:
    """The clock of a device; one for each process that measures."""
    device = torch.device(device)
    return ThreadClock() if device.type == "cpu" else CudaClock(device)


def timed(clock: LapClock, work: Callable[[], object]) -> float:
    """Seconds of ``work``, waited for."""
    started = clock.start()
    work()
    lap = clock.stop(started)
    clock.settle()
    return clock.seconds(lap)


_SIZE = {"cpu": 512, "cuda": 4096}
_SM = "sm"
_SCHEDSTAT = Path("/proc/self/schedstat")

MOST_RUN_DELAY = 0.01
MOST_DRIFT = 0.05


def reference_kernel_s(device: torch.device | str = "cpu") -> float:
    """Median time of a product of two square matrices by the device's clock: of 512 rows, on a GPU of 4096."""
    device = torch.device(device)
    clock, size = clock_for(device), _SIZE.get(device.type, _SIZE["cuda"])
    left = torch.full((size, size), 0.5, device=device)
    return statistics.median(timed(clock, lambda: torch.mm(left, left)) for _ in range(20))


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
