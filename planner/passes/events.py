"""When an action may start, and when it ends: the rules that everybody shares who takes a program step by step.

What an action needs is stated by :func:`planner.ir.schedule.dependencies` alone.  Of actions in rows that becomes

    compute, update          starts when its rank comes to it, for what it needs is before it in the row
    forward with inputs      also when what is prepared for it is there
    receive                  ends when all its messages are there, and what it costs beside is over
    send                     ends with its last call; messages of one wire travel one after another
    reduction, tied update   begins when the last of its ranks has come to it                          ``RankRows.meet``

and of actions that have no rows yet, where messages take a fixed time between positions, ``StageClock``.

Whether a program ends at all (:mod:`planner.passes.ending`), when everything happens in it
(:mod:`planner.costs.simulator.events`), also where messages share network cards
(:mod:`planner.costs.simulator.contention`), are ``RankRows``; schedules that are made from times have a ``StageClock``,
and bounds of many pipelines at once follow :func:`in_order`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence

from planner.ir.lazy import Memo
from planner.ir.schedule import COMPUTE, Action, Op, Pipeline, StageTimes, dependencies

NOT_YET = -1.0
"""A time that is not known yet."""


class RankRows(ABC):
    """Ranks that take one step of their row after another, and wait for one another.

    Attributes:
        position: by rank, how many steps of its row are over.
        present: by what several ranks do together, when each of them came to it.
    """

    def __init__(self, num_ranks: int) -> None:
        self.position = [0] * num_ranks
        self.present: dict[Hashable, dict[int, float]] = {}

    @abstractmethod
    def wake(self, rank: int, at: float) -> None:
        """What ``rank`` waits for may be there at that time."""

    def join(self, what: Hashable, rank: int, now: float) -> dict[int, float]:
        """When ranks came to what they do together, ``rank`` now, unless it was there before."""
        present = self.present.setdefault(what, {})
        present.setdefault(rank, now)
        return present

    def meet(self, what: Hashable, rank: int, num_ranks: int, now: float) -> float:
        """When all of ``num_ranks`` were there; ``NOT_YET`` while one is missing.  The last one wakes the others."""
        is_new = rank not in self.present.get(what, {})
        present = self.join(what, rank, now)
        if len(present) < num_ranks:
            return NOT_YET
        if is_new:
            for other in present:
                if other != rank:
                    self.wake(other, now)
        return max(present.values())


StageOp = tuple[int, Op]
"""(stage, what it does)."""


class StageClock:
    """Positions that run one compute action after another; made anew for each schedule.

    Attributes:
        free: by position, when it can start its next action.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.free = [0.0] * pipeline.num_positions
        self._ends = dict[tuple[int, Op, int], float]()
        self._needs = Memo(self._needed)

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
        for alternatives in self._needs[stage, op]:
            arrivals = [
                self._ends[other, what, microbatch] + self.hop(stage, other)
                for other, what in alternatives
                if (other, what, microbatch) in self._ends
            ]
            if not arrivals:
                return None
            latest = max(latest, *arrivals)
        return latest

    def run(self, stage: int, op: Op, microbatch: int, ready: float) -> None:
        """Run the action on its position as soon as both are ready."""
        position = self.pipeline.position(stage)
        end = max(ready, self.free[position]) + self.duration(stage, op)
        self.free[position] = self._ends[stage, op, microbatch] = end

    def _needed(self, of: StageOp) -> tuple[tuple[StageOp, ...], ...]:
        groups = dependencies(Action(*of, 0), self.pipeline.stages)
        parts = [[(a.stage, a.op) for a in group if a.op in COMPUTE] for group in groups if not _is_prepared(group)]
        return tuple(tuple(sorted(group)) for group in parts)


def _is_prepared(group: Iterable[Action]) -> bool:
    """Whether it is what a host prepares, which is no part of a schedule."""
    return all(action.op is Op.PREPARE for action in group)


def in_order(rows: Sequence[Sequence[Action]], pipeline: Pipeline) -> tuple[Action, ...] | None:
    """The compute actions of all rows in an order in which they can run; None if they wait for one another."""
    clock = StageClock(pipeline)
    order = list[Action]()
    position = [0] * len(rows)
    before = -1
    while before < len(order):
        before = len(order)
        for number, row in enumerate(rows):
            while position[number] < len(row):
                action = row[position[number]]
                ready = clock.ready(action.stage, action.op, action.microbatch or 0)
                if ready is None:
                    break
                clock.run(action.stage, action.op, action.microbatch or 0, ready)
                order.append(action)
                position[number] += 1
    return tuple(order) if len(order) == sum(map(len, rows)) else None
