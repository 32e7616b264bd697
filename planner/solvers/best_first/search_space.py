"""What a problem leaves open beside cuts and devices, as the bounds need to know it."""

from __future__ import annotations

from dataclasses import dataclass

from planner.costs.candidate import Candidate, Recomputes
from planner.costs.memory.memory_bound import kept_by
from planner.ir.constraints import CutDegrees
from planner.ir.problem import SAMPLE_DIMS, Problem
from planner.schedules import traits
from planner.solvers.best_first.graph_cuts import Flags, GraphCuts
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
        ways = [CutDegrees(sample=len(group)) for group in candidate.groups]
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

    def allowed(self, cuts: GraphCuts, ranks: tuple[int, ...], recompute: Recomputes) -> Flags | None:
        """Which stages side constraints allow on ``ranks``, by first and last cut; None: all."""
        if not self.constraints.rules:
            return None
        return self.constraints.mask(cuts.members, ranks, recompute == Recomputes.ALL, CutDegrees(sample=len(ranks)))
