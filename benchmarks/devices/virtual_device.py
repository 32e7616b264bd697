"""A device on a core of this machine: what a rank computes is followed by so much waiting that it took longer.

A device of *factor* f does in f seconds what the core does in one: after each piece of work the rank is held until f x
the thread's processor time that the work took have passed since the piece began.  A rank that had to share its core
with something else, up to that factor, is held the less: the device is no slower for it.  Work is what a stage's device
and its host would do: forward, backward and its halves, update, and what is prepared of clouds.  Waiting for other
ranks, and what the transport itself does, is not charged: links are as fast as they are.

A rank is held *before it says anything to another rank*, and at the end of each action.  So others never get a message
earlier than from a device of that speed, also in the middle of a layer's exchange with the rank beside it.

    work  1.0 | held 1.0 | send | work 0.5 | held 0.5 | end of the action        factor 2

The engine is wrapped from outside: it does not know.  While held the thread sleeps, so that the core is free for the
threads that move messages, except for the last 0.15 ms: a sleeping thread is woken up to 0.1 ms late.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor

from benchmarks.devices.layer_clock import Mirror
from planner.ir.cluster import AROUND
from planner.ir.profile import Measurement, ParameterCost, PreparationCost, Profile
from runtime.engine import Engine
from runtime.pipeline.microbatches import Batch
from runtime.stage.local_stage import LocalStage
from runtime.transport import Pending, Transport

Cost = TypeVar("Cost", Measurement, ParameterCost, PreparationCost)

_SPIN_S = 1.5e-4
_PR_SET_TIMERSLACK = 29  # <linux/prctl.h>
_LEAST_S = 1e-4
"""Below this, what is owed waits for the next time."""


class VirtualDevice:
    """The clock of one rank.

    Attributes:
        factor: seconds of the device for one of the core; 1: the core itself, which is never held.
        busy_s: of the device since the start: ``factor`` x processor time of the work.
        held_s: how long the rank was held.
        late_s: by how much pieces of work took longer than the device's time, since something else had the core.
        sites_s: seconds until the sites of clouds were found and shared out, before the program of a step.
    """

    def __init__(self, factor: float) -> None:
        if factor < 1:
            raise ValueError(f"a device of factor {factor} would be faster than the core")
        self.factor = factor
        self.busy_s = self.held_s = self.late_s = self.sites_s = 0.0
        self._owed_s = 0.0
        self._since: tuple[float, float] | None = None  # processor time and clock
        self._shares = False

    def begin_step(self) -> None:
        """The next step starts now."""

    @property
    def mirrors(self) -> bool:
        """Whether this rank alone does what all would do together (:mod:`benchmarks.devices.layer_clock`)."""
        return False

    @contextmanager
    def working(self, *, shared: bool = False) -> Iterator[None]:
        """What is done inside is this device's work; not nested.

        Args:
            shared: it is to be done with the other ranks in any case.
        """
        self._shares = shared
        self._begin()
        try:
            yield
        finally:
            self.settle()
            self._end()
            self.late_s += max(0.0, -self._owed_s)
            self._owed_s = max(0.0, self._owed_s)

    def settle(self) -> None:
        """Hold the rank until a device of this speed would be here; without effect outside of work."""
        if self._since is None:
            return
        worked_s, took_s = (now - since for now, since in zip(_now(), self._since, strict=True))
        device_s = self._device_s(worked_s, took_s)
        self.busy_s += device_s
        self._owed_s += device_s - took_s
        if self._owed_s > _LEAST_S:
            start_s = time.perf_counter()
            hold_until(start_s + self._owed_s)
            took_s = time.perf_counter() - start_s
            self.held_s += took_s
            self._owed_s -= took_s
        self._since = _now()

    @contextmanager
    def talking(self) -> Iterator[None]:
        """What is done inside is the transport's: the rank settles first, and none of it is charged."""
        self.settle()
        works = self._since is not None
        if works:
            self._end()
        try:
            yield
        finally:
            if works:
                self._begin()

    @contextmanager
    def mirroring(self) -> Iterator[None]:
        """The same of what this rank does in the place of the transport; it goes on to be the one that works."""
        self.settle()
        yield
        if self._since is not None:
            self._since = _now()

    def _begin(self) -> None:
        self._since = _now()

    def _end(self) -> None:
        self._since = None

    def _device_s(self, worked_s: float, took_s: float) -> float:
        """How long a piece of work takes the device, that took so much processor time and so long here."""
        return self.factor * worked_s


def _now() -> tuple[float, float]:
    return time.thread_time(), time.perf_counter()


def wake_on_time() -> None:
    """Has this thread woken when it asked, not up to 50 microseconds later (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


def hold_until(until_s: float) -> None:
    """Return at that time of ``time.perf_counter``: asleep, but for the last moment."""
    time.sleep(max(0.0, until_s - time.perf_counter() - _SPIN_S))
    while time.perf_counter() < until_s:
        pass


_TOGETHER = ("all_reduce", "start_sum", "start_exchange", "reduce_scatter", "all_gather", "all_max")
"""What ranks do together; beside it they tell each other things by ``send``."""


class HeldTransport:
    """``transport`` of a rank that is ``device``: what leaves it leaves when that device would have made it."""

    def __init__(self, transport: Transport, device: VirtualDevice) -> None:
        self._transport, self._device = transport, device
        self.rank, self.world_size = transport.rank, transport.world_size
        self.send = _talks(transport.send, device)
        mirror = Mirror(transport.rank)
        for name in _TOGETHER:
            setattr(self, name, _talks(getattr(transport, name), device, getattr(mirror, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _HeldPending:
    """Something under way; waiting for it is not work."""

    def __init__(self, pending: Pending, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        self._pending, self._waiting = pending, waiting

    def wait(self) -> None:
        with self._waiting():
            self._pending.wait()


class _HeldProgram:
    """A stage's program on ``device``."""

    def __init__(self, program: Any, device: VirtualDevice) -> None:
        self._held = program
        for name in ("forward", "evaluate", "backward", "backward_input", "backward_weight"):
            setattr(self, name, _works(getattr(program, name), device))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._held, name)


