"""What pipelines take at least in which a stage has other shares of the samples than the search looks at.

Where devices are unlike and the ways to share a micro-batch are many, the search looks at a few of them
(``Prices.versions``).  Follow one sample of b through a pipeline of any shares, on the member that has it at every
stage: with the times of that member the recurrences of :mod:`planner.solvers.best_first.solver` hold, and so they hold
for the mean over samples, as the mean of the largest of some terms is no less than the largest of their means.  Here
the suffix DP has that mean, least over all shares, for each of its terms (``GroupTimes.mean``), of full micro-batches.
Between g and h members there are at most g + h - 1 messages, so that of the mean sample has b / (g + h - 1) samples at
least.  Beside, no stage takes less than the least largest time of a member (``GroupTimes.levels``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from planner.costs.communication.collectives import transfer_s
from planner.costs.layers.cost_table import Array
from planner.costs.memory.memory_bound import Memory
from planner.costs.stages.shared_times import GroupTimes
from planner.costs.stages.stage_bound import Stage, StageBound
from planner.ir.errors import MissingMeasurementError
from planner.solvers.best_first.bound import Continuation, GroupChoice, Labels, OutOfTimeError, Suffixes
from planner.solvers.best_first.device_groups import Counts, Devices, member_orders, orders_known
from planner.solvers.best_first.graph_cuts import Flags, Numbers
from planner.solvers.best_first.message_bound import Handover, Links
from planner.solvers.best_first.priced_groups import Group, Prices
from planner.solvers.candidates.candidate import Recomputes, again_of

_MANY_STAGES = 40_000
"""Of so many the least largest time is not worked out; the mean is a bound of it."""


def other_shares_s(prices: Prices, devices: Devices, upper_s: float, ends_s: float) -> float:
    """No pipeline with shares that ``prices`` leaves out is faster; infinity if none is left out, or takes less.

    Args:
        upper_s: pipelines that take so long are of no interest.
        ends_s: when to give up, by ``time.monotonic``; no bound is known then.
    """
    if not any(prices.leaves_out(option.group) for option in devices.options(devices.all_unused)):
        return float("inf")
    if prices.throughout.any():
        return 0.0
    every = _AnyShares(prices, upper_s)
    try:
        return _SomeOthers(_Bounded(every, devices, _MeanLinks(every), upper_s, ends_s)).root_s()
    except OutOfTimeError:
        return 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _ShareBound:
    """What a stage costs at least on a group with any shares; of full micro-batches the mean over samples.

    Attributes:
        single: the same where each member has one sample.
        times: of full micro-batches; all_times: of all.
        num_full: full micro-batches.
    """

    single: StageBound
    times: GroupTimes
    all_times: GroupTimes
    num_full: int
    inside: Flags
    upper_s: float
    _alone: list[Array] = field(default_factory=list)

    @property
    def overhead_s(self) -> float:
        """Of an action that has a message."""
        return self.single.overhead_s

    @property
    def memory(self) -> Memory | None:
        """Where each member has one sample."""
        return self.single.memory

    def stage(self, first: Numbers, last: Numbers, num_microbatches: int) -> Stage:
        """As :meth:`StageBound.stage`."""
        there, back = self._exchanges_s(first, last)
        head = self.times.mean(lambda member: member.forward, first, last) + there
        back_s = self.times.mean(lambda member: member.back, first, last) + back
        always = num_microbatches * (there + back)
        work = self.times.mean(lambda member: member.work, first, last) + always
        all_work = self.times.mean(lambda member: member.all_work, first, last) + always
        window = np.full(head.shape, num_microbatches, dtype=np.int64)
        if self.memory is not None:
            window = self.memory.window(first, last, num_microbatches)
        tail = self._tail_s(first, last)
        return Stage(head, back_s, head, back_s, np.zeros_like(head), work, all_work, tail, window)

    def largest_work_s(self, first: Numbers, last: Numbers) -> Array:
        """The least largest time of a member for all that it does in a step."""
        if not self._alone:
            found = np.zeros(self.inside.shape)
            begin, end = np.nonzero(self.inside)
            if len(begin) <= _MANY_STAGES:
                found[begin, end] = self.all_times.levels(lambda member: member.all_work, begin, end)[0]
            else:
                found[begin, end] = self.times.mean(lambda member: member.all_work, begin, end)
            self._alone.append(found)
        return self._alone[0][first, last]

    def alone_s(self, first: Numbers, last: Numbers) -> Array:
        """What a step takes that has such a stage."""
        always = self.num_full * sum(self._exchanges_s(first, last))
        return self.largest_work_s(first, last) + always + self._tail_s(first, last)

    def _exchanges_s(self, first: Numbers, last: Numbers) -> tuple[Array, Array]:
        there, back = self.single.exchange_forward, self.single.exchange_backward
        return there[last] - there[first], back[last] - back[first]

    def _tail_s(self, first: Numbers, last: Numbers) -> Array:
        longest = np.maximum.reduce([m.whole_back[last] - m.whole_back[first] for m in self.times.members])
        in_time_s = max(member.back_ratio for member in self.times.members) * self.upper_s / self.num_full
        _, back = self._exchanges_s(first, last)
        return self.single.tail_s(
            first, last, self.single.updates.least(first, last), np.minimum(longest, in_time_s) + back
        )


class _AnyShares(Prices):
    """The groups of one way to cut the batch, full micro-batches alone, each with whatever shares are best for it."""

    def __init__(self, known: Prices, upper_s: float) -> None:
        size = known.micro_batches[0]
        full = tuple(rows for rows in known.micro_batches if rows == size)
        super().__init__(known.problem, known.book, known.pools, known.cuts, full, known.freedom)
        self.known, self.upper_s = known, upper_s

    def capacity_s(self) -> Array:
        """As of all micro-batches."""
        return self.known.capacity_s() * sum(self.micro_batches) / sum(self.known.micro_batches)

    def leaves_out(self, counts: Counts) -> bool:
        """As the search does."""
        return self.known.leaves_out(counts)

    def versions(self, counts: Counts) -> tuple[Group, ...]:
        """The devices ``counts`` as a stage; where all members are the same, that alone is the mean."""
        found = self._versions.get(counts)
        if found is None:
            alike = super().versions(counts) if not self.known.leaves_out(counts) else ()
            if not alike or len({(kind, n) for kind, n in self._members(alike[0])}) > 1:
                made = [self._any(counts, again) for again in self.freedom.recompute]
                alike = tuple(group for group in made if group is not None)
            found = self._versions[counts] = alike
        return found

    def _members(self, group: Group) -> list[tuple[str, float]]:
        return list(zip(map(self.book.kind, group.ranks), group.samples[self.micro_batches[0]], strict=True))

    def _any(self, counts: Counts, recompute: Recomputes) -> Group | None:
        ranks, size = self.first_ranks(counts), self.micro_batches[0]
        if len(ranks) > size:
            return None
        try:
            times = self.times(ranks, recompute)
            all_times = times if self.known.micro_batches == self.micro_batches else self.known.times(ranks, recompute)
            zero = self.problem.zero_over(len(ranks))
            pools = [self.pools[number] for number in member_orders(self.pools, counts)[0]]
            members = [(pool.kind, pool.memory_limit_bytes, (1.0, 1.0)) for pool in pools]
            single = self._bounds.of(ranks, members, again_of(recompute, self._cores), zero)
        except MissingMeasurementError:
            return None
        bound = _ShareBound(single, times, all_times, len(self.micro_batches), self.cuts.inside, self.upper_s)
        return Group(
            counts,
            ranks,
            member_orders(self.pools, counts),
            orders_known(self.pools, counts),
            {},
            (recompute, False, (0,) * len(ranks)),
            bound,
            self,
            self.freedom.allowed(self.cuts, ranks, recompute),
        )


class _MeanLinks(Links):
    """Messages between groups with any shares: those of the mean sample."""

    def between(self, source: Group, destination: Group) -> Handover:
        """Messages from ``source`` to ``destination``, and gradients back."""
        if source.size == destination.size == 1:
            return super().between(source, destination)
        ends = sorted((source.size, destination.size))
        whole = source.samples and destination.samples and ends[1] % ends[0] == 0
        num_pieces = ends[1] if whole else sum(ends) - 1
        pools = [tuple(dict.fromkeys(group.orders[0])) for group in (source, destination)]
        overhead_s = min(source.prices.overhead_s, destination.prices.overhead_s)
        key = (num_pieces, *pools, overhead_s)
        found = self._alike.get(key)
        if found is None:
            found = self._alike[key] = self._mean(num_pieces, pools, overhead_s)
        return found

    def _mean(self, num_pieces: int, pools: list[tuple[int, ...]], overhead_s: float) -> Handover:
        name = self._any_of(sorted(set(chain.from_iterable(self._tiers[np.ix_(*pools)].tolist()))))
        batches = self.prices.micro_batches
        there, back = (self._least_mean_s(name, batches[0] / num_pieces, forward) for forward in (True, False))
        both = np.zeros_like(there) if self._links[name].duplex else there + back
        times = len(batches)
        one_way = there + overhead_s, back + overhead_s
        return Handover(one_way[0], one_way[0], one_way[1], one_way[1], times * there, times * back, times * both)

    def _least_mean_s(self, name: str, samples: float, forward: bool) -> Array:
        """The mean, over samples, of a message that has so many samples in the mean, and one at least."""
        columns = self.prices.cuts.columns
        per_sample = columns.forward_bytes if forward else columns.backward_bytes
        sizes = range(1, self.prices.micro_batches[0] + 1)
        each = np.minimum.reduce([transfer_s(self._links[name], per_sample * size) / size for size in sizes])
        found: Array = np.maximum(self._of(name, 1.0, forward), samples * each)
        return found


class _Bounded(Suffixes):
    """The suffix DP over any shares."""

    def stages(self, choice: GroupChoice, first: Numbers, last: Numbers) -> tuple[Stage, Labels]:
        """As there; and the step takes no less than each stage by itself."""
        stage, labels = super().stages(choice, first, last)
        prices = choice.group.prices
        if isinstance(prices, _ShareBound):
            labels = replace(labels, free=np.maximum(labels.free, prices.alone_s(first, last)))
        return stage, labels


class _SomeOthers(_Bounded):
    """The same where some stage has shares that the search does not look at."""

    def __init__(self, every: _Bounded) -> None:
        super().__init__(every.prices, every.devices, every.links, every.upper_s, every.ends_s)
        self.every = every

    def stages(self, choice: GroupChoice, first: Numbers, last: Numbers) -> tuple[Stage, Labels]:
        """As there; infinite where such a stage would have to follow and none does."""
        stage, labels = super().stages(choice, first, last)
        if not self._is_other(choice):
            ends = last == self.prices.cuts.last
            labels = Labels(*(np.where(ends, np.inf, x) for x in (labels.trip, labels.end, labels.total, labels.free)))
        return stage, labels

    def _continuation(self, choice: GroupChoice) -> Continuation:
        return self.every._continuation(choice) if self._is_other(choice) else super()._continuation(choice)

    def _is_other(self, choice: GroupChoice) -> bool:
        return self.prices.leaves_out(choice.group.counts)
