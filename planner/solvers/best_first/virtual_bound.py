"""What pipelines of several stages a position take at least, by their cuts: shortest paths through the stages.

w_s is all that stage s does on its position r(s), f_s, b_s its shortest F and B (or I), c_s a message there or back
behind it, i(r) the first stage of position r.  Position r begins after the F of the stages before i(r), and its last B
goes back through them.  So, with D_r the sum over the stages before i(r),

    step >= D_r (f + c) + sum over the stages of r of (w + update)
    step >= D_r (f + b + 2 c) + sum over the stages of r of (w without W, which may come later)

for each r, hence for every mean of them with weights l_r.  A mean is a sum over stages, so the least over all cuts is a
shortest path: tables V[s][c], from stage s at cut c to the end.  Weights begin in proportion to speed and move towards
positions that the shortest path loads more (Lagrangian relaxation of the least largest load).  Third, one micro-batch
goes there and back through all stages.  Where a stage need not read from the one before, D is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from planner.costs.layers.cost_table import Array
from planner.costs.memory.memory_bound import LeastMemory
from planner.costs.stages.stage_bound import Spread
from planner.solvers.best_first.graph_cuts import Flags, Numbers
from planner.solvers.best_first.message_bound import HandoverBounds
from planner.solvers.best_first.priced_groups import GroupPrices, PricedGroup

_KEPT = 24  # groups whose stages are kept
_STEPS = 3  # of the weights of positions
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class GroupSpans:
    """Stages of a group, by first and last cut, in seconds; infinite where there is none.

    Attributes:
        whole: all that a rank does of it in a step.
        paths: the same without W, which may come later, and update.
        head, back: the shortest F, and the shortest B or I.
        resident: bytes that members hold of it throughout, by member; None where memory cannot matter.
        total_s: the whole network as one stage, whether it fits or not.
    """

    whole: Array
    paths: Array
    head: Array
    back: Array
    resident: Array | None
    total_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Mean:
    """A mean of the bounds of positions, or one micro-batch there and back: a sum over stages.

    Attributes:
        own: by stage, how much its work counts; ahead: how much the way through it does.
        returns: whether the way back counts, and not what may come later.
        table: by stage, what it and those behind cost at least, by the cut where it begins; at last, 0 at the end.
    """

    own: tuple[float, ...]
    ahead: tuple[float, ...]
    returns: bool
    table: tuple[Array, ...]

    @property
    def bound_s(self) -> float:
        """The least of all stages."""
        return float(self.table[0][0])


@dataclass(frozen=True, slots=True, eq=False)
class First:
    """The first stages of a pipeline.

    Attributes:
        means: what they cost, by mean.
        there, back: the shortest way through them, with messages.
        wholes, paths: by position, when it may end, and when the last B has returned, as far as it is known.
        held: by position, bytes of each member.
    """

    cuts: tuple[int, ...]
    means: tuple[float, ...]
    there: float
    back: float
    wholes: tuple[float, ...]
    paths: tuple[float, ...]
    held: tuple[Array, ...]


@dataclass(slots=True, eq=False)
class Tables:
    """What pipelines cost at least that have the same groups of devices on their positions.

    Attributes:
        where: the position of each stage.
        spans: by stage; ``messages``: behind each but the last, by cut, there and back.
        begins: by position, its first stage; ``limits``: bytes of each member.
        is_linked: see :class:`StagePrices`.
    """

    where: tuple[int, ...]
    spans: tuple[GroupSpans, ...]
    messages: tuple[tuple[Array, Array], ...]
    begins: tuple[int, ...]
    limits: tuple[Array, ...]
    is_linked: bool
    means: tuple[Mean, ...] = ()

    @property
    def num_numbers(self) -> int:
        """Of all tables that were made."""
        return len(self.where) * self.spans[0].whole.size * (_STEPS + len(self.means))

    @classmethod
    def of(cls, prices: StagePrices, groups: Sequence[PricedGroup], where: Sequence[int]) -> Tables:
        """With weights of the positions that make the bound large.

        Args:
            where: the position of each stage.
        """
        spans = tuple(prices.spans(groups[r]) for r in where)
        messages = tuple(prices.messages(groups[a], groups[b]) for a, b in pairwise(where))
        begins = tuple(where.index(r) for r in range(len(groups)))
        limits = tuple(_limits(group, len(prices.prices.micro_batches), len(where)) for group in groups)
        tables = cls(tuple(where), spans, messages, begins, limits, prices.is_linked)
        tables.means = tables._weighted()
        return tables

    @property
    def bound_s(self) -> float:
        """None of them is faster."""
        return max(mean.bound_s for mean in self.means)

    def _weighted(self) -> tuple[Mean, ...]:
        """The means of the bound, for the best of a few weights."""
        speeds = 1 / np.maximum([self.spans[stage].total_s for stage in self.begins], 1e-12)
        weights = speeds / speeds.sum()
        best = self._mean(weights, returns=True)
        for _ in range(_STEPS):
            if not np.isfinite(best.bound_s):
                break
            loads = np.array(self._ends(best))
            moved = weights * np.maximum(loads / max(loads.mean(), 1e-12), 1e-3) ** 2
            mean = self._mean(moved / moved.sum(), returns=True)
            if mean.bound_s <= best.bound_s:
                break
            best, weights = mean, moved / moved.sum()
        nothing, all_ways = (0.0,) * len(self.spans), (1.0,) * len(self.spans)
        trip = (self._tabled(Mean(nothing, all_ways, True, ())),) if self.is_linked else ()
        return best, self._mean(weights, returns=False), *trip

    def _ends(self, mean: Mean) -> list[float]:
        """By position, the bound of its own, where the mean is least."""
        first = self.root()
        for stage, behind in enumerate(mean.table[1:]):
            first = self.grown(first, int((self._cost(mean, stage, first.cuts[-1]) + behind).argmin()))
        return [max(one, other) for one, other in zip(first.wholes, first.paths, strict=True)]

    def _mean(self, weights: Array, returns: bool) -> Mean:
        begun = np.array(self.begins)
        stages = range(len(self.spans))
        own = tuple(float(weights[r]) for r in self.where)
        ahead = tuple(float(weights[begun > stage].sum()) * self.is_linked for stage in stages)
        return self._tabled(Mean(own, ahead, returns, ()))

    def _tabled(self, mean: Mean) -> Mean:
        """With its table, from the last stage to the first."""
        behind = np.full(len(self.spans[0].whole), np.inf)
        behind[-1] = 0.0
        table = [behind]
        for stage in reversed(range(len(self.spans))):
            table.append((self._cost(mean, stage) + table[-1][None, :]).min(axis=1))
        return replace(mean, table=tuple(reversed(table)))

    def _cost(self, mean: Mean, stage: int, first: int | slice = slice(None)) -> Array:
        """What a stage costs by first and last cut, or by last cut alone."""
        spans, own, ahead = self.spans[stage], mean.own[stage], mean.ahead[stage]
        cost: Array = own * (spans.paths if mean.returns else spans.whole)[first] if own else np.zeros(1)
        if ahead:
            there, back = self._messages(stage)
            way = spans.head[first] + there
            cost = cost + ahead * (way + spans.back[first] + back if mean.returns else way)
        return cost

    def _messages(self, stage: int) -> tuple[Array, Array]:
        nothing = np.zeros(len(self.spans[0].whole))
        return self.messages[stage] if stage < len(self.messages) else (nothing, nothing)

    def root(self) -> First:
        """No stage yet."""
        zeros = (0.0,) * len(self.begins)
        return First((0,), (0.0,) * len(self.means), 0.0, 0.0, zeros, zeros, (np.zeros(1),) * len(self.begins))

    def grown(self, first: First, last: int) -> First:
        """With a stage more."""
        stage, begin, linked = len(first.cuts) - 1, first.cuts[-1], self.is_linked
        spans, position = self.spans[stage], self.where[stage]
        wholes, paths, held = list(first.wholes), list(first.paths), list(first.held)
        if stage == self.begins[position]:
            wholes[position] += first.there
            paths[position] += first.there + first.back
        wholes[position] += float(spans.whole[begin, last])
        paths[position] += float(spans.paths[begin, last])
        if spans.resident is not None:
            held[position] = held[position] + spans.resident[:, begin, last]
        there, back = self._messages(stage)
        costs = [self._cost(mean, stage, begin)[last] for mean in self.means]
        return First(
            (*first.cuts, last),
            tuple(before + float(cost) for before, cost in zip(first.means, costs, strict=True)),
            first.there + float(spans.head[begin, last] + there[last]) if linked else 0.0,
            first.back + float(spans.back[begin, last] + back[last]) if linked else 0.0,
            tuple(wholes),
            tuple(paths),
            tuple(held),
        )

    def bounds_behind(self, first: First) -> Array:
        """By where the next stage ends: no such pipeline is faster; infinite where none fits."""
        stage, begin = len(first.cuts) - 1, first.cuts[-1]
        spans, position = self.spans[stage], self.where[stage]
        ahead = (first.there, first.there + first.back) if stage == self.begins[position] else (0.0, 0.0)
        bounds = np.maximum(
            first.wholes[position] + ahead[0] + spans.whole[begin],
            first.paths[position] + ahead[1] + spans.paths[begin],
        )
        for cost, mean in zip(first.means, self.means, strict=True):
            bounds = np.maximum(bounds, cost + self._cost(mean, stage, begin) + mean.table[stage + 1])
        if spans.resident is not None:
            held = first.held[position][:, None] + spans.resident[:, begin]
            bounds = np.where((held > self.limits[position][:, None]).any(axis=0), np.inf, bounds)
        return np.asarray(bounds)


@dataclass(slots=True, eq=False)
class StagePrices:
    """Stages and messages of one way to cut the batch.

    Attributes:
        mirrored: whether a position is two ranks that have its stages in opposite orders.
        is_linked: whether every stage certainly reads from the one before, and gets a gradient back.
    """

    prices: GroupPrices
    links: HandoverBounds
    mirrored: bool
    is_linked: bool = field(init=False)
    _rows: list[Numbers] = field(init=False, repr=False)
    _spans: dict[object, tuple[PricedGroup, GroupSpans]] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        cuts = self.prices.cuts
        every = [np.unique(cuts.column[:, :cut, cut]) for cut in range(1, cuts.last)]
        self._rows = [rows[rows >= 0] for rows in every]
        linked = cuts.columns.linked & cuts.columns.has_gradient
        self.is_linked = all(bool(len(rows) and linked[rows].all()) for rows in self._rows)

    def spans(self, group: PricedGroup) -> GroupSpans:
        """The stages of a group, the same for those that are priced alike; kept while few others are asked for."""
        key = (id(group.prices), id(group.allowed))
        if key not in self._spans:
            if len(self._spans) >= _KEPT:
                self._spans.clear()
            self._spans[key] = group, self._worked_out(group)
        return self._spans[key][1]

    def _worked_out(self, group: PricedGroup) -> GroupSpans:
        cuts, prices = self.prices.cuts, group.prices
        every = np.arange(cuts.last + 1)
        first, last = every[:, None], every[None, :]
        stage = group.stage(first, last)
        possible = cuts.inside & (stage.window > 0)
        whole, paths = stage.all_work, stage.work
        if self.mirrored or not _is_one_slowest(prices.all_works, cuts.inside):
            whole = whole - prices.all_works.most(first, last) + _mean_of(prices.all_works, first, last)
            paths = paths - prices.works.most(first, last) + _mean_of(prices.works, first, last)
        if prices.parted is None:
            whole = whole + prices.updates.least(first, last)
        total_s = float(whole[0, -1])
        whole, paths, head, back = (np.where(possible, each, np.inf) for each in (whole, paths, stage.head, stage.back))
        return GroupSpans(whole, paths, head, back, _resident(prices.memory), total_s)

    def messages(self, source: PricedGroup, destination: PricedGroup) -> tuple[Array, Array]:
        """There and back between stages of two groups, at least, by cut; nothing on the same ranks."""
        count = self.prices.cuts.last + 1
        there, back = np.zeros(count), np.zeros(count)
        if self.is_linked and source is not destination:
            link = self.links.between(source, destination)
            for cut, rows in enumerate(self._rows, 1):
                there[cut], back[cut] = link.there[rows].min(), link.back[rows].min()
        return there, back


def _is_one_slowest(works: Spread, inside: Flags) -> bool:
    """Whether the same member is the slowest in every stage, so that the most of a sum is the sum of the most."""
    first, last = np.nonzero(inside)
    most = works.most(first, last)
    return any(bool((row[last] - row[first] >= most * (1 - _ROUNDING)).all()) for row in works.sums)


def _mean_of(works: Spread, first: Numbers, last: Numbers) -> Array:
    """The mean of members, which no sum over stages of the slowest is below."""
    return np.asarray(np.mean([row[last] - row[first] for row in works.sums], axis=0))


def _resident(memory: LeastMemory | None) -> Array | None:
    """By holder, first and last cut: bytes of a stage that are there whatever other stages of the rank do."""
    if memory is None:
        return None
    by_holder = []
    for holder in memory.holders:
        resident = holder.resident[None, :] - holder.resident[:, None]
        if holder.gradients is not None and holder.once is not None:
            resident = resident - np.maximum(holder.gradients[None, :] - holder.gradients[:, None], 0.0)
        by_holder.append(resident)
    return np.array(by_holder)


def _limits(group: PricedGroup, num_microbatches: int, num_stages: int) -> Array:
    """What each member of a group may hold."""
    memory = group.prices.memory
    rounding = (num_microbatches + 6) * num_stages  # the simulator rounds bytes slot by slot
    return np.array([holder.limit_bytes + rounding for holder in memory.holders] if memory is not None else [np.inf])
