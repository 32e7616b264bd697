"""What a published planner answers, and the candidates that come of it.

An answer is the planner's own value, how far the best could be from it, and its plan.  What it chose becomes candidates
that the simulator prices, on the ranks and links as such planners see them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import TypeVar

from planner.costs.calibration.apply_corrections import corrected_cluster
from planner.costs.candidate import Candidate
from planner.costs.communication.collectives import collective_s
from planner.costs.cost_model import CostModel
from planner.extras.baselines.common.problem import priced
from planner.ir.cluster import ALL_REDUCE
from planner.ir.errors import InfeasibleError
from planner.ir.layout import equal_shares
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.solvers.budget import part_of_current, stated_s
from planner.solvers.candidates.candidate import micro_batches
from planner.solvers.candidates.choose import best_of, heuristic_plan
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.candidates.feasibility import micro_batch_sizes, schedule_names, usable

OPTIMAL = "optimal"
TIME_LIMIT = "time limit"
INFEASIBLE = "infeasible"
"""Proved to be the best; the best found when time was up; no plan exists."""

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
"""What JSON can hold."""


@dataclass(frozen=True, slots=True)
class RivalAnswer:
    """A plan under a peer's objective.

    Attributes:
        value: the peer's objective, in its unit (seconds, or milliseconds); infinite if no plan was found.
        bound: no plan has a smaller value; equal to ``value`` where that is proved optimal.
        status: ``OPTIMAL``, ``TIME_LIMIT`` or ``INFEASIBLE``.
        plan: what was chosen, as JSON; empty if nothing was found.
    """

    value: float
    bound: float
    status: str
    plan: Mapping[str, Json] = field(default_factory=dict)

    @property
    def has_plan(self) -> bool:
        """Whether there is a plan."""
        return self.value < inf


def infeasible() -> RivalAnswer:
    """No plan exists."""
    return RivalAnswer(inf, inf, INFEASIBLE)


Placed = tuple[tuple[int, ...], tuple[int, ...]]
"""A stage: its layers by index in the graph, its ranks."""


@dataclass(slots=True)
class Trial:
    """A published planner at work on a problem, at one micro-batch size after another.

    Attributes:
        limit_s: what its programmes may take, those of all sizes together.
        reasons: why it has no plan at a size, in words.
    """

    limit_s: float
    reasons: list[str] = field(default_factory=list)

    def sizes(self, problem: Problem, cost_model: CostModel) -> Iterator[tuple[int, float]]:
        """Micro-batch sizes, the largest first, and the seconds that the planner's programme may take for each."""
        sizes = micro_batch_sizes(problem, cost_model)
        budget = part_of_current(self.limit_s)
        for number, size in enumerate(reversed(sizes)):
            yield size, budget.left_s / (len(sizes) - number)

    def has_plan(self, size: int, answer: RivalAnswer, rule: str = "its own rules") -> bool:
        """Whether there is one; notes why not.

        Args:
            rule: what its plans keep to, in words.
        """
        if not answer.has_plan:
            is_late = answer.status == TIME_LIMIT
            why = f"nothing found in its part of {self.limit_s:.3g} s" if is_late else f"no plan keeps to {rule}"
            self.reasons.append(f"micro-batches of {size}: {why}")
        return answer.has_plan


def candidates(
    problem: Problem,
    cost_model: CostModel,
    stages: Sequence[Placed],
    size: int,
    trial: Trial,
    preferred: Sequence[str] = ("1f1b",),
) -> Iterator[Candidate]:
    """The stages at micro-batches of ``size``, replicas with equal shares; nothing if a replica would have no sample.

    Args:
        trial: is told why there is nothing.
        preferred: the peer's schedules, those of them that the problem allows; else every one that is allowed.
    """
    if problem.max_stages and len(stages) > problem.max_stages:
        trial.reasons.append(f"micro-batches of {size}: its plan has {len(stages)} stages")
        return
    batches = micro_batches(problem, size)
    shares = tuple(equal_shares(size, len(ranks)) for _, ranks in stages)
    if not all(
        usable(problem, cost_model, ranks, mine, batches) for (_, ranks), mine in zip(stages, shares, strict=True)
    ):
        most = max(len(ranks) for _, ranks in stages)
        why = "more samples on one than were measured" if size >= most else "some of them without a sample"
        trial.reasons.append(f"micro-batches of {size}: its plan has a stage of {most} devices, {why}")
        return
    stage_of = [0] * len(problem.graph.layers)
    for stage, (layers, _) in enumerate(stages):
        for layer in layers:
            stage_of[layer] = stage
    allowed = schedule_names(problem)
    for schedule in [name for name in preferred if name in allowed] or allowed:
        yield Candidate(tuple(stage_of), tuple(ranks for _, ranks in stages), shares, batches, schedule)


