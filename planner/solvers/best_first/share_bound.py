"""What pipelines take at least in which a stage has other shares of the samples than the search looks at.

Where devices are unlike and the ways to share a micro-batch are many, the search looks at a few of them
(``GroupPrices.versions``).  Follow one sample of b through a pipeline of any shares, on the member that has it at every
stage: with the times of that member the recurrences of :mod:`planner.solvers.best_first.solver` hold, and so they hold
for the mean over samples, as the mean of the largest of some terms is no less than the largest of their means.  Here
the suffix DP has that mean, least over all shares, for each of its terms (``GroupTimes.mean``), of full micro-batches.
Between g and h members there are at most g + h - 1 messages, so that of the mean sample has b / (g + h - 1) samples at
least.  Beside, no stage takes less than the least largest time of a member (``GroupTimes.levels``).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np

from planner.costs.candidate import Recomputes, recompute_mask
from planner.costs.communication.collectives import transfer_s
from planner.costs.layers.cost_table import Array
from planner.costs.stages.shared_bound import SharedBound
from planner.costs.stages.stage_bound import BoundedStages
from planner.ir.errors import MissingMeasurementError
from planner.solvers.best_first.bound import SORTS, GroupChoice, Labels, Suffixes
from planner.solvers.best_first.device_groups import Counts, DeviceStates, member_orders, orders_known
from planner.solvers.best_first.graph_cuts import Numbers
from planner.solvers.best_first.message_bound import HandoverBound, HandoverBounds
from planner.solvers.best_first.priced_groups import GroupPrices, PricedGroup
from planner.solvers.budget import Budget, OutOfTimeError


def other_shares_s(prices: GroupPrices, devices: DeviceStates, upper_s: float, within: Budget) -> float:
    """No pipeline with shares that ``prices`` leaves out is faster; infinity if none is left out, or takes less.

    Args:
        upper_s: pipelines that take so long are of no interest.
        within: the budget of the tables; 0 where it is not enough.
    """
    if len({pool.sort for pool in prices.pools}) == 1 or not any(
        prices.leaves_out(option.group) for option in devices.options(devices.all_unused)
    ):
        return float("inf")
    if prices.throughout.any():
        return 0.0
    every = _AnyShares(prices, upper_s)
    try:
        return _SomeOthers(_Bounded(every, devices, _MeanLinks(every), upper_s, within)).root_s()
    except OutOfTimeError:
        return 0.0


class _AnyShares(GroupPrices):
    """The groups of one way to cut the batch, full micro-batches alone, each with whatever shares are best for it."""

    def __init__(self, prices: GroupPrices, upper_s: float) -> None:
        size = prices.micro_batches[0]
        full = tuple(rows for rows in prices.micro_batches if rows == size)
        super().__init__(prices.problem, prices.book, prices.pools, prices.cuts, full, prices.freedom)
        self.searched, self.upper_s = prices, upper_s

    def capacity_s(self) -> Array:
        """As of all micro-batches."""
        return self.searched.capacity_s() * sum(self.micro_batches) / sum(self.searched.micro_batches)

    def leaves_out(self, counts: Counts) -> bool:
        """As the search does."""
        return self.searched.leaves_out(counts)

    def _priced_versions(self, counts: Counts) -> tuple[PricedGroup, ...]:
        """Where all members are the same, that alone is the mean."""
        alike = super()._priced_versions(counts) if not self.searched.leaves_out(counts) else ()
        if alike and len(set(self._members(alike[0]))) == 1:
            return alike
        made = [self._any(counts, recompute) for recompute in self.freedom.recompute]
        return tuple(group for group in made if group is not None)

    def _members(self, group: PricedGroup) -> list[tuple[str, float]]:
        return list(zip(map(self.book.kind, group.ranks), group.samples[self.micro_batches[0]], strict=True))

    def _any(self, counts: Counts, recompute: Recomputes) -> PricedGroup | None:
        ranks, size = self.first_ranks(counts), self.micro_batches[0]
        if len(ranks) > size:
            return None
        try:
            times = self.times(ranks, recompute)
            all_times = (
                times if self.searched.micro_batches == self.micro_batches else self.searched.times(ranks, recompute)
            )
            zero = self.problem.zero_over(len(ranks))
            pools = [self.pools[number] for number in member_orders(self.pools, counts)[0]]
            members = [(pool.kind, pool.memory_limit_bytes, (1.0, 1.0)) for pool in pools]
            single = self._bounds.of(ranks, members, recompute_mask(recompute, self._cores), zero)
        except MissingMeasurementError:
            return None
        bound = SharedBound(single, times, all_times, len(self.micro_batches), self.cuts.inside, self.upper_s)
        return PricedGroup(
            counts,
            ranks,
            member_orders(self.pools, counts),
            orders_known(self.pools, counts),
            {},
            (recompute, False, (0,) * len(ranks)),
            single,
            self,
            self.freedom.allowed(self.cuts, ranks, recompute),
            bound,
        )


class _MeanLinks(HandoverBounds):
    """Messages between groups with any shares: those of the mean sample."""

    def between(self, source: PricedGroup, destination: PricedGroup) -> HandoverBound:
        """Messages from ``source`` to ``destination``, and gradients back."""
        if source.size == destination.size == 1:
            return super().between(source, destination)
        ends = sorted((source.size, destination.size))
        whole = source.samples and destination.samples and ends[1] % ends[0] == 0
        num_pieces = ends[1] if whole else sum(ends) - 1
        pools = [tuple(dict.fromkeys(group.orders[0])) for group in (source, destination)]
        overhead_s = min(source.prices.overhead_s, destination.prices.overhead_s)
        key = (num_pieces, *pools, overhead_s)
        handover = self._alike.get(key)
        if handover is None:
            handover = self._alike[key] = self._mean(num_pieces, pools, overhead_s)
        return handover

    def _mean(self, num_pieces: int, pools: list[tuple[int, ...]], overhead_s: float) -> HandoverBound:
        name = self._any_of(sorted(set(chain.from_iterable(self._tiers[np.ix_(*pools)].tolist()))))
        batches = self.prices.micro_batches
        there, back = (self._least_mean_s(name, batches[0] / num_pieces, forward) for forward in (True, False))
        both = np.zeros_like(there) if self._links[name].duplex else there + back
        times = len(batches)
        one_way = there + overhead_s, back + overhead_s
        return HandoverBound(one_way[0], one_way[0], one_way[1], one_way[1], times * there, times * back, times * both)

    def _least_mean_s(self, name: str, samples: float, forward: bool) -> Array:
        """The mean, over samples, of a message that has so many samples in the mean, and one at least."""
        columns = self.prices.cuts.columns
        per_sample = columns.forward_bytes if forward else columns.backward_bytes
        sizes = range(1, self.prices.micro_batches[0] + 1)
        each = np.minimum.reduce([transfer_s(self._links[name], per_sample * size) / size for size in sizes])
        least_s: Array = np.maximum(self._seconds[name, 1.0, forward], samples * each)
        return least_s


class _Bounded(Suffixes):
    """The suffix DP over any shares."""

    def stages(self, choice: GroupChoice, first: Numbers, last: Numbers) -> tuple[BoundedStages, Labels]:
        """As there; and the step takes no less than each stage by itself."""
        stage, labels = super().stages(choice, first, last)
        if choice.group.any_shares is not None:
            labels = replace(labels, free=np.maximum(labels.free, choice.group.any_shares.alone_s(first, last)))
        return stage, labels


class _SomeOthers(_Bounded):
    """The same where some stage has shares that the search does not look at."""

    def __init__(self, every: _Bounded) -> None:
        super().__init__(every.prices, every.devices, every.links, every.upper_s, every.budget)
        self.every = every

    def stages(self, choice: GroupChoice, first: Numbers, last: Numbers) -> tuple[BoundedStages, Labels]:
        """As there; infinite where such a stage would have to follow and none does."""
        stage, labels = super().stages(choice, first, last)
        if not self._is_other(choice):
            ends = last == self.prices.cuts.last
            labels = Labels(*(np.where(ends, np.inf, getattr(labels, sort)) for sort in SORTS))
        return stage, labels

    def _continuation(self, choice: GroupChoice) -> Labels:
        return self.every._continuation(choice) if self._is_other(choice) else super()._continuation(choice)

    def _is_other(self, choice: GroupChoice) -> bool:
        return self.prices.leaves_out(choice.group.counts)
