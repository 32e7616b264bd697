"""The best-first search itself: a queue of prefixes and their bounds, and the best complete pipeline so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

from planner.solvers.candidates.assemble import Candidate
from planner.solvers.candidates.choose import ROUNDING, Choice, better
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.candidates.space import schedule_names
from planner.solvers.progress import Progress, SearchProgress
from planner.solvers.search.bounds import Bounds
from planner.solvers.search.frontier import Expansion, Node, expand
from planner.solvers.search.incumbents import Replicas, replica_candidate
from planner.solvers.search.refine import refined_bound_s
from planner.solvers.search.suffix import Suffixes

_REPORT_EVERY_S = 0.2
_DIVE_EVERY = 100  # candidates; a dive costs about as much as ten


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a search ends with.

    Attributes:
        status: ``proven``, ``within gap``, ``time limit`` or ``stopped``.
        bound_s: no plan of the space is faster; infinity if the space is empty.
        root_s: the bound before anything was decided.
        by_num_stages: the best plan seen with each number of stages.
    """

    status: str
    best: Evaluation | None
    bound_s: float
    root_s: float
    num_candidates: int
    by_num_stages: Mapping[int, Evaluation]


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A complete pipeline, to be simulated."""

    candidate: Candidate


Item = Bounds | Expansion | Replicas | Leaf


@dataclass(slots=True, eq=False)
class Queue:
    """The search's state.

    Attributes:
        any_fit: stop at the first plan that fits.
    """

    evaluator: Evaluator
    progress: Progress | None
    any_fit: bool = False
    best: Evaluation | None = field(init=False, default=None)
    root_s: float = field(init=False, default=float("inf"))
    num_candidates: int = field(init=False, default=0)
    by_num_stages: dict[int, Evaluation] = field(init=False, default_factory=dict)
    _heap: list[tuple[float, int, Item, int]] = field(init=False, default_factory=list)
    _pushed: int = field(init=False, default=0)
    _started_s: float = field(init=False, default_factory=time.monotonic)
    _reported_s: float = field(init=False, default=-_REPORT_EVERY_S)

    def run(self, fill: Callable[[], Iterable[Choice | Bounds | Replicas]]) -> Outcome:
        """Searches until proved, out of time, or stopped by Ctrl-C with a plan at hand.

        Args:
            fill: makes what to start from: plans that are known, and every way to cut the batch.
        """
        try:
            for item in fill():
                if isinstance(item, Choice):
                    self._take(item.best)
                elif isinstance(item, Bounds):
                    self._push(item.capacity_s(), item, 0)
                else:
                    self._push(item.bound_s, item, 0)
            self.root_s = self._bound_s()
            status = self._search()
        except KeyboardInterrupt:
            if self.best is None:
                raise
            status = "stopped"
        return Outcome(status, self.best, self._bound_s(), self.root_s, self.num_candidates, self.by_num_stages)

    def _search(self) -> str:
        problem = self.evaluator.problem
        while self._heap and not self._is_done(self._heap[0][0]):
            if time.monotonic() - self._started_s > problem.time_limit_s:
                return "time limit"
            self._report()
            _, _, item, position = heappop(self._heap)
            self.num_candidates += 1
            if isinstance(item, Leaf):
                self._simulate(item.candidate)
                continue
            if isinstance(item, Bounds):
                expansion = expand(Node.root(Suffixes(item)), problem.max_stages)
                self._push_child(expansion, 0)
                self._dive(expansion)
                continue
            if isinstance(item, Replicas):
                for schedule in schedule_names(problem):
                    self._simulate(replica_candidate(problem, item, schedule))
                continue
            self._push_child(item, position + 1)
            node = item.child(position)
            if node.is_complete:
                self._push(max(node.bound_s, refined_bound_s(node)), Leaf(node.candidate()), 0)
            else:
                expansion = expand(node, problem.max_stages)
                self._push_child(expansion, 0)
                if self.num_candidates % _DIVE_EVERY == 0:
                    self._dive(expansion)
        proven = self.best is None or self._bound_s() >= self.best.step_s * (1 - ROUNDING)
        return "proven" if proven else "within gap"

    def _dive(self, expansion: Expansion) -> None:
        """Follows the most promising child to a complete pipeline, so that a good plan is known early."""
        while len(expansion):
            node = expansion.child(0)
            if node.is_complete:
                self._simulate(node.candidate())
                return
            expansion = expand(node, self.evaluator.problem.max_stages)

    def _is_done(self, bound_s: float) -> bool:
        if self.best is None:
            return False
        return self.any_fit or bound_s >= self.best.step_s * (1 - self.evaluator.problem.gap) * (1 - ROUNDING)

    def _simulate(self, candidate: Candidate) -> None:
        self._take(self.evaluator.evaluate(candidate))

    def _take(self, found: Evaluation | None) -> None:
        if found is not None and found.fits:
            self.best = better(self.best, found)
            stages = found.candidate.num_stages
            self.by_num_stages[stages] = better(self.by_num_stages.get(stages), found)

    def _push_child(self, expansion: Expansion, position: int) -> None:
        if position < len(expansion):
            self._push(float(expansion.bound_s[position]), expansion, position)

    def _push(self, bound_s: float, item: Item, position: int) -> None:
        self._pushed += 1
        heappush(self._heap, (bound_s, self._pushed, item, position))

    def _bound_s(self) -> float:
        """No plan is faster than what is known, or than what the queue can still become."""
        known_s = self.best.step_s if self.best is not None else float("inf")
        return min(known_s, self._heap[0][0]) if self._heap else known_s

    def _report(self) -> None:
        now_s = time.monotonic() - self._started_s
        if self.progress is None or now_s - self._reported_s < _REPORT_EVERY_S:
            return
        self._reported_s = now_s
        best_s, bound_s = self.best.step_s if self.best is not None else float("inf"), self._bound_s()
        gap = best_s / bound_s - 1 if bound_s > 0 else float("inf")
        self.progress(SearchProgress(best_s, bound_s, gap, self.evaluator.num_simulated, now_s))
