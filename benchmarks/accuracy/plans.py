"""The plans of a setting, and what is predicted of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

import planner
from benchmarks.accuracy.cases import CHOSEN, DATA_PARALLEL, FASTEST, HYBRID, MIX, ONE, SPACE
from benchmarks.strong_scaling.layouts import Ways
from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.costs.predict import Forecast, forecast
from planner.costs.pricing import Pricing
from planner.ir.plan import Decision, Plan, Search
from planner.ir.problem import DEFAULT_CONFIDENCE, Problem
from planner.schedules import positions, traits
from planner.solvers.candidates.candidate import decision_of, group_shares, plan_of, split_batch
from planner.solvers.candidates.feasibility import cut_positions

_SEARCH_S = 20.0


@dataclass(frozen=True, slots=True)
class Case:
    """A plan with its name and what the simulator says of it."""

    name: str
    plan: Plan
    forecast: Forecast

    @property
    def decision(self) -> Decision:
        """What is run."""
        return self.plan.decision


def case(problem: Problem, name: str, *, pads: bool = True) -> Case:
    """The plan ``name`` of a setting whose cluster and network are those of ``problem``.

    Args:
        pads: whether every process has a row, also those that have nothing to do.
    """
    return case_of(problem, name, _decision(problem, name), pads=pads)


def case_of(problem: Problem, name: str, decision: Decision, *, pads: bool = True) -> Case:
    """A decision as the plan ``name``; ``pads`` as of :func:`case`."""
    idle = len(problem.profile.cluster.devices) - decision.num_ranks if pads else 0
    ahead = decision.prepares_next_step and not pads  # a virtual device has no thread beside its rank's own
    decision = replace(decision, program=decision.program + ((),) * idle, prepares_next_step=ahead)
    found = forecast(Pricing.of(problem.profile), decision, problem.memory_margin)
    search = Search("as the setting says", "benchmark", "heuristic", 0.0, 0.0, 1, 1)
    return Case(name, plan_of(problem, decision, found.prediction, search), found)


def _decision(problem: Problem, name: str) -> Decision:
    if name in (CHOSEN, FASTEST):
        asked = replace(problem, time_limit_s=_SEARCH_S, confidence=DEFAULT_CONFIDENCE if name == CHOSEN else 0.0)
        return planner.plan(asked, "best-first").decision
    if name in (ONE, DATA_PARALLEL):
        by = {ONE: "one-device", DATA_PARALLEL: "data-parallel"}[name]
        return planner.plan(replace(problem, allow=("sample",)), by).decision
    if name in (SPACE, MIX):
        ways = Ways(problem.profile, problem.global_batch, len(problem.ranks), problem.allow)
        return (ways.best_uniform(("depth", "height", "width")) if name == SPACE else ways.mix()).decision
    if name == HYBRID:
        ranks = problem.ranks
        return decision_of(problem, pipeline(problem, "1f1b", 0, (ranks[:2], ranks[2:])))
    schedule, _, size = name.partition("/")
    return decision_of(problem, pipeline(problem, schedule, int(size or 0)))


def pipeline(problem: Problem, schedule: str, size: int, groups: Sequence[tuple[int, ...]] = ()) -> Candidate:
    """Stages one after another over all devices, each with work in proportion to its devices' speeds.

    Args:
        size: samples of a micro-batch; 0: a quarter of the batch.
        groups: ranks of each position; one each if not given.
    """
    cost_model = CostModel(problem.profile)
    groups = tuple(groups) or tuple((rank,) for rank in problem.ranks)
    wanted = traits(schedule).stages_per_position
    chosen = positions(schedule, len(groups), 1 if wanted == 1 else 2)
    size = size or problem.global_batch // 4
    step_s = [cost_model.tables.at(cost_model.kind(rank), size) for rank in problem.ranks]
    work = np.asarray(step_s[0].forward_s) + np.asarray(step_s[0].backward_s)
    speeds = [work[-1] / float(table.forward_s[-1] + table.backward_s[-1]) for table in step_s]
    share = [sum(speeds[rank] for rank in groups[position]) for position in chosen]
    ends = np.cumsum(share) / sum(share) * work[-1]
    bounds = _bounds(work.tolist(), ends.tolist(), cut_positions(problem.profile.graph))
    ranks = tuple(groups[position] for position in chosen)
    shares = tuple(group_shares(problem, cost_model, group, size) for group in ranks)
    return Candidate.chain(bounds, ranks, shares, split_batch(problem.global_batch, size), schedule)


def _bounds(work: Sequence[float], ends: Sequence[float], allowed: Sequence[int]) -> tuple[int, ...]:
    """Positions where a graph may be cut, nearest to where the running sum of work reaches each end."""
    sums = [work[position] for position in allowed]
    found = [0]
    for number, end in enumerate(ends[:-1]):
        above = bisect_left(sums, end)
        near = min((above - 1, above), key=lambda k: abs(sums[max(0, min(k, len(sums) - 1))] - end))
        left = len(ends) - 1 - number
        place = min(max(near, allowed.index(found[-1]) + 1), len(allowed) - 1 - left)
        found.append(allowed[place])
    return (*found, allowed[-1])