Dealt = TypeVar("Dealt")

Pipelines = Callable[[Problem, CostModel, Trial], Iterator[Candidate]]
"""What a published planner offers."""


def rival_plan(problem: Problem, pipelines: Pipelines, name: str, method: str) -> Plan:
    """The best under the simulator of what a published planner offers, in the time that its authors state.

    Raises:
        InfeasibleError: it offers nothing, which the error explains, or nothing that fits.
        MissingMeasurementError: nothing that it offers could be priced.
    """
    evaluator = Evaluator(problem, CostModel(problem.profile))
    trial = Trial(min(stated_s(name, problem.time_limit_s), (1 - _TO_PRICE) * problem.time_limit_s))
    best = best_of(evaluator, pipelines(problem, evaluator.cost_model, trial), why=trial.reasons)
    return heuristic_plan(evaluator, best, name, method)


_TO_PRICE = 0.1
"""Of a problem's time limit, for the simulations of what a rival's programmes answer."""


def whole_network_s(cost_model: CostModel, kind: str, size: int) -> float:
    """Forward and backward of all layers at ``size`` samples on a device of ``kind``."""
    table, factor = priced(cost_model, kind, size)
    return factor * float(table.forward_s[-1] + table.backward_s[-1])


def slowest_kind(problem: Problem, cost_model: CostModel, size: int) -> str:
    """The kind of device that takes longest for the whole network: planners for like devices count on no better."""
    kinds = dict.fromkeys(cost_model.kind(rank) for rank in problem.ranks)
    return max(kinds, key=lambda kind: whole_network_s(cost_model, kind, size))


def hosts_of(problem: Problem) -> dict[str, tuple[int, ...]]:
    """The usable ranks by host."""
    hosts: dict[str, list[int]] = {}
    for rank in problem.ranks:
        hosts.setdefault(problem.cluster.devices[rank].host, []).append(rank)
    return {host: tuple(ranks) for host, ranks in hosts.items()}


def like_hosts(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """The usable ranks of each host.

    Raises:
        InfeasibleError: hosts have different numbers of them.
    """
    hosts = hosts_of(problem)
    counts = {host: len(ranks) for host, ranks in hosts.items()}
    if len(set(counts.values())) > 1:
        named = ", ".join(f"{host} {count}" for host, count in counts.items())
        raise InfeasibleError("this planner wants like hosts", [f"devices: {named}"], ["plan with another solver"])
    return tuple(hosts.values())


def bandwidth_bytes_per_s(problem: Problem, ranks: Sequence[int]) -> float:
    """Of the slowest link among ``ranks``; of the one link there is if they are but one."""
    cluster = corrected_cluster(problem.profile)
    if len(ranks) < 2:
        return min(link.bandwidth_bytes_per_s for link in cluster.links.values())
    return cluster.links[cluster.group_link_class(tuple(ranks))].bandwidth_bytes_per_s


def sums_bytes_per_s(problem: Problem, ranks: Sequence[int]) -> float:
    """The rate of a ring over ``ranks`` that sums the gradients of the whole network; a message's for one rank."""
    parameter_bytes = sum(spec.num_bytes for spec in problem.graph.parameters.values())
    if len(ranks) < 2 or not parameter_bytes:
        return bandwidth_bytes_per_s(problem, ranks)
    cluster = corrected_cluster(problem.profile)
    seconds = float(collective_s(cluster, ALL_REDUCE, tuple(ranks), parameter_bytes))
    return 2 * (len(ranks) - 1) / len(ranks) * parameter_bytes / seconds if seconds > 0 else inf


def stages_in(answer: RivalAnswer) -> list[dict[str, Json]]:
    """The stages of a peer's plan."""
    stages = answer.plan.get("stages", [])
    return [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []


def names_in(stage: dict[str, Json]) -> list[str]:
    """The layers of a stage of a peer's plan."""
    layers = stage["layers"]
    return [name for name in layers if isinstance(name, str)] if isinstance(layers, list) else []


def dealt(ranks: Sequence[Dealt], counts: Iterable[int]) -> Iterator[tuple[Dealt, ...]]:
    """``ranks``, or hosts, in groups of one size, one after another."""
    left = iter(ranks)
    return (tuple(islice(left, count)) for count in counts)


def count_in(stage: dict[str, Json]) -> int:
    """The machines of a stage of a peer's plan."""
    count = stage["machines"]
    return count if isinstance(count, int) else 0
