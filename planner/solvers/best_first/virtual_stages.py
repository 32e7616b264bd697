"""What stages of pipelines of several a position take, and messages between them, at least: by their cuts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from planner.costs.layers.cost_table import Array
from planner.costs.memory.memory_bound import LeastMemory
from planner.costs.stages.stage_bound import BoundedStages, Spread
from planner.solvers.best_first.graph_cuts import Flags, Numbers
from planner.solvers.best_first.message_bound import HandoverBounds
from planner.solvers.best_first.priced_groups import GroupPrices, PricedGroup

_KEPT = 24  # groups whose stages are kept
_ROUNDING = 1e-9

F, B, F_LAST, B_LAST, ADDS, W, WHOLE, PATH, UPDATE, TAIL, THERE, RETURN = range(12)
"""What a stage takes: its shortest F and B (or I), and those of the last micro-batch, which may be smaller; what a B
or W takes longer that finds gradients; its shortest W; all that a rank does of it in a step, and the same without W;
its update, and reduction and update; the message after it, there and back."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupSpans:
    """Stages of a group, by first and last cut.

    Attributes:
        possible: where there is one.
        seconds: of ``F`` to ``TAIL``; 0 where there is none.
        resident: bytes that members hold of it throughout, by member; None where memory cannot matter.
    """

    possible: Flags
    seconds: Array
    resident: Array | None

    @property
    def whole(self) -> Array:
        """All that a rank does of it in a step; infinite where there is none."""
        return np.where(self.possible, self.seconds[WHOLE], np.inf)


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
        every = [np.unique(cuts.crossing_of[:, :cut, cut]) for cut in range(1, cuts.last)]
        self._rows = [rows[rows >= 0] for rows in every]
        linked = cuts.crossings.linked & cuts.crossings.has_gradient
        self.is_linked = all(bool(len(rows) and linked[rows].all()) for rows in self._rows)

    def spans(self, group: PricedGroup) -> GroupSpans:
        """The stages of a group, the same for those that are priced alike; kept while few others are asked for."""
        if group.alike not in self._spans:
            if len(self._spans) >= _KEPT:
                self._spans.clear()
            self._spans[group.alike] = group, self._worked_out(group)
        return self._spans[group.alike][1]

    def _worked_out(self, group: PricedGroup) -> GroupSpans:
        cuts = self.prices.cuts
        prices = group.prices
        count = self.prices.num_microbatches
        every = np.arange(cuts.last + 1)
        first = every[:, None]
        last = every[None, :]
        stage = group.stage(first, last)
        possible = cuts.inside & (stage.window > 0)
        whole = stage.all_work_s
        paths = stage.work_s
        late = (whole - paths - (count - 1) * stage.accumulate_s) / count
        if not (prices.is_even and len(prices.all_works.sums) == 1):
            late = np.zeros_like(whole)  # of whom, and of which micro-batch, is not known
        if self.mirrored or not _is_one_slowest(prices.all_works, cuts.inside):
            whole = whole - prices.all_works.most(first, last) + _mean_of(prices.all_works, first, last)
            paths = paths - prices.works.most(first, last) + _mean_of(prices.works, first, last)
        update = prices.updates.least(first, last) * (prices.parted is None)
        late = np.maximum(late, 0.0)
        numbers = *self._passes(group, stage), stage.accumulate_s, late, whole, paths, update, stage.tail_s
        seconds = np.array([np.where(possible, number, 0.0) for number in numbers])
        return GroupSpans(possible, seconds, _resident(prices.memory))

    def _passes(self, group: PricedGroup, stage: BoundedStages) -> tuple[Array, ...]:
        """The shortest F and B of a full micro-batch and of the last one: the least of all where members differ."""
        prices = group.prices
        micro_batches = self.prices.micro_batches
        kinds = {prices.cost_model.kind(rank) for rank in group.ranks}
        samples = [set(group.samples[size]) for size in (micro_batches[0], micro_batches[-1])]
        if len(prices.passes_s) != 2 or len(kinds) > 1 or any(len(own) > 1 for own in samples):
            return (stage.forward_s, stage.backward_s) * 2
        exchanges = prices.exchange_forward_s, prices.exchange_backward_s
        columns = (own + exchange for turn in prices.passes_s for own, exchange in zip(turn, exchanges, strict=True))
        return tuple(column[None, :] - column[:, None] for column in columns)

    def messages(self, source: PricedGroup, destination: PricedGroup) -> tuple[Array, Array]:
        """There and back between stages of two groups, at least, by cut; nothing on the same ranks."""
        count = self.prices.cuts.last + 1
        there = np.zeros(count)
        back = np.zeros(count)
        if self.is_linked and source is not destination:
            link = self.links.between(source, destination)
            for cut, rows in enumerate(self._rows, 1):
                there[cut] = link.forward_s[rows].min()
                back[cut] = link.least_backward_s[rows].min()
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
