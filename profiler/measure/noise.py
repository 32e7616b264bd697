"""Clocks: how long a stretch of work took, on the processor or on a GPU; and a fixed kernel, timed by them.

On a GPU the work goes on after the call that started it.  So a lap is only noted while a pass runs, and its seconds are
read once the clock has settled, at the end of the pass.

    started = clock.start()
    ...                           the work
    lap = clock.stop(started)
    ...                           more laps
    clock.settle()
    clock.seconds(lap)
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch

from cuda_ops._torch import occupy_gpu


class LapClock(Protocol):
    """Times the work of the calling thread, in laps that do not overlap."""

    def start(self, of: Hashable = None) -> Any:
        """The beginning of a lap, for ``stop``.

        Args:
            of: what the lap is of, if its kernels alone count: a GPU then runs them one behind the other.
        """

    def stop(self, started: Any) -> Any:
        """The lap from ``started`` to here, for ``seconds``."""

    def settle(self) -> None:
        """Return once all that was timed is done."""

    def seconds(self, lap: Any) -> float:
        """Seconds of a lap, once the clock has settled; asked once a lap."""


class ThreadClock:
    """Processor time of the calling thread: what other programs do on the machine is not in it."""

    def start(self, of: Hashable = None) -> float:
        """See :class:`LapClock`, also for the others."""
        return time.thread_time()

    def stop(self, started: float) -> float:
        return time.thread_time() - started

    def settle(self) -> None:
        """Nothing: work is done when its call returns."""

    def seconds(self, lap: float) -> float:
        return lap


_CYCLES_PER_S = 2.5e9
"""No GPU's multiprocessors are faster; on slower ones a wait is longer than it must be, which does no harm."""
_FIRST_CALLS_S = 0.5e-3
_MOST_CALLS_S = 20e-3
_CALL_S = 50e-6
_SPARE_CALLS = 2.0


class CudaClock:
    """Time of a GPU between events on the current stream.

    A lap that is of nothing in particular lasts until the GPU has done the work: where it waits for the host, these
    waits are in it, as in a step.

    A lap of something is the time of its kernels.  The GPU is busy before it for longer than the host needed for this
    lap so far (the least counts, and a share more), so all kernels are waiting when the first one starts.  What the
    calls add to a step cannot be told layer by layer: :mod:`profiler.measure.host_time`.

    It is too long for an operator that reads from the GPU, which has to wait for the host in between.

    Args:
        device: ``cuda:0``; its current stream is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spare: list[torch.cuda.Event] = []  # a new event is created at its first record, which takes a while
        self._calls_s: dict[Hashable, float] = {}

    def start(self, of: Hashable = None) -> tuple[torch.cuda.Event, Hashable, float]:
        """See :class:`LapClock`, also for the others."""
        if of is not None:
            torch.cuda.synchronize(self.device)
            calls_s = min(_MOST_CALLS_S, self._calls_s.get(of, _FIRST_CALLS_S))
            occupy_gpu(round((_CALL_S + _SPARE_CALLS * calls_s) * _CYCLES_PER_S))
        return self._recorded(), of, time.perf_counter()

    def stop(self, started: tuple[torch.cuda.Event, Hashable, float]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        event, of, start_s = started
        if of is not None:
            calls_s = time.perf_counter() - start_s
            self._calls_s[of] = min(calls_s, self._calls_s.get(of, calls_s))
        return event, self._recorded()

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    def seconds(self, lap: tuple[torch.cuda.Event, torch.cuda.Event]) -> float:
        self._spare += lap
        return float(lap[0].elapsed_time(lap[1])) / 1e3  # CUDA says milliseconds

    def _recorded(self) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch does not type its constructor
        event.record(torch.cuda.current_stream(self.device))
        return event


class CallClock:
    """Time of the host's calls beside a GPU, which has nothing to do before each lap.

    Args:
        device: that is waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self, of: Hashable = None) -> float:
        """See :class:`LapClock`, also for the others."""
        torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def stop(self, started: float) -> float:
        return time.perf_counter() - started

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def seconds(self, lap: float) -> float:
        return lap


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


def reference_kernel_s(device: torch.device | str = "cpu") -> float:
    """Median time of a product of two square matrices by the device's clock: of 512 rows, on a GPU of 4096."""
    device = torch.device(device)
    clock = clock_for(device)
    size = _SIZE.get(device.type, _SIZE["cuda"])
    left = torch.full((size, size), 0.5, device=device)
    return statistics.median(timed(clock, lambda: torch.mm(left, left)) for _ in range(20))
