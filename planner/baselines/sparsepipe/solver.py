"""SparsePipe's planner: PipeDream's pipeline on unlike devices in a fixed order, a stage as slow as its slowest device.

``sparsepipe.planner`` is its programme, here with the published restrictions (``fixed_order``).  As there any two
devices are joined alike (the slowest link), and replicas have equal shares whatever their speed.  Its schedule is
PipeDream's; ours is the synchronous 1F1B.  Every micro-batch size is tried.

Of a sparse network each stage makes its kernel maps when the features have arrived, and not ahead of them; in its
planner that is a part of the layers' time, of the first one that needs a map.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.baselines.common.plans import Placed, bandwidth_bytes_per_s, candidates, names_in, stages_in
from planner.baselines.common.problem import Network, block_ends, blocks_at, network
from planner.baselines.sparsepipe import planner as sparsepipe
from planner.costs.cost_model import PriceBook
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.solvers.candidates.candidate import Candidate, micro_batch_sizes, require_divisible
from planner.solvers.candidates.choose import best_of
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.candidates.explain import heuristic_plan
from planner.solvers.progress import Progress

BASELINE = True


def solve(problem: Problem, progress: Progress | None = None) -> Plan:
    """SparsePipe's stages at the best micro-batch size.

    Raises:
        InfeasibleError: they do not fit, or the model mixes samples.
    """
    if len(problem.ranks) > 1:
        require_divisible(problem.profile.graph)
    evaluator = Evaluator(problem, PriceBook(problem.profile))
    found = best_of(evaluator, pipelines(problem, evaluator.book))
    return heuristic_plan(evaluator, found, "sparsepipe", "shortest slowest stage, devices in a fixed order")


def pipelines(problem: Problem, book: PriceBook) -> Iterator[Candidate]:
    """Every micro-batch size."""
    ranks: dict[str, list[int]] = {}
    for rank in problem.ranks:
        ranks.setdefault(book.kind(rank), []).append(rank)
    bandwidth = bandwidth_bytes_per_s(problem, problem.ranks)
    for size in micro_batch_sizes(problem, book):
        networks = _networks(problem, book, list(ranks), size)
        types = [sparsepipe.DeviceType(kind, networks[kind].graph, len(mine)) for kind, mine in ranks.items()]
        answer = sparsepipe.solve(types, bandwidth, fixed_order=True)
        free = {kind: list(mine) for kind, mine in ranks.items()}
        stages: list[Placed] = []
        for stage in stages_in(answer):
            devices = stage["devices"]
            counts = devices if isinstance(devices, dict) else {}
            taken = [
                free[kind].pop(0) for kind, count in counts.items() if isinstance(count, int) for _ in range(count)
            ]
            stages.append((next(iter(networks.values())).layers(names_in(stage)), tuple(sorted(taken))))
        if stages:
            yield from (replace(each, prepares_ahead=False) for each in candidates(problem, book, stages, size))


def _networks(problem: Problem, book: PriceBook, kinds: list[str], size: int) -> dict[str, Network]:
    """The network on each kind; if one must be a chain of blocks, the same blocks on all."""
    found = {kind: network(problem, book, kind, size, prepares=True) for kind in kinds}
    ends = block_ends(found[kinds[0]], len(problem.ranks))
    return found if ends is None else {kind: blocks_at(fine, ends) for kind, fine in found.items()}
