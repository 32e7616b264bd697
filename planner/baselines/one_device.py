"""Everything on one device, one micro-batch after another: what a pipeline or replicas are compared with.

The micro-batch size (and the device, where they differ) is the best that fits.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.costs.cost_model import PriceBook
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.solvers.candidates.candidate import (
    Candidate,
    is_covered,
    micro_batch_sizes,
    micro_batches,
    pools,
    schedule_names,
)
from planner.solvers.candidates.choose import best_of, cheapest_first
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.candidates.explain import heuristic_plan
from planner.solvers.progress import Progress

BASELINE = True


def solve(problem: Problem, progress: Progress | None = None) -> Plan:
    """The fastest plan on one device.

    Raises:
        InfeasibleError: no device has the memory.
    """
    evaluator = Evaluator(problem, PriceBook(problem.profile))
    found = best_of(evaluator, cheapest_first(evaluator, candidates(problem, evaluator.book), evaluator.stops))
    return heuristic_plan(evaluator, found, "one-device", "one device, best micro-batch size")


def candidates(problem: Problem, book: PriceBook) -> Iterator[Candidate]:
    """One rank of each pool, each micro-batch size."""
    last = len(problem.profile.graph.layers)
    for size in micro_batch_sizes(problem, book):
        batches = micro_batches(problem, size)
        for pool in pools(problem):
            if is_covered(problem, book, pool.kind, size):
                for schedule in schedule_names(problem):
                    yield Candidate.chain((0, last), (pool.ranks[:1],), ((size,),), batches, schedule)
