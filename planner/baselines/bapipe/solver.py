"""BaPipe's planner (Zhao et al., 2020): balanced stages of one device each, the schedule that suits links and memory.

``bapipe.planner`` is its programme: schedules 1F1B-SNO and 1F1B-SO, every micro-batch size, devices in the order of
their ranks, each as fast as the profile says, joined by the slowest link.  A stage here is of whole layers, so the
intra-layer partition is left out; data parallelism is its fall-back.  Which schedule is best at which size BaPipe's
closed form says; the simulator then chooses among the sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from planner import schedules
from planner.baselines.bapipe import planner as bapipe
from planner.baselines.common.chain import chain_of
from planner.baselines.common.plans import Placed, bandwidth_bytes_per_s, candidates, slowest_kind
from planner.baselines.common.problem import network
from planner.costs.cost_model import PriceBook
from planner.ir.errors import InfeasibleError
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.solvers.candidates.candidate import Candidate, micro_batch_sizes, micro_batches, mixing_layers
from planner.solvers.candidates.choose import best_of
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.candidates.explain import heuristic_plan
from planner.solvers.progress import Progress

BASELINE = True

_SCHEDULES = {bapipe.SNO: "1f1b", bapipe.SO: "1f1b-so", bapipe.DATA_PARALLEL: "1f1b"}
"""Ours for each of BaPipe's; whether sends block is a matter of the machine, and the simulator's."""


def solve(problem: Problem, progress: Progress | None = None) -> Plan:
    """BaPipe's stages and schedule at the best micro-batch size.

    Raises:
        InfeasibleError: they do not fit, or there are fewer layers than ranks.
    """
    evaluator = Evaluator(problem, PriceBook(problem.profile))
    found = best_of(evaluator, _some(problem, pipelines(problem, evaluator.book)))
    return heuristic_plan(evaluator, found, "bapipe", "balanced stages of one device, schedule by closed form")


def pipelines(problem: Problem, book: PriceBook) -> Iterator[Candidate]:
    """Every micro-batch size."""
    ranks = problem.ranks
    bandwidth = bandwidth_bytes_per_s(problem, ranks)
    memory_bytes = float(min(problem.memory_limit_bytes(rank) for rank in ranks))
    replicas = not mixing_layers(problem.profile.graph)
    for size in micro_batch_sizes(problem, book):
        slowest = slowest_kind(problem, book, size)
        found = network(problem, book, slowest, size)
        seconds = {kind: _total_s(book, kind, size) for kind in {book.kind(rank) for rank in ranks}}
        speeds = tuple(seconds[slowest] / seconds[book.kind(rank)] if seconds[slowest] > 0 else 1.0 for rank in ranks)
        row = bapipe.Row(speeds, bandwidth, memory_bytes)
        chain, count = chain_of(found.graph), len(micro_batches(problem, size))
        answer = bapipe.solve(chain.scaled(count), row, (count,), data_parallel=replicas)
        cuts, name = answer.plan.get("cuts"), answer.plan.get("schedule")
        if not isinstance(cuts, list) or not isinstance(name, str):
            continue
        stages: list[Placed] = [(tuple(range(len(problem.profile.graph.layers))), ranks)]
        if name != bapipe.DATA_PARALLEL:
            bounds = [0, *(int(cut) for cut in cuts if isinstance(cut, float)), chain.num_layers]
            parts = [found.layers(chain.names[first:last]) for first, last in pairwise(bounds)]
            stages = [(layers, (rank,)) for layers, rank in zip(parts, ranks, strict=True)]
        wanted = _SCHEDULES[name] if _SCHEDULES[name] in schedules.names() else "1f1b"
        yield from candidates(problem, book, stages, size, wanted)


def _some(problem: Problem, found: Iterator[Candidate]) -> Iterator[Candidate]:
    """``found``, which must not be empty."""
    empty = True
    for candidate in found:
        empty = False
        yield candidate
    if empty:
        layers, ranks = len(problem.profile.graph.layers), len(problem.ranks)
        raise InfeasibleError(
            "no balanced pipeline",
            [f"{layers} layers on {ranks} ranks, one stage each, global batch {problem.global_batch}"],
            ["use fewer ranks, more memory, or another solver"],
        )


def _total_s(book: PriceBook, kind: str, size: int) -> float:
    table = book.tables.at(kind, size)
    return float(table.forward_s[-1] + table.backward_s[-1])
