"""The best-first search itself: a queue of prefixes by their bounds, complete pipelines, and the best plan so far.

A prefix or pipeline is looked at only if its bound is below the best step so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import inf

import numpy as np

from planner.costs.candidate import Candidate
from planner.ir.errors import IllegalProgramError, MissingMeasurementError
from planner.ir.plan import PROVEN, SEARCHED, STOPPED, TIME_LIMIT, Rejected, status_of
from planner.solvers.best_first import policy, virtual_pipelines
from planner.solvers.best_first.bound import Suffixes
from planner.solvers.best_first.device_groups import DeviceStates
from planner.solvers.best_first.graph_cuts import Numbers
from planner.solvers.best_first.incumbents import Replicas, replica_candidate
from planner.solvers.best_first.leaf_bound import Leaf, Leaves
from planner.solvers.best_first.message_bound import handovers_of
from planner.solvers.best_first.prefixes import Expansion, Frontier, PipelinePrefix
from planner.solvers.best_first.priced_groups import GroupPrices
from planner.solvers.best_first.repair import made_to_fit
from planner.solvers.best_first.share_bound import AnyShares, MeanHandovers, has_open_shares
from planner.solvers.best_first.share_search import OpenShares
from planner.solvers.budget import CALL_S, Budget, OutOfTimeError, under
from planner.solvers.candidates.choose import ROUNDING, better
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.candidates.feasibility import stages_usable
from planner.solvers.candidates.stage_orders import in_every_order
from planner.solvers.progress import Progress, SearchProgress

_REPORT_EVERY_S = 0.2
_FEW_LEAVES = 64  # looked at together, at first and later: many at once are cheaper
_MANY_LEAVES = 8192
_BEGIN_S = 0.02  # to begin with a way to cut the batch
_BEGIN_OPEN_S = 0.08  # where shares are open
_OPEN_S = 1e-4  # to put what may follow a prefix into the queue, or to make a pipeline of a complete one
_BEAM = 24  # prefixes of equal length that are followed to the end at first
_FEW = 12  # complete ones of these that are looked at
_PROMISING = 3  # complete ones of these that are simulated
_DRAWN = 2.0  # plans as large as the best that are drawn, it among them


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a search ends with.

    Attributes:
        status: as of ``planner.ir.plan.Search``; ``proven`` also where there certainly is no plan.
        bound_s: no plan of the space is faster; infinity if the space is empty.
        root_s: the bound of the suffix DPs alone.
        by_num_stages: the best plan seen with each number of stages.
        unreplicated: the best seen whose stages have one rank each.
        rejected: what was not looked at.
    """

    status: str
    best: Evaluation | None
    bound_s: float
    root_s: float
    num_candidates: int
    by_num_stages: Mapping[int, Evaluation]
    unreplicated: Evaluation | None = None
    rejected: tuple[Rejected, ...] = ()

    @property
    def refutes(self) -> bool:
        """Whether there certainly is no plan."""
        return self.best is None and self.status == PROVEN


@dataclass(frozen=True, slots=True, eq=False)
class BatchSpace:
    """All pipelines of one way to cut the batch, not looked at yet.

    Attributes:
        bound_s: none is faster.
        begun: their DP, if some of its tables were made.
    """

    bound_s: float
    prices: GroupPrices
    devices: DeviceStates
    begun: Suffixes | None = None

    def suffixes(self, upper_s: float, budget: Budget) -> Suffixes:
        """Their DP, given an upper bound on the step and what its tables may cost."""
        if self.begun is not None:
            self.begun.budget = budget
            return self.begun
        if has_open_shares(self.prices, self.devices):
            budget.spend(_BEGIN_OPEN_S)
            every = AnyShares.of(self.prices, upper_s)
            return Suffixes(every, self.devices, MeanHandovers(every), upper_s, budget)
        budget.spend(_BEGIN_S)
        return Suffixes(self.prices, self.devices, handovers_of(self.prices), upper_s, budget)


@dataclass(frozen=True, slots=True, eq=False)
class Siblings:
    """An expansion that stands for its child at the queue's position, and those after it."""

    frontier: Frontier
    expansion: Expansion


