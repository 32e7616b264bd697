"""What a published planner answers, and the candidates that come of it.

An answer is the planner's own value, how far the best could be from it, and its plan.  What it chose becomes candidates
that the simulator prices, on the ranks and links as such planners see them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from planner.costs.calibration.apply_corrections import corrected_cluster
from planner.costs.cost_model import PriceBook
from planner.ir.errors import InfeasibleError
from planner.ir.layout import equal_shares
from planner.ir.problem import Problem
from planner.solvers.candidates.candidate import Candidate, micro_batches
from planner.solvers.candidates.feasibility import micro_batch_sizes, schedule_names, usable

OPTIMAL, TIME_LIMIT, INFEASIBLE = ("optimal", "time limit", "infeasible")
"""Proved to be the best; the best found when time was up; no plan exists."""

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
"""What JSON can hold."""


@dataclass(frozen=True, slots=True)
class Answer:
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
    def found(self) -> bool:
        """Whether there is a plan."""
        return self.value < inf


def infeasible() -> Answer:
    """No plan exists."""
    return Answer(inf, inf, INFEASIBLE)


Placed = tuple[tuple[int, ...], tuple[int, ...]]
"""A stage: its layers by index in the graph, its ranks."""


def candidates(
    problem: Problem, book: PriceBook, stages: Sequence[Placed], size: int, preferred: str = "1f1b"
) -> Iterator[Candidate]:
    """The stages at micro-batches of ``size``, replicas with equal shares; nothing if a replica would have no sample.

    Args:
        preferred: the peer's schedule, taken if the problem allows it; else every one that is allowed.
    """
    if problem.max_stages and len(stages) > problem.max_stages:
        return
    batches = micro_batches(problem, size)
    shares = tuple(equal_shares(size, len(ranks)) for _, ranks in stages)
    if not all(usable(problem, book, ranks, mine, batches) for (_, ranks), mine in zip(stages, shares, strict=True)):
        return
    stage_of = [0] * len(problem.profile.graph.layers)
    for stage, (layers, _) in enumerate(stages):
        for layer in layers:
            stage_of[layer] = stage
    allowed = schedule_names(problem)
    for schedule in (preferred,) if preferred in allowed else allowed:
        yield Candidate(tuple(stage_of), tuple(ranks for _, ranks in stages), shares, batches, schedule)


_SHARE, _MOST_S = 0.5, 10.0
"""What a peer's programmes of all sizes may take together: of the time limit, and in seconds."""


def timed_sizes(problem: Problem, book: PriceBook) -> Iterator[tuple[int, float]]:
    """Micro-batch sizes, the largest first, and the seconds that a peer's programme may take for each."""
    sizes = micro_batch_sizes(problem, book)
    stop_at = time.monotonic() + min(_SHARE * problem.time_limit_s, _MOST_S)
    for number, size in enumerate(reversed(sizes)):
        yield size, max(0.0, stop_at - time.monotonic()) / (len(sizes) - number)


def slowest_kind(problem: Problem, book: PriceBook, size: int) -> str:
    """The kind of device that takes longest for the whole network: planners for like devices count on no better."""
    kinds = dict.fromkeys(book.kind(rank) for rank in problem.ranks)

    def seconds(kind: str) -> float:
        table = book.tables.at(kind, size)
        return float(table.forward_s[-1] + table.backward_s[-1])

    return max(kinds, key=seconds)


def hosts_of(problem: Problem) -> dict[str, tuple[int, ...]]:
    """The usable ranks by host."""
    found: dict[str, list[int]] = {}
    for rank in problem.ranks:
        found.setdefault(problem.profile.cluster.devices[rank].host, []).append(rank)
    return {host: tuple(ranks) for host, ranks in found.items()}


def like_hosts(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """The usable ranks of each host.

    Raises:
        InfeasibleError: hosts have different numbers of them.
    """
    found = hosts_of(problem)
    counts = {host: len(ranks) for host, ranks in found.items()}
    if len(set(counts.values())) > 1:
        named = ", ".join(f"{host} {count}" for host, count in counts.items())
        raise InfeasibleError("this planner wants like hosts", [f"devices: {named}"], ["plan with another solver"])
    return tuple(found.values())


def bandwidth_bytes_per_s(problem: Problem, ranks: Sequence[int]) -> float:
    """Of the slowest link among ``ranks``; of the one link there is if they are but one."""
    cluster = corrected_cluster(problem.profile)
    if len(ranks) < 2:
        return min(link.bandwidth_bytes_per_s for link in cluster.links.values())
    return cluster.links[cluster.group_link_class(tuple(ranks))].bandwidth_bytes_per_s


def stages_in(answer: Answer) -> list[dict[str, Json]]:
    """The stages of a peer's plan."""
    stages = answer.plan.get("stages", [])
    return [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []


def names_in(stage: dict[str, Json]) -> list[str]:
    """The layers of a stage of a peer's plan."""
    layers = stage["layers"]
    return [name for name in layers if isinstance(name, str)] if isinstance(layers, list) else []


def count_in(stage: dict[str, Json]) -> int:
    """The machines of a stage of a peer's plan."""
    count = stage["machines"]
    return count if isinstance(count, int) else 0
