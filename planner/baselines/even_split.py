"""GPipe's even split: as many stages as ranks, with equally many layers each, whatever they cost.

Huang et al., "GPipe", NeurIPS 2019; the count of layers is what torchgpipe (Kim et al., 2020) calls a balance, given by
hand and even if nothing is known.  Schedule GPipe if it may be used, else each that may; the micro-batch size the best
of those allowed.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.costs.cost_model import PriceBook
from planner.ir.layout import equal_shares
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.solvers.candidates.candidate import (
    Candidate,
    cut_positions,
    is_covered,
    micro_batch_sizes,
    micro_batches,
    schedule_names,
)
from planner.solvers.candidates.choose import best_of, cheapest_first
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.candidates.explain import heuristic_plan
from planner.solvers.progress import Progress

BASELINE = True


def solve(problem: Problem, progress: Progress | None = None) -> Plan:
    """Equally many layers on every rank.

    Raises:
        InfeasibleError: it does not fit.
    """
    evaluator = Evaluator(problem, PriceBook(problem.profile))
    found = best_of(evaluator, cheapest_first(evaluator, candidates(problem, evaluator.book), evaluator.stops))
    return heuristic_plan(evaluator, found, "even-split", "equally many layers a rank, GPipe, best micro-batch size")


def candidates(problem: Problem, book: PriceBook) -> Iterator[Candidate]:
    """Every micro-batch size."""
    bounds = even_bounds(problem)
    ranks = problem.ranks[: len(bounds) - 1]
    groups = tuple((rank,) for rank in ranks)
    allowed = schedule_names(problem)
    named = ("gpipe",) if "gpipe" in allowed else allowed
    for size in micro_batch_sizes(problem, book):
        if all(is_covered(problem, book, book.kind(rank), size) for rank in ranks):
            batches, shares = micro_batches(problem, size), ((size,),) * len(groups)
            yield from (Candidate.chain(bounds, groups, shares, batches, schedule) for schedule in named)


def even_bounds(problem: Problem) -> tuple[int, ...]:
    """Cut positions with equally many layers between them, moved to where cutting is allowed."""
    allowed = cut_positions(problem.profile.graph)
    num_layers = allowed[-1]
    num_stages = min(len(problem.ranks), num_layers, problem.max_stages or num_layers)
    wanted = [0]
    for share in equal_shares(num_layers, num_stages):
        wanted.append(wanted[-1] + share)
    return tuple(sorted({min(allowed, key=lambda position: abs(position - want)) for want in wanted}))
