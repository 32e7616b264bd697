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

*Steady*: A device of constant speed: each piece of its work takes what it took the core alone, times its factor.

Four ranks on two cores take each other's caches, and what a layer takes changes with what the others compute; and the
machine under the cores is a tenth faster in one minute than in the next.  Devices of a real cluster do nothing of the
kind.  So the first steps are *rehearsals*, in which one rank computes at a time, whichever its turn it is, and never
waits amid an action, where it would lose its caches: what ranks do together there is done by each alone
(:class:`benchmarks.devices.layer_clock.Mirror`).  Each piece of work (done between two words to other ranks) is timed:
the thread's processor time.  From then on the ranks compute side by side, and each is held until its device would be
done: the piece takes the device the mean of its rehearsals, of earlier runs too (without the least and the greatest
fifth, as in a profile), times the factor, whatever it takes here now.

    rehearsals   1.0 | 1.1 | 0.9
    afterwards   work 1.3, held 2.7 | send                factor 4

As long as a core has time enough for its ranks' work nothing is late, and what ranks do then is real: messages, memory,
and the values, but for what the rehearsals made of the weights.

*Timed*: a device that computes nothing: each action lasts the seconds it is told, what is sent is sent.

So that eight or sixteen ranks can share two cores.  The first time a stage runs a micro-batch it computes, and what it
made is kept; from then on each action gives that again, when its time is over.  Messages have their real sizes and go
the real way.  For stages of one rank: what several ranks of a stage exchange depends on what they compute meanwhile.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from multiprocessing.synchronize import Lock
from typing import Any, TypeVar

from torch import Tensor

