"""DAPPLE's planner (Fan et al., PPoPP 2021): the shortest latency by its three phases, devices by its three policies.

``dapple.planner`` is its programme, on like devices (the slowest kind's costs count) and like hosts; hosts with
different numbers of devices count as one whose links are the slowest.  As in the paper the profile is first joined to
few blocks. Its schedule is 1F1B (backward as early as can be).  Every micro-batch size is tried.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from planner.baselines.common.chain import chain_of, coarse_ends
from planner.baselines.common.plans import (
    Placed,
    bandwidth_bytes_per_s,
    candidates,
    hosts_of,
    names_in,
    slowest_kind,
    stages_in,
)
from planner.baselines.common.problem import blocks_at, network
from planner.baselines.dapple import planner as dapple
from planner.costs.cost_model import PriceBook
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.solvers.candidates.candidate import Candidate, micro_batch_sizes, micro_batches, require_divisible
from planner.solvers.candidates.choose import best_of
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.candidates.explain import heuristic_plan
from planner.solvers.progress import Progress

BASELINE = True

BLOCKS = 20
"""Most blocks of layers."""

_SHARE, _MOST_S = 0.5, 10.0
"""What the programmes of all sizes may take together: of the time limit, and in seconds."""


def solve(problem: Problem, progress: Progress | None = None) -> Plan:
    """DAPPLE's stages at the best micro-batch size.

    Raises:
        InfeasibleError: they do not fit, or the model mixes samples.
    """
    if len(problem.ranks) > 1:
        require_divisible(problem.profile.graph)
    evaluator = Evaluator(problem, PriceBook(problem.profile))
    found = best_of(evaluator, pipelines(problem, evaluator.book))
    return heuristic_plan(evaluator, found, "dapple", "shortest latency by warm-up, steady phase and ending")


def pipelines(problem: Problem, book: PriceBook) -> Iterator[Candidate]:
    """Every micro-batch size."""
    hosts = tuple(hosts_of(problem).values())
    if len({len(ranks) for ranks in hosts}) > 1:
        hosts = (problem.ranks,)
    within, across = (bandwidth_bytes_per_s(problem, ranks) for ranks in (hosts[0], problem.ranks))
    shape = dapple.Hosts(len(hosts), len(hosts[0]), within, across)
    sizes = micro_batch_sizes(problem, book)
    stop_at = time.monotonic() + min(_SHARE * problem.time_limit_s, _MOST_S)
    for number, size in enumerate(reversed(sizes)):
        fine = network(problem, book, slowest_kind(problem, book, size), size)
        found = blocks_at(fine, coarse_ends(chain_of(fine.graph), BLOCKS))
        count = len(micro_batches(problem, size))
        limit_s = max(0.0, stop_at - time.monotonic()) / (len(sizes) - number)
        answer = dapple.solve(chain_of(found.graph).scaled(count), shape, count, problem.max_stages, limit_s)
        free = [list(ranks) for ranks in hosts]
        stages: list[Placed] = []
        for stage in stages_in(answer):
            devices = stage["devices"]
            counts = [count for count in devices if isinstance(count, int)] if isinstance(devices, list) else []
            ranks = [mine.pop(0) for mine, count in zip(free, counts, strict=True) for _ in range(count)]
            stages.append((found.layers(names_in(stage)), tuple(ranks)))
        if stages:
            yield from candidates(problem, book, stages, size)
