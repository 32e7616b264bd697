"""The search beyond samples: stages whose layers are cut along space and channels as well.

What the search over samples found goes on in two ways.  The stages of its best pipelines get the best layouts of their
layers (``layouts.stage``, exact for a stage alone).  And pipelines of stretches of layers are built by the least that
stages take under any layouts (``layout_bound``, ``layout_chains``), the one of least bound first, given the layouts of
least time, and simulated; those that do not fit get layouts for the memory there is.  Where there are several pools
pipelines on one host, one stage on all ranks and plans for fewer devices (2, 4, ... hosts, or any number of few) come
before, from the tables of all, so that more are not worse.

Tables are rough at first (``TableMaker.rough``), and a group's options are priced when a pipeline that may be better
has it.  Where the search over samples has shown that its plans are no better, pipelines of these alone are passed over:
what the tables say of them is less than it knows.

The searched space is that of samples, and beside it: stages of stretches of the graph's order, each on ranks of one
pool, or all layers on all ranks; every option of each layer; every schedule with windows of its own.  The bound of the
step is the least of

    the bound of the search over samples
    for each size of the micro-batch: work over capacity (no cut makes a sample of a layer cheaper than the cheapest
    measured), and what is open of the chains, among them those simulated whose bound is below the best step

so that a plan is proven only where its step meets it: one stage on alike ranks does, several stages rarely.

How stages become plans is in ``layout_plans``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf

from planner.ir.cluster import RankIds
from planner.ir.lazy import once_by
from planner.ir.plan import ANY_SETS_LAID_OUT, PROVEN, STOPPED, TIME_LIMIT, Rejected, status_of
from planner.ir.problem import CHANNEL_DIMS, SAMPLE_DIMS, SPATIAL_DIMS, Problem
from planner.layers import over_sites
from planner.solvers.best_first.capacity import least_work_s
from planner.solvers.best_first.continued import HALO_ROWS, continued_searches
from planner.solvers.best_first.graph_cuts import GraphCuts
from planner.solvers.best_first.layer_links import links_of
from planner.solvers.best_first.layout_bound import GroupTable, TableMaker
from planner.solvers.best_first.layout_chains import Chains, LayoutChain
from planner.solvers.best_first.layout_plans import LayoutPlans
from planner.solvers.best_first.search import Outcome
from planner.solvers.budget import Budget, OutOfTimeError
from planner.solvers.candidates.candidate import DevicePool, ends_of_hosts, pools
from planner.solvers.candidates.choose import ROUNDING, better
from planner.solvers.candidates.constraints import Constraints
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.candidates.feasibility import cut_positions, micro_batch_sizes, uncut

_SHARE_OF_TABLES = 0.25
_MOST_OF_TABLES = 0.6
"""Of the budget, for the options of all layers on one group of ranks: at first, and of what is left at last."""

_SHARE_OF_FEWER = 0.25
_SHARE_OF_REFINED = 0.5
"""Of what is left, for some of the hosts, and for layouts of what the search over samples found."""

_SHARE_OF_ONE_STAGE = 0.4
"""Of what is left where there are several pools."""

MOST_COUNTS = 16
"""Devices up to which every smaller number is looked at, so that more are not worse."""

MOST_CHAINS = 60
MOST_OF_FEWER = 4
"""Pipelines that are simulated for one size of the micro-batch; and where they may use a part of the hosts alone."""

_FAR = inf


def beyond_samples(problem: Problem) -> bool:
    """Whether layers may be cut along more than samples; those of a network over sites are not."""
    asked = len(problem.ranks) > 1 and any(family != SAMPLE_DIMS for family in problem.allow)
    return asked and not over_sites(problem.graph)


def with_layouts(evaluator: Evaluator, outcome: Outcome, within: Budget) -> Outcome:
    """``outcome`` of the search over samples, continued over layouts; as it is where samples alone may be cut."""
    if not beyond_samples(evaluator.problem):
        return outcome
    return _LayoutSearch(evaluator, outcome, within).run()


def left_out(problem: Problem, cuts: GraphCuts | None = None) -> tuple[Rejected, ...]:
    """What the search over layouts does not look at; nothing where samples alone may be cut.

    Args:
        cuts: where stages over samples may begin and end, as far as that is known.
    """
    if not beyond_samples(problem):
        return ()
    rejected = []
    lays_out = not {SPATIAL_DIMS, CHANNEL_DIMS}.isdisjoint(problem.allow)
    if lays_out and problem.max_stages != 1 and cuts is not None and not cuts.are_in_order:
        rejected.append(Rejected(ANY_SETS_LAID_OUT, "they are stretches of its own order of layers"))
    is_covered = any(HALO_ROWS in search.covers for search in continued_searches(problem))
    if SPATIAL_DIMS in problem.allow and not problem.halo_depth and not is_covered:
        rejected.append(Rejected(HALO_ROWS, "not asked for (--halo-depth)"))
    graph = problem.graph
    rejected += uncut(graph.tied_layers(), graph, "where layers are cut along more than samples: they share parameters")
    if len(pools(problem)) > 1:
        why = "all ranks together are looked at, else groups within a host and kind"
        rejected.append(Rejected("layers cut along space or channels over ranks of several pools", why))
    return tuple(rejected)


@dataclass(eq=False)
class _LayoutSearch:
    """The search's state.

    Attributes:
        is_cut_short, is_restricted: whether anything was left out for want of time; of it, layouts of layers.
    """

    evaluator: Evaluator
    outcome: Outcome
    budget: Budget
    plans: LayoutPlans = field(init=False)
    best: Evaluation | None = field(init=False)
    by_num_stages: dict[int, Evaluation] = field(init=False)
    num_candidates: int = field(init=False, default=0)
    is_cut_short: bool = field(init=False, default=False)
    is_restricted: bool = field(init=False, default=False)
    _sorts: tuple[tuple[DevicePool, ...], ...] = field(init=False)  # pools, those together that are alike

    def __post_init__(self) -> None:
        work_s = _SHARE_OF_TABLES * self.budget.left_s
        self.plans = LayoutPlans(self.evaluator, Constraints.of(self.evaluator.problem), self.budget, work_s)
        self.best = self.outcome.best
        self.by_num_stages = dict(self.outcome.by_num_stages)
        alike: dict[object, list[DevicePool]] = {}
        for pool in pools(self.evaluator.problem, self.plans.constraints):
            alike.setdefault(pool.shape, []).append(pool)
        self._sorts = tuple(map(tuple, alike.values()))

    def run(self) -> Outcome:
        """Everything in turn; Ctrl-C ends it with the best so far."""
        problem = self.evaluator.problem
        works = {
            size: float(least_work_s(self.evaluator, size, self.plans.backward).sum()) / len(problem.ranks)
            for size in micro_batch_sizes(problem, self.evaluator.cost_model)
        }
        bounds = dict(works)
        stopped = False
        try:
            whole = dict.fromkeys(works, _FAR)
            has_pools = sum(map(len, self._sorts)) > 1
            if has_pools:
                self._look_at_a_host(works)
                whole = self._look_at_one_stage(problem.ranks, works)
                for size, work_s in sorted(works.items(), key=lambda item: item[1]):
                    bounds[size] = max(work_s, min(whole[size], self._least_of_chains(size, work_s)))
                self._look_at_hosts(works)
            self._refine()
            for size, work_s in sorted(works.items(), key=lambda item: item[1]):
                is_last = not any(work_s < other_s < self.upper_s for other_s in works.values())
                own = self.budget.part(self.budget.left_s / (1 if is_last else 2))
                bounds[size] = max(bounds[size], min(whole[size], self._bound_of_size(size, work_s, own)))
                self.evaluator.layouts.forget_options()
            if self.is_cut_short and not has_pools:
                self._look_at_a_host(works)
            self._refine_further()
        except KeyboardInterrupt:
            if self.best is None:
                raise
            stopped = True
        return self._outcome(min([self.outcome.bound_s, *bounds.values()]), stopped)

    @property
    def upper_s(self) -> float:
        """Plans from here on are of no interest."""
        return self._wanted_s * (1 - ROUNDING)

    @property
    def _wanted_s(self) -> float:
        return inf if self.best is None else self.best.step_s / (1 + self.evaluator.problem.gap)

    @property
    def _asks_for_samples(self) -> bool:
        """Whether a plan whose layers are all cut along samples alone may be of interest still."""
        return self.outcome.bound_s < self.upper_s

    def _look_at_a_host(self, works: Mapping[int, float]) -> None:
        """Plans for the first host, as if there were no others: they are plans for all.

        And for 4, 2 and 1 of its ranks, if not all of its pipelines could be looked at, which are theirs too.
        """
        num_ranks = len(self.evaluator.problem.ranks)
        for count in reversed(_doubled((*ends_of_hosts(self.evaluator.problem), num_ranks)[0])):
            if count < num_ranks and self._look_at_first(count, works, MOST_CHAINS):
                return

    def _look_at_hosts(self, works: Mapping[int, float]) -> None:
        """Plans for the first 2, 4, ... hosts, as if there were no others; of few devices for any more than a host."""
        ranks = self.evaluator.problem.ranks
        ends = (*ends_of_hosts(self.evaluator.problem), len(ranks))
        counts: Iterable[int] = (ends[number - 1] for number in _doubled(len(ends))[1:-1])
        if len(ranks) <= MOST_COUNTS:
            counts = range(ends[0] + 1, len(ranks))
        flags = self.is_cut_short, self.is_restricted
        for count in counts:
            self._look_at_one_stage(ranks[:count], {size: s * len(ranks) / count for size, s in works.items()})
            self._look_at_first(count, works, MOST_OF_FEWER)
        self.is_cut_short, self.is_restricted = flags  # no bound is about a part of the devices

    def _look_at_first(self, count: int, works: Mapping[int, float], most: int) -> bool:
        """Simulates pipelines on the first ``count`` ranks, ``most`` of a size; whether all that may be better were."""
        ranks = self.evaluator.problem.ranks
        free = tuple(sum(len({*pool.ranks} & {*ranks[:count]}) for pool in like) for like in self._sorts)
        within = self.budget.part(_SHARE_OF_FEWER * self.budget.left_s)
        flags = self.is_cut_short, self.is_restricted
        self.is_cut_short = False
        for size, work_s in sorted(works.items(), key=lambda item: item[1]):
            if work_s * len(ranks) / count < self.upper_s:
                try:
                    self._look_at(self._maker(size, within), free, most)
                except OutOfTimeError:
                    self.is_cut_short = True
                self.evaluator.layouts.forget_options()
        is_whole = not self.is_cut_short
        self.is_cut_short, self.is_restricted = flags  # no bound is about a part of the devices
        return is_whole

    def _refine(self) -> None:
        """The best pipelines of the search over samples, with the best layouts of their stages."""
        incumbents = [
            incumbent
            for incumbent in (self.outcome.best, *self.outcome.by_num_stages.values())
            if incumbent is not None
        ]
        plans = replace(self.plans, budget=self.budget.part(_SHARE_OF_REFINED * self.budget.left_s))
        for candidate in dict.fromkeys(incumbent.candidate for incumbent in incumbents):
            if self._is_late() or plans.budget.is_over:
                return
            self._take(plans.refined(candidate))

    def _refine_further(self) -> None:
        """The best pipeline with the best layouts again, among more of them where some were left out."""
        work_s = _MOST_OF_TABLES * self.budget.left_s
        if self.is_restricted and self.best is not None and work_s > self.plans.options_work_s:
            self.plans = replace(self.plans, options_work_s=work_s)
            self._take(self.plans.refined(self.best.candidate))

    def _maker(self, size: int, within: Budget) -> TableMaker:
        return TableMaker(
            self.evaluator, self.plans.constraints, size, self.plans.backward, within, self.plans.options_work_s
        )

    def _look_at_one_stage(self, ranks: RankIds, works: Mapping[int, float]) -> dict[int, float]:
        """One stage on all of ``ranks``, by size of the micro-batch: what it takes at least."""
        within = self.budget.part(_SHARE_OF_ONE_STAGE * self.budget.left_s)
        bounds = {}
        for size, work_s in sorted(works.items(), key=lambda item: item[1]):
            maker = self._maker(size, within)
            bounds[size] = work_s + maker.least_statistics_s(ranks)
            if bounds[size] < self.upper_s and not within.is_over:
                with suppress(OutOfTimeError):
                    bounds[size] = max(bounds[size], self._one_stage(maker, ranks))
                self.evaluator.layouts.forget_options()
        return bounds

    def _one_stage(self, maker: TableMaker, ranks: RankIds) -> float:
        """Looks at one stage on all of ``ranks``: the least that it takes.

        Raises:
            OutOfTimeError: time is up before it is known.
        """
        last = len(self.evaluator.problem.graph.layers)
        table = maker.table(ranks, of_stretches=False)
        if table is None:
            return _FAR
        least_s = table.laid_out_s[0]
        laid_out = frozenset({0})
        if self._asks_for_samples:
            least_s = table.step_s
            laid_out = frozenset[int]()
        chain = LayoutChain(float(least_s[0, last]), ((0, last, ranks, table),), laid_out)
        if chain.bound_s < self.upper_s:
            self._simulate(maker.size, chain)
        return self._unless_restricted(chain.bound_s, [table])

    def _least_of_chains(self, size: int, work_s: float) -> float:
        """No chain of one size of the micro-batch is faster; ``work_s`` where there is no time to know."""
        if work_s >= self.upper_s:
            return work_s
        with suppress(OutOfTimeError):
            maker = self._maker(size, self.budget)
            chains = self._chains(maker)
            chains.budget = maker.budget
            work_s = max(work_s, self._bound_of(chains))
            if work_s < min(self.upper_s, self.outcome.bound_s):  # else the bound of all is no higher with more
                chains.replace({each: self._table(maker, *each) for each in chains.tables})
                work_s = max(work_s, self._bound_of(chains))
        self.evaluator.layouts.forget_options()
        return work_s

    def _bound_of(self, chains: Chains) -> float:
        return min(self._unless_restricted(chains.bound_s(), chains.tables.values()), self._wanted_s)

    def _bound_of_size(self, size: int, work_s: float, within: Budget) -> float:
        """Looks at the chains of one size of the micro-batch: none is faster than what is returned."""
        if work_s >= self.upper_s or self._is_late():
            return work_s
        try:
            return min(self._look_at(self._maker(size, within)), self._wanted_s)
        except OutOfTimeError:
            self.is_cut_short = True
            return work_s

    def _unless_restricted(self, bound_s: float, tables: Iterable[GroupTable | None]) -> float:
        """0 where layers have options that were not looked at."""
        if any(table is not None and table.is_restricted for table in tables):
            self.is_restricted = self.is_cut_short = True
            return 0.0
        return bound_s

    @once_by(lambda _, maker, sort, count: (maker.size, sort, count))
    def _table(self, maker: TableMaker, sort: int, count: int) -> GroupTable | None:
        """The table of ``count`` ranks of a sort of pool, made once.

        Raises:
            OutOfTimeError: time is up before it is known.
        """
        maker.budget.require()
        return maker.table(self._sorts[sort][0].ranks[:count])

    @once_by(lambda _, maker: maker.size)
    def _chains(self, maker: TableMaker) -> Chains:
        """The pipelines of one size of the micro-batch, made once; by rough tables, until others take their place."""
        tables: dict[tuple[int, int], GroupTable | None] = {
            (sort, count): maker.rough(like[0].ranks[:count])
            for sort, like in enumerate(self._sorts)
            for count in range(1, len(like[0].ranks) + 1)
        }
        links = links_of(self.evaluator.problem, maker.size, self.plans.backward)
        rules = maker.num_full, self.evaluator.problem.max_stages, maker.budget
        return Chains(self._sorts, tables, self._positions, links, *rules)

    @property
    def _positions(self) -> tuple[int, ...]:
        return cut_positions(self.evaluator.problem.graph, parts_ties=False)

    def _look_at(self, maker: TableMaker, free: tuple[int, ...] = (), most: int = MOST_CHAINS) -> float:
        """Simulates chains by their bounds: what those that are open or could have been better take at least.

        Args:
            free: the devices that may be used, by sort of pool; by default every one.
            most: chains that are simulated.
        """
        chains = self._chains(maker)
        chains.budget = maker.budget
        next_s = chains.bound_s(free)
        opened: dict[object, float] = {}  # those that are simulated, and what they take at least
        try:
            open_chains = chains.best_first(self._upper_in_time, free, self._asks_for_samples)
            while (chain := next(open_chains, None)) is not None:
                next_s = chain.bound_s
                rough = {
                    table.step_s[first, stop]: (sort, count)
                    for first, stop, sort, count in chain.folded
                    if (table := chains.tables[sort, count]) is not None and table.is_rough
                }
                if rough:  # the one whose stage takes longest first
                    group = rough[max(rough)]
                    chains.replace({group: self._table(maker, *group)})
                    open_chains = chains.best_first(self._upper_in_time, free, self._asks_for_samples)
                    continue
                shape = chain.folded, chain.laid_out
                is_new = shape not in opened
                opened[shape] = max(chain.bound_s, opened.get(shape, 0.0))
                if len(opened) > most:
                    self.is_cut_short = True
                    break
                if is_new:
                    self._simulate(maker.size, chain)
        except OutOfTimeError:
            self.is_cut_short = True
            opened[None] = next_s
        return self._unless_restricted(min(opened.values(), default=_FAR), chains.tables.values())

    def _upper_in_time(self) -> float:
        """As ``upper_s``; raises OutOfTimeError once time is up, so that a long enumeration ends."""
        if self._is_late():
            raise OutOfTimeError
        return self.upper_s

    def _simulate(self, size: int, chain: LayoutChain) -> None:
        self.num_candidates += 1
        for evaluation in self.plans.of_chain(size, chain) if chain.stages else ():
            self._take(evaluation)

    def _take(self, evaluation: Evaluation | None) -> None:
        if evaluation is not None and evaluation.fits:
            self.best = better(self.best, evaluation)
            stages = evaluation.candidate.num_stages
            self.by_num_stages[stages] = better(self.by_num_stages.get(stages), evaluation)

    def _is_late(self) -> bool:
        late = self.budget.is_over
        self.is_cut_short = self.is_cut_short or late
        return late

    def _outcome(self, bound_s: float, stopped: bool) -> Outcome:
        outcome = replace(
            self.outcome,
            best=self.best,
            bound_s=bound_s,
            num_candidates=self.outcome.num_candidates + self.num_candidates,
            by_num_stages=self.by_num_stages,
        )
        if self.is_restricted:
            why = "there are too many for the time and the memory of this search; those of few axes were"
            outcome = replace(outcome, rejected=(Rejected("some layouts of layers", why),))
        if stopped or self.outcome.status == STOPPED:
            return replace(outcome, status=STOPPED)
        if self.best is None:
            return replace(outcome, status=TIME_LIMIT if self.is_cut_short else PROVEN)
        ended = TIME_LIMIT if self.is_cut_short else self.outcome.status
        return replace(outcome, status=status_of(ended, self.best.step_s, bound_s, self.evaluator.problem.gap))


def _doubled(most: int) -> list[int]:
    """1, 2, 4, ... and ``most``."""
    return sorted({*(1 << power for power in range(most.bit_length())), most})