from benchmarks.devices.layer_clock import Mirror
from planner.ir.cluster import AROUND
from planner.ir.profile import Measurement, ParameterCost, PreparationCost, Profile
from planner.ir.schedule import Op
from planner.ir.timeline import Span
from profiler.measure.contention import trimmed_mean
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
        self._transport = transport
        self._device = device
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.send = _talks(transport.send, device)
        mirror = Mirror(transport.rank)
        for name in _TOGETHER:
            setattr(self, name, _talks(getattr(transport, name), device, getattr(mirror, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _HeldPending:
    """Something under way; waiting for it is not work."""

    def __init__(self, pending: Pending, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        self._pending = pending
        self._waiting = waiting

    def wait(self) -> None:
        with self._waiting():
            self._pending.wait()


class _HeldPasses:
    """A stage's passes on ``device``."""

    def __init__(self, passes: Any, device: VirtualDevice) -> None:
        self._held = passes
        for name in ("forward", "evaluate", "backward", "backward_input", "backward_weight"):
            setattr(self, name, _works(getattr(passes, name), device))

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
        self._specializer = specializer
        self._device = device

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
        values["passes"] = _HeldPasses(local_stage.passes, device)
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
        told = function
        meanwhile = device.talking
        if alone is not None and device.mirrors:
            told = alone
            meanwhile = device.mirroring
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
    cluster = profile.cluster
    slowest = max(factors)
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
    slow = f"{kind}, {factor:g} times slower"
    share = 0.0 if factor >= LEAST_HELD else 1.0
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


REHEARSALS = 10
_COLD = 2  # of these, steps whose times are left out: memory is taken and code is loaded then


class SteadyDevice(VirtualDevice):
    """The clock of one rank.

    Args:
        alone: held by the one rank that computes in a rehearsal; shared by all.
        before: rehearsals of earlier runs: by step the seconds of each piece.

    Raises:
        RuntimeError: steps do not have the same pieces of work, so these cannot be known by their number.
    """

    def __init__(self, factor: float, alone: Lock, before: Sequence[Sequence[float]] = ()) -> None:
        super().__init__(factor)
        self._alone = alone
        self._before = before
        self._steps: list[list[float]] = []
        self._seconds: list[float] = []  # by piece; empty while these are rehearsed
        self._done = 0

    @property
    def rehearsed(self) -> list[list[float]]:
        """By step the seconds of each piece, on a core that no other rank used."""
        return self._steps[_COLD:]

    def begin_step(self) -> None:
        if len(self._steps) < REHEARSALS:
            self._steps.append([])
        elif not self._seconds:
            steps = [*self._before, *self.rehearsed]
            counts = {len(pieces) for pieces in (*steps, *self._steps)}
            if len(counts) > 1:
                raise RuntimeError(f"steps have {sorted(counts)} pieces of work: a steady device needs all alike")
            self._seconds = [trimmed_mean(piece) for piece in zip(*steps, strict=True)]
        self._done = 0

    @property
    def mirrors(self) -> bool:
        return not self._seconds and self._since is not None and not self._shares

    def _begin(self) -> None:
        if not self._seconds:
            self._alone.acquire()
        super()._begin()

    def _end(self) -> None:
        super()._end()
        if not self._seconds:
            self._alone.release()

    def _device_s(self, worked_s: float, took_s: float) -> float:
        if not self._seconds:
            self._steps[-1].append(worked_s)
            return took_s
        if self._done == len(self._seconds):
            raise RuntimeError(f"a step has more than {self._done} pieces of work: a steady device needs all alike")
        self._done += 1
        return self.factor * self._seconds[self._done - 1]


Seconds = Mapping[str, float]
"""By action as text, such as ``1B0``."""


@dataclass(slots=True)
class _Recorded:
    """What was made by each action, which lasts its seconds from its second time on."""

    stage: int
    seconds: Seconds
    made: dict[str, Any] = field(default_factory=dict)

    def __call__(self, op: Op, microbatch: int | None, compute: Callable[[], Any]) -> Any:
        """What ``compute`` gave the first time."""
        name = f"{self.stage}{op.value}{'' if microbatch is None else microbatch}"
        if name not in self.made:
            self.made[name] = compute()
            return self.made[name]
        hold_until(time.perf_counter() + self.seconds.get(name, 0.0))
        return self.made[name]


class _TimedPasses:
    """A stage's passes of which backwards are recorded."""

    def __init__(self, passes: Any, recorded: _Recorded) -> None:
        self._timed = passes
        self._recorded = recorded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timed, name)

    def backward(self, microbatch: int, gradients: Mapping[str, Tensor]) -> Any:
        return self._recorded(Op.BACKWARD, microbatch, lambda: _kept(self._timed.backward(microbatch, gradients)))

    def backward_input(self, microbatch: int, gradients: Mapping[str, Tensor]) -> Any:
        def compute() -> dict[str, Tensor]:
            return _kept(self._timed.backward_input(microbatch, gradients))

        return self._recorded(Op.BACKWARD_INPUT, microbatch, compute)

    def backward_weight(self, microbatch: int) -> None:
        self._recorded(Op.BACKWARD_WEIGHT, microbatch, lambda: self._timed.backward_weight(microbatch))


@dataclass(frozen=True)
class TimedResident(LocalStage):
    """A stage on a device that computes nothing."""

    recorded: _Recorded = field(default_factory=lambda: _Recorded(0, {}))

    def forward(self, microbatch: int, values: Mapping[str, Tensor], version: int = 0) -> dict[str, Tensor]:
        def compute() -> dict[str, Tensor]:
            return LocalStage.forward(self, microbatch, values, version)

        first: dict[str, Tensor] = self.recorded(Op.FORWARD, microbatch, compute)
        return _kept(first)

    def update(self) -> None:
        self.recorded(Op.UPDATE, None, lambda: LocalStage.update(self))


def time_stages(engine: Engine, spans: tuple[Span, ...]) -> None:
    """Makes each action of ``engine`` last as long as it does in a predicted timeline.

    Raises:
        ValueError: a stage has several ranks.
    """
    wake_on_time()
    rank = engine._transport.rank
    seconds = {span.action: span.stop_s - span.start_s for span in spans if span.rank == rank}
    for stage, local_stage in engine._local_stages.items():
        if len(local_stage.ranks) > 1:
            raise ValueError(
                f"stage {stage} is on {len(local_stage.ranks)} ranks: only stages of one rank can be timed"
            )
        recorded = _Recorded(stage, seconds)
        values = {each.name: getattr(local_stage, each.name) for each in fields(local_stage)}
        values["passes"] = _TimedPasses(local_stage.passes, recorded)
        engine._local_stages[stage] = TimedResident(**values, recorded=recorded)


def _kept(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without what made them."""
    return {name: value.detach() for name, value in outputs.items()}
