"""Steps of a plan on ranks that are virtual devices, timed."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.virtual_device import VirtualDevice
from cuda_ops.memory import Counter
from planner.ir.schedule import Action
from planner.ir.timeline import Span
from profiler.quiet import RunDelay
from runtime.engine import Engine
from runtime.transport import Transport

WARM_UP = 2
_BARRIER_S = 60.0


@dataclass(frozen=True, slots=True)
class RankStep:
    """A step on one rank.

    Attributes:
        start_s, stop_s: on the clock that all processes of a machine share; with the time of finding sites before.
        busy_s: of the device, in which it worked.
        late_s: by how much its work took longer than the device's time, since something else had the core.
        delay: share of the time in which the process was ready and had no core.
        sites_s: of finding sites and sharing them out, before the program.
        peak_bytes: of tensors made since the engine was, the most in use at once; 0 if memory was not counted.
    """

    start_s: float
    stop_s: float
    busy_s: float
    late_s: float
    delay: float
    sites_s: float
    spans: tuple[Span, ...]
    peak_bytes: int
    loss: float | None

    @property
    def by_action_s(self) -> Mapping[str, float]:
        """Seconds by stage and kind of action, such as ``1B``."""
        return by_action(self.spans)


@dataclass(frozen=True, slots=True)
class Step:
    """A step, by rank."""

    ranks: tuple[RankStep, ...]

    @property
    def seconds(self) -> float:
        """From the common start to the end of the last rank."""
        return max(rank.stop_s for rank in self.ranks) - min(rank.start_s for rank in self.ranks)

    @property
    def loss(self) -> float:
        """Of the batch."""
        return next(rank.loss for rank in self.ranks if rank.loss is not None)

    @property
    def delay(self) -> float:
        """Of the rank that waited most for a core."""
        return max(rank.delay for rank in self.ranks)

    @property
    def balance(self) -> float:
        """The longest device time over the mean."""
        busy_s = [rank.busy_s for rank in self.ranks]
        return max(busy_s) / (sum(busy_s) / len(busy_s))


def timed_steps(
    engine: Engine,
    device: VirtualDevice,
    transport: Transport,
    batches: Iterable[tuple[Any, ...]],
    counter: Counter | None = None,
) -> list[RankStep]:
    """A rank's part in a step on each of ``batches``, of which all start together.

    Args:
        counter: of the bytes of tensors; None: they are not counted.
    """
    found = []
    with _no_collector():
        for batch in batches:
            transport.barrier(_BARRIER_S)
            before = device.busy_s, device.late_s, device.sites_s
            if counter is not None:
                counter.reset_peak()
            device.begin_step()
            delay, start_s = RunDelay(), time.perf_counter()
            result = engine.step(*batch)
            stop_s = time.perf_counter()
            busy_s, late_s, sites_s = (
                now - then for now, then in zip((device.busy_s, device.late_s, device.sites_s), before, strict=True)
            )
            peak_bytes = 0 if counter is None else counter.peak_bytes
            times = start_s, stop_s, busy_s, late_s, delay.share(), sites_s
            found.append(RankStep(*times, result.spans, peak_bytes, result.loss))
    return found


def by_action(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds by stage and kind of action, messages too."""
    found: dict[str, float] = {}
    for span in spans:
        action = Action.parse(span.action)
        key = f"{action.stage}{action.op.value}"
        found[key] = found.get(key, 0.0) + span.stop_s - span.start_s
    return found


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of the benchmarks' runs."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Python's collector of cycles runs before, and not inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
