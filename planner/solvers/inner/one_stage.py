"""A plan of one stage whose layers each have a layout: its price and its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from planner.costs.evidence import weakest
from planner.costs.layouts import LayoutPrices
from planner.costs.shards import Option
from planner.costs.stage import PriceBook
from planner.costs.staged import StageCost, stage_cost
from planner.ir.plan import Decision, Placement, Plan, Prediction, RankPrediction, Search
from planner.ir.problem import Problem
from planner.ir.schedule import Op
from planner.solvers.candidates.assemble import Candidate, decision_of, plan_of
from planner.solvers.candidates.shares import equal_shares
from planner.solvers.candidates.space import micro_batches, schedule_names


@dataclass(frozen=True, slots=True, eq=False)
class OneStage:
    """A stage on all of a problem's ranks, priced.

    Attributes:
        costs: by samples of a micro-batch.
        peak_bytes, limit_bytes: by rank of the problem, in its order.
    """

    decision: Decision
    costs: Mapping[int, StageCost]
    ranks: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    limit_bytes: tuple[int, ...]

    @property
    def fits(self) -> bool:
        """Whether every rank stays within its limit."""
        return self.excess_bytes <= 0

    @property
    def excess_bytes(self) -> int:
        """What the fullest rank holds beyond its limit."""
        return max(peak - limit for peak, limit in zip(self.peak_bytes, self.limit_bytes, strict=True))

    @property
    def fullest(self) -> tuple[int, int, int]:
        """The rank that is furthest over its limit: (rank, what it needs, its limit)."""
        each = zip(self.ranks, self.peak_bytes, self.limit_bytes, strict=True)
        return max(each, key=lambda row: row[1] - row[2])


def one_stage(problem: Problem, book: PriceBook, chosen: Mapping[int, Option], size: int) -> OneStage | None:
    """All layers on all ranks under ``chosen``, in micro-batches of ``size``; None if a rank would have nothing to do.

    Raises:
        MissingMeasurementError: the profile says nothing about a number of samples that is used.
    """
    batches = micro_batches(problem, size)
    costs = {}
    for rows in sorted(set(batches)):
        prices = LayoutPrices(book, problem.ranks, rows, problem.allow)
        if any((prices.shards(index, (option,)).share <= 0).any() for index, option in chosen.items()):
            return None
        costs[rows] = stage_cost(prices, chosen)
    decision = _decision(problem, chosen, batches)
    state = problem.profile.optimizer.state_bytes_per_parameter_byte
    peaks = costs[max(batches)].memory_bytes(_most_in_flight(decision), state)
    limits = tuple(problem.memory_limit_bytes(rank) for rank in problem.ranks)
    return OneStage(decision, costs, problem.ranks, tuple(int(np.ceil(peak)) for peak in peaks), limits)


def plan_of_stage(problem: Problem, found: OneStage, solver: str, method: str) -> Plan:
    """The plan file of a stage that was priced by its layouts."""
    return plan_of(
        problem, found.decision, _prediction(problem, found), Search(method, solver, "heuristic", 0.0, 0.0, 1, 1)
    )


def _decision(problem: Problem, chosen: Mapping[int, Option], batches: tuple[int, ...]) -> Decision:
    layers = problem.profile.graph.layers
    shares = equal_shares(max(batches), len(problem.ranks))
    schedule = schedule_names(problem)[0]
    candidate = Candidate.chain((0, len(layers)), (problem.ranks,), (shares,), batches, schedule)
    placed = {layer.name: Placement(0, chosen[index].layout.cuts) for index, layer in enumerate(layers)}
    return replace(decision_of(problem.profile, candidate), layers=placed)


def _most_in_flight(decision: Decision) -> int:
    """Micro-batches between their forward and their backward, at most."""
    most = 0
    for row in decision.rows():
        held = 0
        for action in row:
            held += (action.op is Op.FORWARD) - (action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT))
            most = max(most, held)
    return most


def _prediction(problem: Problem, found: OneStage) -> Prediction:
    parts = [found.costs[rows] for rows in found.decision.micro_batches]
    last = parts[-1]
    exchanged = sum(cost.exchange_forward_s + cost.exchange_backward_s for cost in parts) + last.reduction_s
    paced = sum(cost.paced_forward_s + cost.paced_backward_s for cost in parts)
    step_s = paced + exchanged + (len(parts) - 1) * last.paced_accumulate_s + last.paced_update_s
    compute = sum(cost.forward_s + cost.backward_s for cost in parts) + last.update_s
    compute = compute + (len(parts) - 1) * last.accumulate_s
    devices = problem.profile.cluster.devices
    by_rank = {rank: position for position, rank in enumerate(found.ranks)}
    ranks = []
    for rank in range(found.decision.num_ranks):
        at = by_rank.get(rank)
        if at is None:
            ranks.append(RankPrediction(rank, 0.0, 0.0, step_s, 0, problem.memory_limit_bytes(rank)))
            continue
        idle_s = max(0.0, step_s - float(compute[at]) - exchanged)
        peak, limit = found.peak_bytes[at], found.limit_bytes[at]
        ranks.append(RankPrediction(rank, float(compute[at]), exchanged, idle_s, peak, limit))
    bubble = sum(rank.idle_s for rank in ranks) / (step_s * len(devices)) if step_s > 0 else 0.0
    rate = found.decision.global_batch / step_s if step_s > 0 else 0.0
    return Prediction(step_s, rate, bubble, tuple(ranks), weakest(cost.evidence for cost in parts))
