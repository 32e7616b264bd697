"""Pipelines of several stages a position (interleaved, ZB-V, hanayo, greedy, chimera), in the queue of the search.

Given       a schedule; its positions, two or more where there are two devices; a group of devices on each; S stages
Choose      a chain of cuts: stage s, on position r(s), holds what is between two of them
Minimise    the step, by simulation

A ``Family`` is all of them with the same groups and S.  It waits by the bound of ``virtual_bound``.  Of one that is
opened the most promising cuts are simulated, by following a few of its prefixes; then all prefixes, many at once
(``Branch``), so that the search proves the best, or states a true gap.

Groups of devices are those of all pipelines (``device_groups``), in every order that matters, where these are at most
``MANY_SEQUENCES``; else of one size, filled host by host and kind by kind.  All stages compute activations again that
way which is allowed, or none.  ``not_searched`` names what is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, permutations, product
from math import inf, prod

import numpy as np

from planner.costs.candidate import Candidate
from planner.costs.layers.cost_table import Array
from planner.ir.layout import equal_shares
from planner.ir.plan import Rejected
from planner.ir.problem import AUTO
from planner.schedules import positions, traits
from planner.solvers.best_first.device_groups import Counts, DeviceStates, at_pools, first_ranks
from planner.solvers.best_first.graph_cuts import Numbers
from planner.solvers.best_first.like_stages import balanced_places
from planner.solvers.best_first.message_bound import HandoverBounds, handovers_of
from planner.solvers.best_first.priced_groups import GroupPrices, PricedGroup, RunMode
from planner.solvers.best_first.virtual_bound import Tables
from planner.solvers.best_first.virtual_stages import StagePrices
from planner.solvers.candidates.candidate import DevicePool
from planner.solvers.candidates.choose import better
from planner.solvers.candidates.evaluate import Evaluation, Evaluator

WAYS = (1, 2, 3, 4)
"""Stages a position that are tried where the schedule leaves it open."""

MANY_SEQUENCES = 500
"""Sequences of groups up to which all are looked at."""

MANY_SHARES = 64
"""Ways to share samples in the groups of a sequence up to which all are looked at."""

_FEW_KINDS = 3
_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)  # positions, where groups are of one size
_PROMISING = 3  # pipelines of a family that are simulated at first
_FEW = 4  # families of which good pipelines are simulated at a time
_SHARE_OF_WORK = 0.02  # of the budget, for these
_SHARE_TO_WEIGH = 0.05  # of the budget, for the bounds of the families of one size
_SHARE_OF_ONE = 0.1  # of what is left, for the bound of a family that is opened
_SHARE_TO_GUESS = 0.3  # of what is left, for first answers
_GUESS_S = 5e-4  # of work, for each
_FAR = 1.3  # of the best that is known


@dataclass(frozen=True, slots=True, eq=False)
class PipelineFamilies:
    """All pipelines of a schedule, for one way to cut the batch.

    Attributes:
        bound_s: none is faster.
        sequences: of groups, by position.
        waiting: families, the most promising first; None: they were not weighed yet.
    """

    bound_s: float
    stage_prices: StagePrices
    schedule: str
    sequences: Sequence[tuple[Counts, ...]]
    waiting: tuple[Family, ...] | None = None

    def advance(
        self, evaluator: Evaluator, upper_s: float
    ) -> Iterator[PipelineFamilies | Family | Branch | Evaluation]:
        """The same with its families in order; then what a few of them stand for, and the others."""
        if self.waiting is None:
            if upper_s == inf:  # any plan
                simple = (family.simple(evaluator) for family in islice(self.members(), _FEW))
                yield from islice((evaluation for evaluation in simple if evaluation is not None), 1)
            yield from self._in_order(self._weighed(evaluator, upper_s))
            return
        budget = evaluator.budget
        number = 0
        ends_at_s = budget.work_s + _SHARE_OF_WORK * budget.limit_s
        while number < len(self.waiting) and (number < _FEW or budget.work_s < ends_at_s):
            family = self.waiting[number]
            number = number + 1
            for after in family.advance(evaluator, upper_s) if family.bound_s < upper_s else ():
                upper_s = min(upper_s, after.step_s) if isinstance(after, Evaluation) else upper_s
                yield after
        yield from self._in_order(self.waiting[number:])

    def _in_order(self, waiting: Sequence[Family]) -> Iterator[PipelineFamilies]:
        """These, if there are any."""
        if waiting:
            yield replace(self, bound_s=min(family.bound_s for family in waiting), waiting=tuple(waiting))

    def _weighed(self, evaluator: Evaluator, upper_s: float) -> list[Family]:
        """Those that may be faster than ``upper_s``: by sharper bounds, then those that there was no time for."""
        budget = evaluator.budget
        weighed = list[Family]()
        others = list[Family]()
        within = budget.part(_SHARE_TO_WEIGH * budget.limit_s)
        for family in sorted(self.members(), key=lambda family: family.bound_s):
            if family.bound_s >= upper_s:
                break
            if within.is_over:
                others.append(family)
                continue
            tables = family.tables(upper_s, in_full=False, most_s=within.left_s)
            budget.spend(tables.work_s)
            if tables.bound_s < upper_s:
                weighed.append(replace(family, bound_s=max(family.bound_s, tables.bound_s)))
        return [*sorted(weighed, key=lambda family: family.bound_s), *others]

    def members(self) -> Iterator[Family]:
        """One for every sequence of groups and number of stages."""
        prices = self.stage_prices.prices
        limit = prices.freedom.max_stages
        fixed = traits(self.schedule).stages_per_position
        most = min(prices.cuts.last, limit or prices.cuts.last)
        work_s = self.bound_s * len(prices.problem.ranks)
        for counts in self.sequences:
            for ways in (fixed,) if fixed else WAYS:
                where = positions(self.schedule, len(counts), ways)
                if len(where) <= most:
                    for groups in self._versions(counts):
                        yield Family(work_s / sum(map(sum, counts)), self.stage_prices, self.schedule, groups, where)

    def _versions(self, counts: Sequence[Counts]) -> Iterator[tuple[PricedGroup, ...]]:
        """The groups of all positions, which compute the same activations again; none if one cannot be priced."""
        prices = self.stage_prices.prices
        for recompute in prices.freedom.recompute:
            by_position = [
                [group for group in prices.versions(own) if group.version.mode == RunMode(recompute)] for own in counts
            ]
            if self.stage_prices.mirrored:
                yield from product(*(_halves(prices, groups) for groups in by_position))
            elif prod(map(len, by_position)) <= MANY_SHARES:
                yield from product(*by_position)
            else:  # those whose members are done at nearly the same time
                ends = np.array(0), np.array(-1)
                yield tuple(min(own, key=lambda g: float(g.prices.all_works.most(*ends))) for own in by_position)


def _halves(prices: GroupPrices, groups: Sequence[PricedGroup]) -> Iterator[PricedGroup]:
    """A pair of ranks that have one half of the samples each, in both orders if these are not alike."""
    halves = equal_shares(prices.micro_batches[0], 2)
    for group in groups:
        orders = tuple(dict.fromkeys((group.orders[0], group.orders[0][::-1])))
        if group.shares == halves:
            for own in orders:
                yield replace(group, orders=tuple(dict.fromkeys((own, *orders))), orders_known=True)


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """All pipelines of a schedule with a given group of devices on each position, and number of stages.

    Attributes:
        bound_s: none is faster.
        where: the position of each stage.
    """

    bound_s: float
    stage_prices: StagePrices
    schedule: str
    groups: tuple[PricedGroup, ...]
    where: tuple[int, ...]

    def tables(self, upper_s: float, in_full: bool = True, most_s: float = inf) -> Tables:
        """What its pipelines cost at least (:meth:`Tables.bounded`)."""
        return Tables.of(self.stage_prices, self.groups, self.where, self.schedule).bounded(upper_s, in_full, most_s)

    def advance(self, evaluator: Evaluator, upper_s: float) -> Iterator[Evaluation | Branch]:
        """The best of a few promising pipelines, and what stands for all."""
        tables = self.tables(upper_s, most_s=_SHARE_OF_ONE * evaluator.budget.left_s)
        if tables.bound_s < upper_s:
            best = self._good(evaluator, tables, upper_s)
            if best is not None:
                yield best
            yield Branch(self, tables, np.zeros((1, 1), dtype=np.int64), np.array([tables.bound_s]))
        evaluator.budget.spend(tables.work_s)

    def candidate(self, cuts: Sequence[int]) -> Candidate:
        """The pipeline with these cuts, on the first free ranks of each pool."""
        prices = self.stage_prices.prices
        count = len(self.where)
        used = Counter[int]()
        ranks = [first_ranks(prices.pools, group.orders[0], used) for group in self.groups]
        mirrored = self.stage_prices.mirrored
        recompute_of_all = self.groups[0].recompute
        return Candidate(
            prices.cuts.stage_of(tuple(cuts)),
            tuple(ranks[r][::-1] if mirrored and 2 * s >= count else ranks[r] for s, r in enumerate(self.where)),
            tuple(self.groups[r].shares for r in self.where),
            prices.micro_batches,
            self.schedule,
            recompute=(recompute_of_all,) * count if recompute_of_all else (),
        )

    def leanest(self) -> tuple[float, list[int] | None]:
        """Cuts so that the fullest stage is least full, and that stage's share of its limit, all positions' alike."""
        every = np.arange(self.stage_prices.prices.cuts.last + 1)
        ways = len(self.where) / len(self.groups)
        fullness = [group.fullness(every[:, None], every[None, :], 1) for group in self.groups]
        cuts = balanced_places([fullness[r] for r in self.where])
        if cuts is None:
            return inf, None
        return ways * max(float(fullness[r][cuts[s], cuts[s + 1]]) for s, r in enumerate(self.where)), cuts

    def guess_s(self, evaluator: Evaluator) -> float:
        """What a simple one takes, about."""
        tables = Tables.of(self.stage_prices, self.groups, self.where, self.schedule)
        guess_s = tables.balanced_s()
        evaluator.budget.spend(_GUESS_S + tables.work_s)
        return guess_s

    def simple(self, evaluator: Evaluator) -> Evaluation | None:
        """The balanced pipeline, or the leanest if that does not fit."""
        cuts = balanced_places([self.stage_prices.spans(self.groups[r]).whole for r in self.where])
        return self._simulated(evaluator, cuts) or (self._simulated(evaluator, self.leanest()[1]) if cuts else None)

    def _good(self, evaluator: Evaluator, tables: Tables, upper_s: float) -> Evaluation | None:
        """The best of a few that are promising; if none of them fits, a simple one."""
        best: Evaluation | None = None
        for cuts in tables.promising(upper_s)[:_PROMISING]:
            tried = self._simulated(evaluator, cuts.tolist(), inf if best is None else best.step_s)
            best = tried if best is None or (tried is not None and better(best, tried) is tried) else best
        return best or self.simple(evaluator)

    def _simulated(self, evaluator: Evaluator, cuts: Sequence[int] | None, known_s: float = inf) -> Evaluation | None:
        """The pipeline, simulated; None if it does not fit, cannot be priced, or there is no time."""
        candidate = self.candidate(cuts) if cuts is not None else None
        if candidate is None or evaluator.unmet(candidate) or not evaluator.has_time_for(candidate):
            return None
        simulated = evaluator.tried(candidate, known_s)
        return simulated if simulated is not None and simulated.fits else None


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """Pipelines of a family by their first stages, equally many.

    Attributes:
        cuts: of these stages, (prefix, cut); the most promising first.
        bounds: none that begins so is faster.
    """

    family: Family
    tables: Tables
    cuts: Numbers
    bounds: Array

    @property
    def bound_s(self) -> float:
        """None of them is faster."""
        return float(self.bounds[0])

    def advance(self, evaluator: Evaluator, upper_s: float) -> Iterator[Branch | Candidate]:
        """The first ones with their next stages, or the first as a whole pipeline; and the others."""
        is_complete = self.cuts.shape[1] > len(self.family.where)
        count = 1 if is_complete else self.tables.many
        if len(self.bounds) > count:
            yield replace(self, cuts=self.cuts[count:], bounds=self.bounds[count:])
        if is_complete:
            candidate = self.family.candidate(self.cuts[0].tolist())
            if not evaluator.unmet(candidate):
                yield candidate
            return
        before_s = self.tables.work_s
        cuts, bounds = self.tables.grown(self.cuts[:count], upper_s)
        evaluator.budget.spend(self.tables.work_s - before_s)
        if len(bounds):
            yield replace(self, cuts=cuts, bounds=bounds)


def good_pipelines(every: Sequence[PipelineFamilies], evaluator: Evaluator, upper_s: float) -> Iterator[Evaluation]:
    """Good pipelines on groups of one size that use the most devices, of the families of which a simple one is fast."""
    uniform = [
        replace(families, sequences=[own for own in families.sequences if len(set(map(sum, own))) == 1])
        for families in every
    ]
    members = [
        family for families in uniform for family in families.members() if len(family.where) > len(family.groups)
    ]
    most = max((sum(group.size for group in family.groups) for family in members), default=0)
    widest = [family for family in members if sum(group.size for group in family.groups) == most]
    within = evaluator.budget.part(_SHARE_TO_GUESS * evaluator.budget.left_s)
    guesses = [
        (family.guess_s(evaluator), number)
        for number, family in enumerate(widest)
        if family.bound_s < upper_s and not within.is_over
    ]
    for guess_s, number in sorted(guesses)[:_FEW]:
        for after in widest[number].advance(evaluator, upper_s) if guess_s < _FAR * upper_s else ():
            if isinstance(after, Evaluation):
                upper_s = min(upper_s, after.step_s)
                yield after


VirtualItem = PipelineFamilies | Family | Branch
"""What waits in the queue of the search."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """Groups of devices by position, in each order that matters; and whether some were left out."""

    groups: list[tuple[Counts, ...]]
    is_restricted: bool


def families(every: Iterable[GroupPrices], devices: DeviceStates, names: Sequence[str]) -> Iterator[PipelineFamilies]:
    """All that are searched of schedules for several stages a position, for each way to cut the batch."""
    formed: dict[bool, Sequences] = {}
    for prices in sorted(every, key=lambda prices: prices.num_microbatches):  # short programs first
        for mirrored in sorted({traits(name).bidirectional for name in names}.difference(formed)):
            formed[mirrored] = sequences(devices, mirrored, prices.freedom.max_stages)
        work_s = float(prices.capacity_s().min(axis=0).sum())
        bound_s = work_s / len(prices.problem.ranks) if np.isfinite(work_s) else 0.0
        for mirrored, own in formed.items():
            links = HandoverBounds(prices) if mirrored else handovers_of(prices)  # pairs of ranks come in both orders
            stage_prices = StagePrices(prices, links, mirrored)
            for name in names:
                if traits(name).bidirectional is mirrored:
                    yield PipelineFamilies(bound_s, stage_prices, name, own.groups)


def not_searched(devices: DeviceStates, names: Sequence[str], recompute: str) -> Iterator[Rejected]:
    """What lies outside of these, and why."""
    for name in names:
        own_traits = traits(name)
        if not own_traits.stages_per_position:
            yield Rejected(f"{name}: more than {WAYS[-1]} stages a device", "each stage more costs messages")
        if sequences(devices, own_traits.bidirectional).is_restricted:
            why = f"more than {MANY_SEQUENCES} ways to form them; groups of one size are tried, filled host by host"
            yield Rejected(f"{name}: unequal groups of devices", why)
        if len({pool.kind for pool in devices.pools}) > 1 and devices.groups_allowed and not own_traits.bidirectional:
            why = f"where groups can share samples in more than {MANY_SHARES} ways, each takes the fastest"
            yield Rejected(f"{name}: some shares of unlike devices", why)
        if own_traits.windowed:
            yield Rejected(f"{name}: other windows than its own", "it works them out for each stage")
        if recompute == AUTO:
            yield Rejected(f"{name}: recomputation of some stages", "all stages compute activations again, or none")


def sequences(devices: DeviceStates, mirrored: bool, max_stages: int = 0) -> Sequences:
    """The groups of a search, by position; two positions at least, where there are two devices.

    Args:
        mirrored: a position is two devices.
        max_stages: if only one stage is asked for, one position will do.
    """
    fewest = 1 if mirrored or max_stages == 1 or sum(len(pool.ranks) for pool in devices.pools) == 1 else 2
    state = devices.all_unused
    _, names = devices.canonical(tuple(len(pool.ranks) for pool in devices.pools))
    every = _every(devices, mirrored, state, names)
    groups = list(islice((each for each in every if len(each) >= fewest), MANY_SEQUENCES + 1))
    if len(groups) <= MANY_SEQUENCES and devices.unit == 1:
        return Sequences(groups, False)
    return Sequences([each for each in _uniform(devices, mirrored) if len(each) >= fewest], True)


def _every(devices: DeviceStates, mirrored: bool, state: Counts, names: Counts) -> Iterator[tuple[Counts, ...]]:
    """Every sequence from ``state`` on, whose pools are called ``names``."""
    for option in devices.options(state):
        if mirrored and sum(option.group) != 2:
            continue
        group = at_pools(option.group, names, len(names))
        yield (group,)
        renamed = tuple(names[place] for place in option.order)
        for others in _every(devices, mirrored, option.left, renamed):
            yield (group, *others)


def _uniform(devices: DeviceStates, mirrored: bool) -> Iterator[tuple[Counts, ...]]:
    """Groups of one size, host by host and kind by kind: for every size, order of kinds and number of positions."""
    pools = devices.pools
    kinds = list(dict.fromkeys(pool.kind for pool in pools))
    largest = max(len(pool.ranks) for pool in pools)
    hosts = sum(len(pool.ranks) == largest for pool in pools)
    inside = [size for size in range(1, largest + 1) if largest % size == 0]
    sizes = [2] if mirrored else [*inside, *(largest * number for number in range(2, hosts // 2 + 1))]
    orders = list(permutations(kinds)) if len(kinds) <= _FEW_KINDS else [tuple(kinds)]
    distinct: dict[tuple[Counts, ...], None] = {}
    for size in sizes if devices.groups_allowed else [1]:
        for order in orders:
            groups = [group for kind in order for group in _filled(pools, kind, size)]
            counts = {len(groups), *(count for count in _COUNTS if count < len(groups))}
            distinct.update(dict.fromkeys(tuple(groups[:count]) for count in sorted(counts)))
    yield from distinct


def _filled(pools: Sequence[DevicePool], kind: str, size: int) -> Iterator[Counts]:
    """Groups of ``size`` devices of a kind: of one host where they fit, else of several, whole but for the last."""
    counts = [0] * len(pools)
    filled = 0
    for number, pool in enumerate(pools):
        left = len(pool.ranks) if pool.kind == kind else 0
        while left and (size > len(pool.ranks) or left + filled >= size):
            count = min(left, size - filled)
            counts[number] += count
            left = left - count
            filled = filled + count
            if filled == size:
                yield tuple(counts)
                counts = [0] * len(pools)
                filled = 0
