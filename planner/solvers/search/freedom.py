"""What a problem leaves open beside cuts and devices, as the bounds need to know it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.costs.tables import Array, SizeTable
from planner.ir.constraints import Ways
from planner.ir.problem import ALWAYS, AUTO, SAMPLE_DIMS, Problem
from planner.schedules import traits
from planner.solvers.candidates.assemble import Candidate
from planner.solvers.candidates.rules import Constraints
from planner.solvers.candidates.space import mixing_layers, schedule_names, virtual_schedule_names
from planner.solvers.search.cuts import Cuts, Flags
from planner.solvers.search.windows import most_in_flight


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
    recompute: tuple[bool, ...]
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
        known = [traits(name) for name in (*names, *virtual)]
        return cls(
            problem,
            names,
            virtual,
            all(found.trains for found in known),
            any(found.splits_backward for found in known),
            {ALWAYS: (True,), AUTO: (False, True)}.get(problem.recompute, (False,)),
            mixing_layers(problem.profile.graph),
            Constraints.of(problem),
            problem.max_stages,
        )

    def path_back(self, table: SizeTable) -> Array:
        """By layer: the least backward on the way to the stage before."""
        if not self.trains:
            return np.zeros_like(np.diff(table.backward_s))
        whole, half = np.diff(table.backward_s), np.diff(table.backward_input_s)
        return np.minimum(whole, half) if self.splits else whole

    def backward(self, table: SizeTable) -> Array:
        """By layer: the least that all of a backward takes."""
        if not self.trains:
            return np.zeros_like(np.diff(table.backward_s))
        whole = np.diff(table.backward_s)
        halves = np.diff(table.backward_input_s) + np.diff(table.backward_weight_s)
        return np.minimum(whole, halves) if self.splits else whole

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
        if any(traits(name).windowed for name in self.schedules):
            return 1, num_microbatches
        found = [most_in_flight(name, d, num_microbatches) for name in self.schedules for d in {1, depth}]
        return min(found), max(found)

    def allowed(self, cuts: Cuts, ranks: tuple[int, ...], recompute: bool) -> Flags | None:
        """Which stages side constraints allow on ``ranks``, by first and last cut; None: all."""
        if not self.constraints.rules:
            return None
        return self.constraints.mask(cuts.members, ranks, recompute, Ways(sample=len(ranks)))
