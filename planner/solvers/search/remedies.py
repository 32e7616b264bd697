"""When nothing fits: the plan that lacks least memory, and what would help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from planner.costs.stage import PriceBook
from planner.costs.tables import Array
from planner.ir.errors import HalopipeError, MissingMeasurementError
from planner.ir.problem import Problem
from planner.solvers.candidates.answer import infeasible, size_text
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.candidates.space import cut_positions, micro_batch_sizes, micro_batches, pools
from planner.solvers.search.best_first import Queue
from planner.solvers.search.bounds import Bounds, Levels, Remaining
from planner.solvers.search.frontier import Node
from planner.solvers.search.groups import Group
from planner.solvers.search.start import Start, bounds_of, stretches_of
from planner.solvers.search.suffix import Suffixes

_QUICKLY_S = 5.0


def no_plan_fits(evaluator: Evaluator) -> HalopipeError:
    """The error for a problem of which no plan fits."""
    closest = leanest(evaluator)
    if closest is None:
        batch, count = evaluator.problem.global_batch, len(evaluator.problem.ranks)
        return MissingMeasurementError(
            "no micro-batch size that may be used was measured",
            [f"global batch {batch}, {count} ranks"],
            ["profile more sizes, or name the sizes to use"],
        )
    return infeasible(evaluator.problem, closest, tuple(_would_fit(evaluator.problem)))


def leanest(evaluator: Evaluator) -> Evaluation | None:
    """The candidate whose fullest rank is least over its limit, buffers at boundaries apart; None if there is none."""
    problem, book = evaluator.problem, evaluator.book
    stretches = stretches_of(evaluator, cut_positions(problem.profile.graph))
    best: Evaluation | None = None
    for size in micro_batch_sizes(problem, book):
        for bounds in bounds_of(evaluator, stretches, pools(problem), micro_batches(problem, size)):
            node = Leanest(bounds).node(problem.max_stages)
            if node is None:
                continue
            found = evaluator.evaluate(node.candidate())
            if best is None or evaluator.excess(found) < evaluator.excess(best):
                best = found
    return best


@dataclass(slots=True, eq=False)
class Leanest:
    """The suffix DP with the fullest rank's share of its limit in place of time."""

    bounds: Bounds
    _suffixes: dict[tuple[Remaining, int], tuple[Array, Levels, Levels]] = field(
        init=False, default_factory=dict, repr=False
    )

    def node(self, max_stages: int) -> Node | None:
        """The pipeline whose fullest rank is least full."""
        suffixes = Suffixes(self.bounds)
        remaining = Node.root(suffixes).remaining
        most = min(sum(remaining), len(self.bounds.in_flight), max_stages or sum(remaining))
        count = min(range(1, most + 1), key=lambda count: self._suffix(remaining, count)[0][0])
        groups: list[Group] = []
        cuts = [0]
        for downstream in range(count, 0, -1):
            fullness, choice, cut = self._suffix(remaining, downstream)
            if not np.isfinite(fullness[cuts[-1]]):
                return None
            options = list(self.bounds.used(remaining))
            group, remaining = options[choice[cuts[-1]]]
            groups.append(group)
            cuts.append(int(cut[cuts[-1]]))
        return Node(suffixes, tuple(groups), tuple(cuts), remaining, 0, 0.0, 0.0, 0.0)

    def _suffix(self, remaining: Remaining, downstream: int) -> tuple[Array, Levels, Levels]:
        """By first cut: the fullest rank's share of its limit, number of the first group, where its stage ends."""
        found = self._suffixes.get((remaining, downstream))
        if found is None:
            found = self._suffixes[remaining, downstream] = self._solve(remaining, downstream)
        return found

    def _solve(self, remaining: Remaining, downstream: int) -> tuple[Array, Levels, Levels]:
        num_cuts = len(self.bounds.stretches.cuts)
        best = np.full(num_cuts, np.inf)
        choice, cut = np.zeros(num_cuts, dtype=np.int64), np.zeros(num_cuts, dtype=np.int64)
        for number, (group, left) in enumerate(self.bounds.used(remaining)):
            limit = max(1, self.bounds.pools[group.pool].memory_limit_bytes)
            fullness = self.bounds.needed_bytes(group, downstream) / limit
            if downstream > 1:
                fullness = np.maximum(fullness, self._suffix(left, downstream - 1)[0][None, :])
            else:
                fullness[:, :-1] = np.inf
            fullness = np.where(np.triu(group.allowed, 1), fullness, np.inf)
            ends, values = fullness.argmin(axis=1), fullness.min(axis=1)
            choice, cut = np.where(values < best, number, choice), np.where(values < best, ends, cut)
            best = np.minimum(best, values)
        return best, choice, cut


def _would_fit(problem: Problem) -> Iterator[str]:
    """Relaxations of the problem under which a plan fits, one restriction at a time, then all."""
    relaxed = {
        "without --micro-batch": replace(problem, micro_batch_sizes=()) if problem.micro_batch_sizes else None,
        "without --schedule": replace(problem, schedules=()) if problem.schedules else None,
        "without --ranks": replace(problem, num_ranks=0) if problem.num_ranks else None,
        "without --max-stages": replace(problem, max_stages=0) if problem.max_stages else None,
    }
    possible = {words: other for words, other in relaxed.items() if other is not None}
    if len(possible) > 1:
        free = replace(problem, micro_batch_sizes=(), schedules=(), num_ranks=0, max_stages=0)
        possible["without all these restrictions"] = free
    for words, other in possible.items():
        found = any_fit(other)
        if found is not None:
            candidate = found.candidate
            peak = size_text(found.peak_bytes)
            yield (
                f"{words}: {candidate.num_stages} stages, micro-batch {candidate.micro_batches[0]}, "
                f"{candidate.schedule} fits ({peak})"
            )
            return


def any_fit(problem: Problem) -> Evaluation | None:
    """Some plan that fits, if one is found quickly."""
    evaluator = Evaluator(replace(problem, time_limit_s=_QUICKLY_S), PriceBook(problem.profile))
    return Queue(evaluator, None, any_fit=True).run(Start(evaluator).items).best
