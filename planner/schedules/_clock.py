"""When compute actions can start, for the schedules that are computed from times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from planner.ir.schedule import COMPUTE, Action, Op, Pipeline, StageTimes, dependencies

Part = tuple[int, Op]
"""(stage, what it does)."""


@dataclass(slots=True)
class Clock:
    """Positions that run one action after another; made anew for each schedule.

    Attributes:
        free: by position, when it can start its next action.
    """

    pipeline: Pipeline
    free: list[float] = field(init=False)
    _ends: dict[tuple[int, Op, int], float] = field(init=False, default_factory=dict)
    _needs: dict[Part, tuple[tuple[Part, ...], ...]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.free = [0.0] * self.pipeline.num_positions

    def duration(self, stage: int, op: Op) -> float:
        """What an action lasts."""
        times = self.pipeline.times[stage] if self.pipeline.times else StageTimes()
        parts = {
            Op.FORWARD: times.forward,
            Op.BACKWARD_INPUT: times.backward_input,
            Op.BACKWARD_WEIGHT: times.backward_weight,
        }
        return parts.get(op, times.backward_input + times.backward_weight)

    def hop(self, src: int, dst: int) -> float:
        """What a message between two stages lasts."""
        return 0.0 if self.pipeline.position(src) == self.pipeline.position(dst) else self.pipeline.transfer

    def ready(self, stage: int, op: Op, microbatch: int) -> float | None:
        """When everything that the action needs is there; None if something has not run yet."""
        latest = 0.0
        for alternatives in self._needed(stage, op):
            found = [
                self._ends[other, what, microbatch] + self.hop(stage, other)
                for other, what in alternatives
                if (other, what, microbatch) in self._ends
            ]
            if not found:
                return None
            latest = max(latest, *found)
        return latest

    def run(self, stage: int, op: Op, microbatch: int, ready: float) -> None:
        """Run the action on its position as soon as both are ready."""
        position = self.pipeline.position(stage)
        end = max(ready, self.free[position]) + self.duration(stage, op)
        self.free[position] = self._ends[stage, op, microbatch] = end

    def _needed(self, stage: int, op: Op) -> tuple[tuple[Part, ...], ...]:
        found = self._needs.get((stage, op))
        if found is None:
            groups = dependencies(Action(stage, op, 0), self.pipeline.stages)
            parts = [[(a.stage, a.op) for a in group if a.op in COMPUTE] for group in groups if not _is_prepared(group)]
            found = self._needs[stage, op] = tuple(tuple(sorted(group)) for group in parts)
        return found


def _is_prepared(group: Iterable[Action]) -> bool:
    """Whether it is what a host prepares, which is no part of a schedule."""
    return all(action.op is Op.PREPARE for action in group)
