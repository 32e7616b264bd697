"""Clocks: how long a stretch of work took, on the processor or on a GPU.

On a GPU the work goes on after the call that started it.  So a lap is only noted while a pass runs, and its seconds are
read once the clock has settled, at the end of the pass: timing a layer does not make the next one wait for it.

    started = clock.start()
    ...                           the work
    lap = clock.stop(started)
    ...                           more laps
    clock.settle()
    clock.seconds(lap)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Clock(Protocol):
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
        """See :class:`Clock`, also for the others."""
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
        """See :class:`Clock`, also for the others."""
        return self._recorded(), time.perf_counter()

    def stop(self, started: tuple[torch.cuda.Event, float]) -> _Lap:
        event, start_s = started
        host_s = time.perf_counter() - start_s
        return _Lap(event, self._recorded(), host_s)

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def seconds(self, lap: _Lap) -> float:
        device_s = lap.start.elapsed_time(lap.stop) / 1e3  # CUDA says milliseconds
        self._spare += (lap.start, lap.stop)
        return max(device_s, lap.host_s)

    def _recorded(self) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def clock_for(device: torch.device | str = "cpu") -> Clock:
    """The clock of a device; one for each process that measures."""
    device = torch.device(device)
    return ThreadClock() if device.type == "cpu" else CudaClock(device)


def timed(clock: Clock, work: Callable[[], object]) -> float:
    """Seconds of ``work``, waited for."""
    started = clock.start()
    work()
    lap = clock.stop(started)
    clock.settle()
    return clock.seconds(lap)
