"""What a problem leaves open beside cuts and devices, as the bounds need to know it.

What a schedule lets a stage do before its first backward and after its last forward, read off its order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from planner.costs.candidate import Candidate, Recomputes
from planner.costs.memory.memory_bound import kept_by
from planner.ir.constraints import Ways
from planner.ir.problem import SAMPLE_DIMS, Problem
from planner.ir.schedule import Action, Op, Pipeline, StageGraph
from planner.schedules import schedule as schedule_named
from planner.schedules import traits
from planner.solvers.best_first.graph_cuts import Cuts, Flags
from planner.solvers.candidates.constraints import Constraints
from planner.solvers.candidates.feasibility import (
    mixing_layers,
    recompute_choices,
    schedule_names,
    virtual_schedule_names,
)


@dataclass(frozen=True, slots=True, eq=False)
class Freedom:
    """The schedules and side constraints of a problem.

    Attributes:
        schedules: names of those that are searched with one stage a position.
        virtual: names of those that are meant for several.
        trains: whether there are backwards at all.
        splits: whether a schedule may cut backwards in two, I and W.
        recompute: the choices of a stage.
        mixing: layers that mix samples.
        max_stages: most stages; 0: any number.
    """

    problem: Problem
    schedules: tuple[str, ...]
    virtual: tuple[str, ...]
    trains: bool
    splits: bool
    recompute: tuple[Recomputes, ...]
    mixing: frozenset[str]
    constraints: Constraints
    max_stages: int

    @property
    def may_replicate(self) -> bool:
        """Whether a stage may have several devices."""
        return SAMPLE_DIMS in self.problem.allow

    @classmethod
    def of(cls, problem: Problem) -> Freedom:
        """What ``problem`` leaves open."""
        names, virtual = schedule_names(problem), virtual_schedule_names(problem)
        own_traits = [traits(name) for name in (*names, *virtual)]
        return cls(
            problem,
            names,
            virtual,
            all(each.trains for each in own_traits),
            any(each.splits_backward for each in own_traits),
            recompute_choices(problem),
            mixing_layers(problem.profile.graph),
            Constraints.of(problem),
            problem.max_stages,
        )

    def allows(self, candidate: Candidate) -> bool:
        """Whether side constraints that concern the whole pipeline allow a complete one."""
        if not self.constraints.rules:
            return True
        ways = [Ways(sample=len(group)) for group in candidate.groups]
        recompute = [candidate.recomputes(stage) for stage in range(candidate.num_stages)]
        return self.constraints.allows_stages(candidate.stage_of, candidate.groups, recompute, ways)

    def in_flight(self, depth: int, num_microbatches: int) -> tuple[int, int]:
        """The least and the most micro-batches that an allowed schedule keeps on a stage.

        Args:
            depth: stages downstream, itself included, at most.
        """
        if not self.trains or any(traits(name).windowed for name in self.schedules):
            return 1, num_microbatches
        kept = [kept_by(name, d, num_microbatches)[0] for name in self.schedules for d in {1, depth}]
        return min(kept), max(kept)

    def allowed(self, cuts: Cuts, ranks: tuple[int, ...], recompute: Recomputes) -> Flags | None:
        """Which stages side constraints allow on ``ranks``, by first and last cut; None: all."""
        if not self.constraints.rules:
            return None
        return self.constraints.mask(cuts.members, ranks, recompute == Recomputes.ALL, Ways(sample=len(ranks)))


@dataclass(frozen=True, slots=True)
class Window:
    """Forwards before the first backward, and backwards after the last forward, of one stage."""

    early: int
    late: int


@functools.lru_cache(maxsize=4096)
def windows(schedule: str, num_stages: int, num_microbatches: int) -> tuple[Window, ...] | None:
    """The window of each stage of a chain; None if the schedule splits backwards or leaves the order."""
    rows = schedule_named(schedule)(Pipeline(StageGraph.chain(num_stages, num_microbatches))).rows
    by_stage = [_window(row, num_microbatches) for row in rows]
    in_order = tuple(window for window in by_stage if window is not None)
    return in_order if len(in_order) == len(by_stage) else None


def _window(row: tuple[Action, ...], num_microbatches: int) -> Window | None:
    forwards = [(index, action.microbatch) for index, action in enumerate(row) if action.op is Op.FORWARD]
    backwards = [(index, action.microbatch) for index, action in enumerate(row) if action.op is Op.BACKWARD]
    in_order = [m for _, m in forwards] == [m for _, m in backwards] == list(range(num_microbatches))
    if not in_order or len(row) != 2 * num_microbatches:
        return None
    early = sum(index < backwards[0][0] for index, _ in forwards)
    late = sum(index > forwards[-1][0] for index, _ in backwards)
    return Window(early, late)
