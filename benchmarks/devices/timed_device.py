"""A device that computes nothing: each action lasts the seconds it is told, what is sent is sent.

So that eight or sixteen ranks can share two cores.  The first time a stage runs a micro-batch it computes, and what it
made is kept; from then on each action gives that again, when its time is over.  Messages have their real sizes and go
the real way.  For stages of one rank: what several ranks of a stage exchange depends on what they compute meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from benchmarks.devices.virtual_device import hold_until, wake_on_time
from planner.ir.schedule import Op
from planner.ir.timeline import Span
from runtime.engine import Engine
from runtime.stage.local_stage import Resident

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
class TimedResident(Resident):
    """A stage on a device that computes nothing."""

    recorded: _Recorded = field(default_factory=lambda: _Recorded(0, {}))

    def forward(self, microbatch: int, values: Mapping[str, Tensor], version: int = 0) -> dict[str, Tensor]:
        def compute() -> dict[str, Tensor]:
            return Resident.forward(self, microbatch, values, version)

        first: dict[str, Tensor] = self.recorded(Op.FORWARD, microbatch, compute)
        return _kept(first)

    def update(self) -> None:
        self.recorded(Op.UPDATE, None, lambda: Resident.update(self))


def time_stages(engine: Engine, spans: tuple[Span, ...]) -> None:
    """Makes each action of ``engine`` last as long as it does in a predicted timeline.

    Raises:
        ValueError: a stage has several ranks.
    """
    wake_on_time()
    rank = engine._transport.rank
    seconds = {span.action: span.stop_s - span.start_s for span in spans if span.rank == rank}
    for stage, resident in engine._residents.items():
        if len(resident.ranks) > 1:
            raise ValueError(f"stage {stage} is on {len(resident.ranks)} ranks: only stages of one rank can be timed")
        recorded = _Recorded(stage, seconds)
        values = {each.name: getattr(resident, each.name) for each in fields(resident)}
        values["program"] = _TimedProgram(resident.program, recorded)
        engine._residents[stage] = TimedResident(**values, recorded=recorded)


def _kept(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without what made them."""
    return {name: value.detach() for name, value in outputs.items()}