@dataclass(frozen=True, slots=True, eq=False)
class Simulate:
    """A complete pipeline under one schedule, to be simulated."""

    frontier: Frontier
    leaf: Leaf

    @property
    def stands_for_all(self) -> bool:
        """Whether it stands for those with their stages in other orders."""
        return self.frontier.suffixes.prices.cuts.merges_orders


Start = Evaluation | BatchSpace | Replicas | virtual_pipelines.PipelineFamilies
"""What a search starts from."""

QueueItem = BatchSpace | Frontier | Siblings | Simulate | OpenShares | Replicas | virtual_pipelines.VirtualItem


@dataclass(slots=True, eq=False)
class BestFirstSearch:
    """The search: what waits, by its bound, and the best plan so far.

    Attributes:
        any_fit: stop at the first plan that fits.
        within: a part of the evaluator's budget; by default all of it.
        start_bound_s: no plan is faster, as is known while the start is made.
        improved: the best plan near one, within a budget; asked once, when a part of the work is done and the best plan
            is not known yet.
    """

    evaluator: Evaluator
    progress: Progress | None
    any_fit: bool = False
    within: Budget | None = None
    improved: Callable[[Evaluation, Budget], Evaluation] | None = None
    start_bound_s: Callable[[], float] = lambda: 0.0
    best: Evaluation | None = field(init=False, default=None)
    root_s: float = field(init=False, default=inf)
    num_candidates: int = field(init=False, default=0)
    by_num_stages: dict[int, Evaluation] = field(init=False, default_factory=dict)
    unreplicated: Evaluation | None = field(init=False, default=None)
    _heap: list[tuple[float, int, QueueItem, int]] = field(init=False, default_factory=list)
    _leaves: dict[Frontier, list[tuple[Expansion, Numbers]]] = field(init=False, default_factory=dict)
    _num_leaves: int = field(init=False, default=0)
    _least_leaf_s: float = field(init=False, default=inf)
    _passed_over_s: float = field(init=False, default=inf)  # least bound of what there was no time for
    _enough_leaves: int = field(init=False, default=_FEW_LEAVES)
    _pushed: int = field(init=False, default=0)
    _budget: Budget = field(init=False)
    _begun_s: float = field(init=False)  # work done before
    _reported_s: float = field(init=False, default=-_REPORT_EVERY_S)
    _has_told: bool = field(init=False, default=False)  # of a plan

    def __post_init__(self) -> None:
        self._budget = self.within or self.evaluator.budget
        self._begun_s = self._budget.work_s

    def run(self, start: Iterable[Start]) -> Outcome:
        """Searches until proved, out of time, or stopped by Ctrl-C with a plan at hand.

        Args:
            start: plans that are known, and every way to cut the batch.
        """
        try:
            for item in start:
                if isinstance(item, Evaluation):
                    self.take(item)
                    self._report(self.start_bound_s())
                    self._look_near_in_time()
                else:
                    self._push(item.bound_s, item)
            status = self._search()
        except KeyboardInterrupt:
            if self.best is None:
                raise
            status = STOPPED
        return self.outcome(status)

    def outcome(self, status: str) -> Outcome:
        """What is known now."""
        unopened = [
            bound_s
            for bound_s, _, item, _ in self._heap
            if isinstance(item, BatchSpace | virtual_pipelines.VirtualItem)
        ]
        root_s = min(self.root_s, self.upper_s, *unopened) if unopened else min(self.root_s, self.upper_s)
        so_far = self.num_candidates, self.by_num_stages, self.unreplicated
        return Outcome(status, self.best, self._bound_s(), root_s, *so_far)

    @property
    def upper_s(self) -> float:
        """Plans from here on are of no interest."""
        if self.best is None:
            return inf
        return self.best.step_s / (1 + self.evaluator.problem.gap) * (1 - ROUNDING)

    @property
    def answer_work_s(self) -> float:
        """Work that is left for what is said of the plan at last."""
        if self.best is None:
            return 0.0
        candidate = self.best.candidate
        most_s = policy.TIES * self.evaluator.problem.time_limit_s
        ties_work_s = _DRAWN * self.evaluator.drawing_work_s(candidate) if self.evaluator.problem.confidence else 0.0
        return self.evaluator.answer_work_s(candidate) + (ties_work_s if ties_work_s <= most_s else 0.0)

    def take(self, evaluation: Evaluation | None) -> None:
        """Remembers a plan."""
        if evaluation is not None and evaluation.fits and not self.evaluator.unmet(evaluation.candidate):
            self.best = better(self.best, evaluation)
            self._budget.reserve(self.answer_work_s)
            stages = evaluation.candidate.num_stages
            self.by_num_stages[stages] = better(self.by_num_stages.get(stages), evaluation)
            if _is_unreplicated(evaluation.candidate):
                self.unreplicated = better(self.unreplicated, evaluation)

    def _search(self) -> str:
        while True:
            if self._leaves_wait():
                self._look_at_leaves()
            if self._is_done():
                break
            if self._budget.is_over:
                return TIME_LIMIT
            self._report(self._bound_s())
            if not self._look_near_in_time():
                self._advance()
        if self.best is None:
            return PROVEN
        ended = TIME_LIMIT if self._passed_over_s < self.upper_s else SEARCHED
        return status_of(ended, self.best.step_s, self._bound_s(), self.evaluator.problem.gap)

    def _look_near_in_time(self) -> bool:
        """Asks so once that share of the budget is done; whether it did."""
        is_time = self.improved is not None and self._until_s(policy.NEAR_AFTER) < 0
        if is_time:
            self._look_near()
        return is_time

    def _look_near(self) -> None:
        """Asks once for what is near the best plan."""
        improved = self.improved
        self.improved = None
        if improved is not None and self.best is not None:
            left_s = self._budget.left_s - self.answer_work_s
            self.take(improved(self.best, self._budget.part(policy.NEAR * left_s, self.answer_work_s)))

    def _until_s(self, share: float) -> float:
        """Work that is left until this share of the budget is done."""
        return self._begun_s + share * (self._budget.limit_s - self.answer_work_s) - self._budget.work_s

    def _advance(self) -> None:
        """Takes what has the least bound one step further."""
        bound_s, _, item, position = heappop(self._heap)
        self.num_candidates += 1
        self._budget.spend(CALL_S)
        if isinstance(item, BatchSpace):
            until_near_s = inf if self.improved is None else self._until_s(policy.NEAR_AFTER)
            suffixes = item.suffixes(self.upper_s, self._budget.part(until_near_s, self.answer_work_s))
            try:
                with under(self._budget):
                    root_s = max(bound_s, suffixes.root_s())
            except OutOfTimeError:
                self._wait(replace(item, bound_s=bound_s, begun=suffixes))
                return
            suffixes.budget = None  # what is still missing of the tables is little
            self.root_s = min(self.root_s, root_s)
            self._push(root_s, Frontier(suffixes))
        elif isinstance(item, Frontier):
            self._open(item, item.root())
            self._look_ahead(item)
        elif isinstance(item, Simulate):
            candidate = self._simulate(item.frontier, item.leaf, bound_s, item.stands_for_all)
            is_open = any(choice.group.is_open for choice in item.leaf.prefix.choices)
            if candidate is not None and is_open:
                shares = OpenShares.of(item.frontier, item.leaf, candidate, self.upper_s)
                self._push(shares.bound_s, shares)
        elif isinstance(item, Replicas):
            for schedule in self.evaluator.schedules:
                self._evaluate(replica_candidate(self.evaluator.problem, item, schedule), bound_s)
        elif isinstance(item, virtual_pipelines.VirtualItem | OpenShares):
            for after in item.advance(self.evaluator, self.upper_s):
                if isinstance(after, Candidate):
                    with suppress(MissingMeasurementError, IllegalProgramError):
                        every_order = isinstance(item, OpenShares) and item.stands_for_all
                        (self._evaluate_in_every_order if every_order else self._evaluate)(after, item.bound_s)
                elif isinstance(after, Evaluation):
                    self.take(after)
                else:
                    self._push(after.bound_s, after)
        else:
            if position + 1 < len(item.expansion):
                self._push(float(item.expansion.bound_s[position + 1]), item, position + 1)
            self._open(item.frontier, item.expansion.child(position))

    def _wait(self, space: BatchSpace) -> None:
        """Keeps a space whose tables there was no time for until something else is done; what never will be is left."""
        if self.improved is not None:
            self._push(space.bound_s, space)
            self._look_near()
        else:
            self._passed_over_s = min(self._passed_over_s, space.bound_s)
            self.root_s = min(self.root_s, space.bound_s)

    def _simulate(self, frontier: Frontier, leaf: Leaf, bound_s: float, every_order: bool = False) -> Candidate | None:
        """Looks at the pipeline, where shares are open with those best by themselves; None if it is not allowed."""
        self._budget.spend(_OPEN_S)
        candidate = replace(frontier.candidate(leaf.prefix, leaf.schedule), windows=leaf.windows)
        if self.evaluator.unmet(candidate):
            return None
        if stages_usable(self.evaluator.problem, self.evaluator.cost_model, candidate):
            (self._evaluate_in_every_order if every_order else self._evaluate)(candidate, bound_s)
        return candidate

    def _evaluate_in_every_order(self, candidate: Candidate, bound_s: float) -> None:
        """The same of all that the candidate stands for: it and those with its stages in other orders."""
        for one in in_every_order(self.evaluator.problem.graph, candidate):
            self._evaluate(one, bound_s)
            if min(self.upper_s, self._passed_over_s) <= bound_s:
                return

    def _evaluate(self, candidate: Candidate, bound_s: float) -> None:
        """Takes the candidate if it is the best of its number of stages; passes it over if it would take too long.

        Args:
            bound_s: no candidate that this one stands for is faster.
        """
        if self.best is not None and not self.evaluator.has_time_for(candidate, self._budget):
            self._passed_over_s = min(self._passed_over_s, bound_s)
            return
        rivals = [self.by_num_stages.get(candidate.num_stages)]
        if _is_unreplicated(candidate):
            rivals.append(self.unreplicated)
        rivals_s = max(inf if rival is None else rival.step_s for rival in rivals)
        self.take(made_to_fit(self.evaluator, candidate, self.evaluator.evaluate(candidate, rivals_s)))

    def _open(self, frontier: Frontier, prefix: PipelinePrefix) -> None:
        """Puts what may follow ``prefix`` into the queue, complete pipelines to the leaves."""
        self._budget.spend(_OPEN_S)
        expansion = frontier.expand(prefix, self.upper_s)
        complete = expansion.table.last[expansion.row] == frontier.suffixes.prices.cuts.last
        leaves = np.flatnonzero(complete)
        if len(leaves):
            self._leaves.setdefault(frontier, []).append((expansion, leaves))
            self._num_leaves += len(leaves)
            self._least_leaf_s = min(self._least_leaf_s, float(expansion.bound_s[leaves[0]]))
        others = np.flatnonzero(~complete)
        if len(others):
            rest = expansion.only(others)
            self._push(float(rest.bound_s[0]), Siblings(frontier, rest))

    def _look_ahead(self, frontier: Frontier) -> None:
        """Follows the most promising prefixes to complete pipelines, so that a good plan is known early."""
        prefixes = [frontier.root()]
        complete: list[tuple[Expansion, Numbers]] = []
        last = frontier.suffixes.prices.cuts.last
        while prefixes and not self._budget.ends(_OPEN_S * len(prefixes)):
            expansions = [frontier.expand(prefix, self.upper_s) for prefix in prefixes]
            longer: list[tuple[float, Expansion, int]] = []
            for expansion in expansions:
                ends = expansion.table.last[expansion.row] == last
                if ends.any():
                    complete.append((expansion, np.flatnonzero(ends)))
                others = np.flatnonzero(~ends)[:_BEAM]
                longer += [(float(expansion.bound_s[position]), expansion, int(position)) for position in others]
            longer.sort(key=lambda one: one[0])
            prefixes = [expansion.child(position) for _, expansion, position in longer[:_BEAM]]
        for leaf in self._bounded(frontier, _most_promising(complete))[:_PROMISING]:
            if leaf.bound_s < self.upper_s:
                self._simulate(frontier, leaf, leaf.bound_s)

    def _leaves_wait(self) -> bool:
        """Whether it is time to look at complete pipelines: many, or nothing else to do before."""
        if not self._num_leaves:
            return False
        first_s = self._heap[0][0] if self._heap else inf
        return self._num_leaves >= self._enough_leaves or first_s >= self.upper_s

    def _look_at_leaves(self) -> None:
        """Bounds all waiting pipelines more sharply; those that may be better than the best join the queue."""
        waiting = self._leaves
        self._leaves = {}
        self._num_leaves = 0
        self._least_leaf_s = inf
        self._enough_leaves = min(_MANY_LEAVES, 2 * self._enough_leaves)
        for frontier, children in waiting.items():
            self.num_candidates += sum(len(positions) for _, positions in children)
            leaves = self._bounded(frontier, children)
            for leaf in leaves:
                self._push(leaf.bound_s, Simulate(frontier, leaf))
            if leaves:
                self._simulate(frontier, leaves[0], leaves[0].bound_s)  # now, so that a good plan is known early

    def _bounded(self, frontier: Frontier, children: list[tuple[Expansion, Numbers]]) -> list[Leaf]:
        """Complete pipelines under every schedule that may be better than the best, the most promising first."""
        prices = frontier.suffixes.prices
        together = Leaves.of(frontier, children)
        leaves = [
            leaf
            for alike in together
            for schedule in prices.freedom.schedules
            for leaf in alike.under(schedule, prices.num_microbatches, self.upper_s, prices.freedom.schedules)
        ]
        return sorted(leaves, key=lambda leaf: leaf.bound_s)

    def _is_done(self) -> bool:
        if self.any_fit and self.best is not None:
            return True
        return not self._num_leaves and (not self._heap or self._heap[0][0] >= self.upper_s)

    def _push(self, bound_s: float, item: QueueItem, position: int = 0) -> None:
        if bound_s < self.upper_s:
            self._pushed += 1
            heappush(self._heap, (bound_s, self._pushed, item, position))

    def _bound_s(self) -> float:
        """No plan is faster than what is known, or than what waits can still become."""
        best_s = self.best.step_s if self.best is not None else inf
        if self.evaluator.problem.gap:
            best_s /= 1 + self.evaluator.problem.gap  # what was this close was not looked at
        return min(best_s, self._heap[0][0] if self._heap else inf, self._least_leaf_s, self._passed_over_s)

    def _report(self, bound_s: float) -> None:
        """Tells how far it is: when there is a plan for the first time, and every now and then."""
        now_s = self._budget.elapsed_s
        is_first = self.best is not None and not self._has_told
        if self.progress is None or (now_s - self._reported_s < _REPORT_EVERY_S and not is_first):
            return
        self._reported_s = now_s
        self._has_told = self.best is not None
        best_s = inf
        num_stages = 0
        num_devices = 0
        if self.best is not None:
            best_s = self.best.step_s
            num_stages = self.best.candidate.num_stages
            num_devices = len(self.best.candidate.used_ranks)
        gap = best_s / bound_s - 1 if bound_s > 0 else inf
        num_simulated = self.evaluator.num_simulated
        self.progress(SearchProgress(best_s, bound_s, gap, num_simulated, now_s, num_stages, num_devices))


def _is_unreplicated(candidate: Candidate) -> bool:
    """Whether its stages have one rank each."""
    return all(len(group) == 1 for group in candidate.groups)


def _most_promising(children: list[tuple[Expansion, Numbers]]) -> list[tuple[Expansion, Numbers]]:
    """The complete pipelines of least bound, a few of them."""
    bounds = np.sort(
        np.concatenate([expansion.bound_s[positions] for expansion, positions in children] or [np.zeros(0)])
    )
    if len(bounds) <= _FEW:
        return children
    kept = ((expansion, positions[expansion.bound_s[positions] <= bounds[_FEW]]) for expansion, positions in children)
    return [(expansion, positions) for expansion, positions in kept if len(positions)]
