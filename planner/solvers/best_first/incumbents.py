"""Plans that are looked at before and beside the search, so that it never does worse than them.

Everyday strategies come first: their steps are upper bounds.  Replicas on several kinds of devices or hosts, with the
shares that have the least largest time, are not among the stages that the search builds where devices are many; they
are priced here, each with its own bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.costs.stages.action_costs import StageCosts
from planner.costs.stages.placement import StagePlacement
from planner.ir.cluster import RankIds
from planner.ir.errors import InfeasibleError, MissingMeasurementError
from planner.ir.layout import Shares, samples_of
from planner.ir.plan import BatchSizes
from planner.ir.problem import Problem
from planner.ir.schedule import Action, Op
from planner.solvers import everyday
from planner.solvers.best_first import policy
from planner.solvers.budget import check_time
from planner.solvers.candidates.candidate import DevicePool, group_shares, micro_batches
from planner.solvers.candidates.choose import Selection, cheapest_first, choose
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.candidates.feasibility import as_asked, mixing_layers, schedule_names, usable

MANY_RANKS = 64
"""On more ranks, replicas are tried on whole pools only."""

_RANK_S = 2e-5  # to price replicas, for each of them


@dataclass(frozen=True, slots=True)
class Replicas:
    """One stage on several pools, in the queue beside the pipelines under construction."""

    bound_s: float
    ranks: RankIds
    shares: Shares
    micro_batches: BatchSizes


def strategies(evaluator: Evaluator, has_plan: Callable[[], bool]) -> Iterator[tuple[str, Selection]]:
    """The everyday strategies, as far as the problem and time allow them; some may not fit.

    Args:
        has_plan: whether there is a plan by now, so that nothing need be looked at when time is up.
    """
    problem = evaluator.problem
    cost_model = evaluator.cost_model

    def best(candidates: Iterable[Candidate]) -> Selection:
        within = evaluator.budget.part(policy.STRATEGY * evaluator.budget.left_s)
        return choose(evaluator, cheapest_first(evaluator, candidates, within), within=within, has_plan=has_plan())

    yield "one-device", best(everyday.one_device(problem, cost_model))
    if len(problem.ranks) > 1 and not mixing_layers(problem.graph):
        with suppress(InfeasibleError):  # fewer samples than ranks: there is no such plan to compare with
            replicas = everyday.replicas(problem, cost_model)
            yield "data-parallel", choose(evaluator, replicas, first_that_fits=True)
    if len(problem.ranks) > 1 and "gpipe" in schedule_names(problem) and problem.max_stages != 1:
        yield "even-split", best(everyday.even_split(problem, cost_model))


def mixed_replicas(
    problem: Problem, cost_model: CostModel, pools: tuple[DevicePool, ...], sizes: tuple[int, ...]
) -> Iterator[Replicas]:
    """Replicas on the first 2, 3, ... ranks where these are no pool's own, for every micro-batch size.

    Raises:
        OutOfTimeError: the budget that this runs under is over.
    """
    if mixing_layers(problem.graph) or len({pool.kind for pool in pools}) == 1:
        return
    ends = np.cumsum([len(pool.ranks) for pool in pools]).tolist()
    counts = range(2, len(problem.ranks) + 1) if len(problem.ranks) <= MANY_RANKS else ends
    for count in counts:
        ranks = problem.ranks[:count]
        if any(set(ranks) <= set(pool.ranks) for pool in pools):
            continue
        for size in sizes:
            check_time(_RANK_S * count)
            shares = group_shares(problem, cost_model, ranks, size)
            batches = micro_batches(problem, size)
            try:
                if usable(problem, cost_model, ranks, shares, batches):
                    yield Replicas(_bound_s(cost_model, ranks, shares, batches), ranks, shares, batches)
            except MissingMeasurementError:
                continue


def replica_candidate(problem: Problem, replicas: Replicas, schedule: str) -> Candidate:
    """The replicas as a candidate."""
    last = len(problem.graph.layers)
    plain = Candidate.chain((0, last), (replicas.ranks,), (replicas.shares,), replicas.micro_batches, schedule)
    return as_asked(problem, plain)


def _bound_s(cost_model: CostModel, ranks: RankIds, shares: Shares, batches: BatchSizes) -> float:
    """Every F, B, the reduction and the update, one after another, on the slowest rank."""
    graph = cost_model.graph
    samples = {size: samples_of(shares, size) for size in set(batches)}
    placed = StagePlacement(((0, len(graph.layers)),), ranks, samples, graph.parameter_bytes())
    costs = StageCosts(cost_model, (placed,), batches)
    after = Action(0, Op.REDUCE_GRAD), Action(0, Op.UPDATE)
    alike = {(costs.kind(rank), *each): rank for rank, *each in zip(ranks, *samples.values(), strict=True)}
    return max(
        sum(costs.action_s(rank, Action(0, Op.FORWARD, m)) for m in range(len(batches)))
        + sum(costs.action_s(rank, Action(0, Op.BACKWARD, m), m > 0) for m in range(len(batches)))
        + sum(costs.action_s(rank, action) for action in after)
        for rank in alike.values()
    )
