"""Plans that people make without a planner: one device, replicas on all, equally many layers a device.

    one device       one micro-batch after another, what a pipeline or replicas are compared with; the micro-batch size
                     (and the device, where they differ) is the best that fits
    data parallel    a replica of the whole model on every rank, gradients summed by one all-reduce a step (Li et al.,
                     "PyTorch Distributed", VLDB 2020).  Shares are such that the last of unequal devices ends
                     soonest, and as in everyday use the batch is cut into as few micro-batches as memory allows
                     (gradient accumulation).  Sums overlap with the last backward, bucket by bucket
                     (``costs.stages.gradient_overlap``)
    even split       as many stages as ranks, with equally many layers each, whatever they cost (Huang et al., "GPipe",
                     NeurIPS 2019; the count of layers is what torchgpipe, Kim et al., 2020, calls a balance, given by
                     hand and even if nothing is known).  Schedule GPipe if it may be used, else each that may; the
                     micro-batch size is the best of those allowed

Each is a function that offers candidates, and a solver that takes the best of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.ir.errors import InfeasibleError
from planner.ir.layout import cut_points, equal_shares
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.solvers.candidates.candidate import DevicePool, group_shares, micro_batches, pools
from planner.solvers.candidates.choose import best_of, cheapest_first, heuristic_plan
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.candidates.feasibility import (
    cut_positions,
    is_covered,
    may_part_ties,
    micro_batch_sizes,
    require_divisible,
    schedule_names,
    usable,
)
from planner.solvers.progress import Progress


def solve_one_device(problem: Problem, progress: Progress | None = None) -> Plan:
    """The fastest plan on one device.

    Raises:
        InfeasibleError: no device has the memory.
    """
    return _best(problem, one_device, "one-device", "one device, best micro-batch size")


def solve_data_parallel(problem: Problem, progress: Progress | None = None) -> Plan:
    """Replicas on all ranks, the largest micro-batch that fits.

    Raises:
        InfeasibleError: a replica does not fit on some rank, the batch has fewer samples than there are ranks, or the
            model mixes samples.
    """
    evaluator = Evaluator(problem, CostModel(problem.profile))
    return replicated_plan(evaluator, "data-parallel", "replicas on all ranks, largest micro-batch that fits")


def solve_even_split(problem: Problem, progress: Progress | None = None) -> Plan:
    """Equally many layers on every rank.

    Raises:
        InfeasibleError: it does not fit.
    """
    return _best(problem, even_split, "even-split", "equally many layers a rank, GPipe, best micro-batch size")


def _best(
    problem: Problem, candidates: Callable[[Problem, CostModel], Iterator[Candidate]], solver: str, method: str
) -> Plan:
    evaluator = Evaluator(problem, CostModel(problem.profile))
    best = best_of(evaluator, cheapest_first(evaluator, candidates(problem, evaluator.cost_model), evaluator.budget))
    return heuristic_plan(evaluator, best, solver, method)


def replicated_plan(evaluator: Evaluator, solver: str, method: str) -> Plan:
    """Replicas as the plan of a solver; raises as :func:`solve_data_parallel`."""
    problem = evaluator.problem
    if len(problem.ranks) > 1:
        require_divisible(problem.graph)
    best = best_of(evaluator, replicas(problem, evaluator.cost_model), first_that_fits=True)
    return heuristic_plan(evaluator, best, solver, method)


def one_device(problem: Problem, cost_model: CostModel) -> Iterator[Candidate]:
    """One rank of each kind with as much memory, or where rules name devices of each pool, each micro-batch size."""
    last = len(problem.graph.layers)
    rules = (*problem.fix, *problem.forbid)
    alike: dict[object, DevicePool] = {}
    for pool in pools(problem):
        alike.setdefault((pool.sort, rules and pool.ranks), pool)
    for size in micro_batch_sizes(problem, cost_model):
        batches = micro_batches(problem, size)
        for pool in alike.values():
            if is_covered(problem, cost_model, pool.kind, size):
                for schedule in schedule_names(problem):
                    yield Candidate.chain((0, last), (pool.ranks[:1],), ((size,),), batches, schedule)


def replicas(problem: Problem, cost_model: CostModel) -> Iterator[Candidate]:
    """All ranks, from the largest micro-batch down.

    Raises:
        InfeasibleError: no micro-batch gives every rank a sample.
    """
    last = len(problem.graph.layers)
    any_usable = False
    for size in reversed(micro_batch_sizes(problem, cost_model)):
        batches = micro_batches(problem, size)
        shares = group_shares(problem, cost_model, problem.ranks, size)
        if usable(problem, cost_model, problem.ranks, shares, batches):
            any_usable = True
            yield from (
                Candidate.chain((0, last), (problem.ranks,), (shares,), batches, schedule)
                for schedule in schedule_names(problem)
            )
    if not any_usable:
        raise InfeasibleError(
            "no micro-batch can be shared by all ranks",
            [f"{len(problem.ranks)} ranks, global batch {problem.global_batch}"],
            ["use fewer ranks or a larger global batch"],
        )


def even_split(problem: Problem, cost_model: CostModel) -> Iterator[Candidate]:
    """Every micro-batch size."""
    bounds = _even_bounds(problem)
    ranks = problem.ranks[: len(bounds) - 1]
    groups = tuple((rank,) for rank in ranks)
    allowed = schedule_names(problem)
    named = ("gpipe",) if "gpipe" in allowed else allowed
    for size in micro_batch_sizes(problem, cost_model):
        if all(is_covered(problem, cost_model, cost_model.kind(rank), size) for rank in ranks):
            batches = micro_batches(problem, size)
            shares = ((size,),) * len(groups)
            yield from (Candidate.chain(bounds, groups, shares, batches, schedule) for schedule in named)


def _even_bounds(problem: Problem) -> tuple[int, ...]:
    """Cut positions with equally many layers between them, moved to where cutting is allowed."""
    allowed = cut_positions(problem.graph, may_part_ties(problem))
    num_layers = allowed[-1]
    num_stages = min(len(problem.ranks), num_layers, problem.max_stages or num_layers)
    wanted = cut_points(equal_shares(num_layers, num_stages))
    return tuple(sorted({min(allowed, key=lambda position: abs(position - want)) for want in wanted}))
