"""PipeDream's planner over levels (Narayanan et al., SOSP 2019, section 3.1): hosts as machines of machines.

As ``baselines.pipedream.solver``, but the machine of the upper level is a host with a pipeline on all of its devices,
and a stage of the upper level may be replicated over hosts.  Hosts must have equally many devices; with one host it is
the same.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.baselines.common.answer import (
    Json,
    Placed,
    bandwidth_bytes_per_s,
    candidates,
    count_in,
    like_hosts,
    names_in,
    stages_in,
)
from planner.baselines.common.problem import Network
from planner.baselines.pipedream.solver import answers
from planner.costs.cost_model import PriceBook
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.solvers.candidates.candidate import Candidate
from planner.solvers.candidates.choose import best_plan
from planner.solvers.progress import Progress

BASELINE = True


def solve(problem: Problem, progress: Progress | None = None) -> Plan:
    """PipeDream's stages over hosts and inside them, at the best micro-batch size.

    Raises:
        InfeasibleError: they do not fit, or hosts have different numbers of devices.
    """
    return best_plan(problem, pipelines, "pipedream-hierarchical", "shortest slowest stage, replicated, level by level")


def pipelines(problem: Problem, book: PriceBook) -> Iterator[Candidate]:
    """Every micro-batch size."""
    hosts = like_hosts(problem)
    levels = 1 if len(hosts) == 1 else 2
    machines = [len(hosts[0]), len(hosts)][:levels]
    bandwidths = [bandwidth_bytes_per_s(problem, ranks) for ranks in (hosts[0], problem.ranks)][:levels]
    for size, found, answer in answers(problem, book, machines, bandwidths):
        upper: list[dict[str, Json]] = stages_in(answer)
        if levels == 1:
            upper = [{"machines": 1, "each": list[Json](upper)}]
        stages: list[Placed] = []
        used = 0
        for stage in upper:
            count = count_in(stage)
            stages += _on_hosts(found, stage["each"], hosts[used : used + count])
            used += count
        yield from candidates(problem, book, stages, size)


def _on_hosts(found: Network, stages: Json, hosts: tuple[tuple[int, ...], ...]) -> Iterator[Placed]:
    """The same stages on every one of ``hosts``, in the order of its devices."""
    used = 0
    for stage in stages if isinstance(stages, list) else []:
        if isinstance(stage, dict):
            count = count_in(stage)
            yield found.layers(names_in(stage)), tuple(rank for ranks in hosts for rank in ranks[used : used + count])
            used += count
