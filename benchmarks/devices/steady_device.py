"""A device of constant speed: each piece of its work takes what it took the core alone, times its factor.

Four ranks on two cores take each other's caches, and what a layer takes changes with what the others compute; and the
machine under the cores is a tenth faster in one minute than in the next.  Devices of a real cluster do nothing of the
kind.  So the first steps are *rehearsals*, in which one rank computes at a time, whichever its turn it is, and never
waits amid an action, where it would lose its caches: what ranks do together there is done by each alone
(:mod:`benchmarks.devices.layer_clock`).  Each piece of work (what is done between two words to other ranks) is timed:
the thread's processor time.  From then on the ranks compute side by side, and each is held until its device would be
done: the piece takes the device the mean of its rehearsals, of earlier runs too (without the least and the greatest
fifth, as in a profile), times the factor, whatever it takes here now.

    rehearsals   1.0 | 1.1 | 0.9
    afterwards   work 1.3, held 2.7 | send                factor 4

As long as a core has time enough for its ranks' work nothing is late, and what ranks do then is real: messages, memory,
and the values, but for what the rehearsals made of the weights.

A device that computes nothing: each action lasts the seconds it is told, what is sent is sent.

So that eight or sixteen ranks can share two cores.  The first time a stage runs a micro-batch it computes, and what it
made is kept; from then on each action gives that again, when its time is over.  Messages have their real sizes and go
the real way.  For stages of one rank: what several ranks of a stage exchange depends on what they compute meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from multiprocessing.synchronize import Lock
from typing import Any

from torch import Tensor

from benchmarks.devices.virtual_device import VirtualDevice, hold_until, wake_on_time
from planner.ir.schedule import Op
from planner.ir.timeline import Span
from profiler.measure.timing import trimmed_mean
from runtime.engine import Engine
from runtime.stage.local_stage import LocalStage

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
        self._alone, self._before = alone, before
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


class _TimedProgram:
    """A stage's program of which backwards are recorded."""

    def __init__(self, program: Any, recorded: _Recorded) -> None:
        self._timed, self._recorded = program, recorded

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
        values["program"] = _TimedProgram(local_stage.program, recorded)
        engine._local_stages[stage] = TimedResident(**values, recorded=recorded)


def _kept(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without what made them."""
    return {name: value.detach() for name, value in outputs.items()}