@dataclass(frozen=True)
class HeldResident(LocalStage):
    """A stage on ``device``."""

    device: VirtualDevice = field(default_factory=lambda: VirtualDevice(1.0))

    def feed(self, batch: Batch, microbatch: int) -> dict[str, Tensor]:
        with self.device.working():
            return super().feed(batch, microbatch)

    def update(self) -> None:
        with self.device.working():
            super().update()


class _HeldBinder:
    """Finds the sites of a batch of clouds, and who has which of them, on ``device``."""

    def __init__(self, specializer: Any, device: VirtualDevice) -> None:
        self._specializer, self._device = specializer, device

    def bind(self, local_stages: Mapping[int, LocalStage], batch: Batch) -> Any:
        start_s = time.perf_counter()
        with self._device.working(shared=True):
            found = self._specializer.bind(local_stages, batch)
        self._device.sites_s += time.perf_counter() - start_s
        return found


def hold(engine: Engine, device: VirtualDevice) -> None:
    """Makes what ``engine`` computes the work of ``device``; its transport should be a :class:`HeldTransport`."""
    wake_on_time()
    for stage, local_stage in engine._local_stages.items():
        values = {each.name: getattr(local_stage, each.name) for each in fields(local_stage)}
        values["program"] = _HeldProgram(local_stage.program, device)
        engine._local_stages[stage] = HeldResident(**values, device=device)
    engine._runner.specializer = _HeldBinder(engine._runner.specializer, device)  # type: ignore[assignment]


def _works(function: Callable[..., Any], device: VirtualDevice) -> Callable[..., Any]:
    @wraps(function)
    def held(*arguments: Any, **named: Any) -> Any:
        with device.working():
            return function(*arguments, **named)

    return held


def _talks(
    function: Callable[..., Any], device: VirtualDevice, alone: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """``function`` of the transport; while ``device`` mirrors, ``alone`` in its place."""

    @wraps(function)
    def held(*arguments: Any, **named: Any) -> Any:
        told, meanwhile = function, device.talking
        if alone is not None and device.mirrors:
            told, meanwhile = alone, device.mirroring
        with meanwhile():
            found = told(*arguments, **named)
        return found if found is None else _HeldPending(found, meanwhile)

    return held


LEAST_HELD = 1.5
"""A device this much slower than its core leaves the core idle long enough for the threads that move messages."""


def with_devices(profile: Profile, factors: Sequence[float]) -> Profile:
    """``profile`` with virtual devices of such factors, by rank.

    What ranks compute around an exchange takes what it takes the slowest, for which the others wait.
    """
    cluster, slowest = profile.cluster, max(factors)
    calls = tuple(
        replace(each, points=tuple((size, slowest * seconds) for size, seconds in each.points))
        if each.operation in AROUND
        else each
        for each in cluster.collectives
    )
    profile = replace(profile, cluster=replace(cluster, collectives=calls))
    for rank, factor in enumerate(factors):
        profile = _with_device(profile, rank, factor) if factor != 1 else profile
    return profile


def _is_time(name: str) -> bool:
    """Whether a field of that name holds seconds."""
    return name.endswith("_s") or name == "seconds"


def _times(factor: float, seconds: Any) -> Any:
    return tuple(factor * each for each in seconds) if isinstance(seconds, tuple) else factor * seconds


def _with_device(profile: Profile, rank: int, factor: float) -> Profile:
    """With the device of ``rank`` of a kind of its own, on which all takes ``factor`` times as long."""
    kind = profile.cluster.devices[rank].kind
    slow, share = f"{kind}, {factor:g} times slower", 0.0 if factor >= LEAST_HELD else 1.0
    devices = tuple(
        replace(each, kind=slow, core_share=min(share, each.core_share)) if number == rank else each
        for number, each in enumerate(profile.cluster.devices)
    )

    def slowed(cost: Cost) -> Cost:
        seconds = {each.name: _times(factor, getattr(cost, each.name)) for each in fields(cost) if _is_time(each.name)}
        return replace(cost, **seconds)

    found = replace(
        profile,
        cluster=replace(profile.cluster, devices=devices),
        measurements={**profile.measurements, slow: tuple(map(slowed, profile.measurements[kind]))},
        parameters={
            **profile.parameters,
            slow: {name: slowed(cost) for name, cost in profile.parameters[kind].items()},
        },
        parts={**profile.parts, slow: tuple(map(slowed, profile.parts.get(kind, ())))},
        preparations={**profile.preparations, slow: tuple(map(slowed, profile.preparations.get(kind, ())))},
    )
    overhead_s = profile.action_overhead_s
    if kind in overhead_s:
        found = replace(found, action_overhead_s={**overhead_s, slow: factor * overhead_s[kind]})
    return found
