"""Pure data parallelism: a replica of the whole model on every rank, gradients summed by one all-reduce a step.

Li et al., "PyTorch Distributed", VLDB 2020.  Shares are in proportion to speed, so that unequal devices end together,
and as in everyday use the batch is cut into as few micro-batches as memory allows (gradient accumulation).  Sums
run behind the last backward, bucket by bucket (``costs.stages.gradient_overlap``).
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.costs.cost_model import PriceBook
from planner.ir.errors import InfeasibleError
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.solvers.candidates.candidate import (
    Candidate,
    micro_batch_sizes,
    micro_batches,
    replica_shares,
    require_divisible,
    schedule_names,
    usable,
)
from planner.solvers.candidates.choose import best_of
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.candidates.explain import heuristic_plan
from planner.solvers.progress import Progress

BASELINE = True


def solve(problem: Problem, progress: Progress | None = None) -> Plan:
    """Replicas on all ranks, the largest micro-batch that fits.

    Raises:
        InfeasibleError: a replica does not fit on some rank, the batch has fewer samples than there are ranks, or the
            model mixes samples.
    """
    if len(problem.ranks) > 1:
        require_divisible(problem.profile.graph)
    evaluator = Evaluator(problem, PriceBook(problem.profile))
    found = best_of(evaluator, candidates(problem, evaluator.book), first_that_fits=True)
    return heuristic_plan(evaluator, found, "data-parallel", "replicas on all ranks, largest micro-batch that fits")


def candidates(problem: Problem, book: PriceBook) -> Iterator[Candidate]:
    """All ranks, from the largest micro-batch down.

    Raises:
        InfeasibleError: no micro-batch gives every rank a sample.
    """
    last = len(problem.profile.graph.layers)
    found = False
    for size in reversed(micro_batch_sizes(problem, book)):
        batches = micro_batches(problem, size)
        shares = replica_shares(problem, book, problem.ranks, size)
        if usable(problem, book, problem.ranks, shares, batches):
            found = True
            yield from (
                Candidate.chain((0, last), (problem.ranks,), (shares,), batches, schedule)
                for schedule in schedule_names(problem)
            )
    if not found:
        raise InfeasibleError(
            "no micro-batch can be shared by all ranks",
            [f"{len(problem.ranks)} ranks, global batch {problem.global_batch}"],
            ["use fewer ranks or a larger global batch"],
        )
