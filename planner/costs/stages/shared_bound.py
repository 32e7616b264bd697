"""What a stage costs at least on a group of devices, whatever the shares of its members are, and the best shares.

For stages between any two cuts, as arrays that broadcast.  Times never fall as samples are added: where measured ones
do, the least of as many samples or more stands for them, so that all here are lower bounds.

The least largest time (``GroupTimes.levels``): every kind of member may have up to k samples, while these are enough
for the micro-batch; the kind whose members take longest is lowered by one, until they are no longer enough.  What its
members took then is the least largest time, since in any shares that stay below all members have fewer.

The mean over samples (``GroupTimes.mean``): a sample follows the member that has it.  If a member of kind c, of m_c,
takes at least a_c + r_c k for k of b samples, the mean of that over samples is at least

    min a_c + sum_i r_i k_i^2 / b   >=   min a_c + b / sum_c (m_c / r_c)

for all shares k_i that add up to b (Cauchy and Schwarz).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf

import numpy as np

from planner.costs.cost_model import CostModel
from planner.costs.layers.cost_table import Array, Flags
from planner.costs.memory.memory_bound import Cuts, Numbers
from planner.costs.stages.stage_bound import BoundedStages, StageBound
from planner.costs.stages.stage_sums import LeastPasses, RecomputeMask
from planner.ir.lazy import once


@dataclass(frozen=True, slots=True, eq=False)
class Times:
    """What something takes by samples: (samples - 1, cut), running sums; and lines below, each a base and a slope."""

    sums: Array
    lines: tuple[tuple[Array, Array], tuple[Array, Array]]

    @classmethod
    def of(cls, by_layer: Array, cuts: Cuts) -> Times:
        """Of the times of each layer: (samples - 1, layer)."""
        samples = np.arange(1, len(by_layer) + 1)[:, None]
        least = np.minimum.accumulate(by_layer[::-1])[::-1]
        slope = (least[-1] - least[0]) / max(1, len(least) - 1)
        base = (least - samples * slope).min(axis=0)
        each = (least / samples).min(axis=0)
        lines = (cuts.sums(np.zeros_like(each)), cuts.sums(each)), (cuts.sums(base), cuts.sums(slope))
        return cls(np.array([cuts.sums(row) for row in least]), lines)


@dataclass(frozen=True, slots=True, eq=False)
class MemberTimes:
    """Of a member that shares a stage, on one kind of device.

    Attributes:
        forward, backward: an F, and a B (or I).
        work: of all micro-batches, from the first F to the last B (or I); all_work: with the W that may come later.
        whole_backward_s: a B of the most samples, at each cut.
        backward_part: the most that a whole B is of the least that an F and a backward take.
    """

    forward: Times
    backward: Times
    work: Times
    all_work: Times
    whole_backward_s: Array
    backward_part: float


def member_times(
    cost_model: CostModel,
    cuts: Cuts,
    micro_batches: Sequence[int],
    member: tuple[str, int, RecomputeMask],
    schedules: tuple[bool, bool],
) -> MemberTimes:
    """Of a member with any number of samples of a full micro-batch.

    Args:
        member: kind of device; the most samples; which activations it computes again.
        schedules: whether there are backwards, and whether these may be split.

    Raises:
        MissingMeasurementError: a layer's cost at one of these sizes is not known.
    """
    kind, most, recompute = member
    trains, splits = schedules
    sizes = range(1, most + 1)
    by_size = [cost_model.sums(kind, samples, True, recompute).least(trains, splits) for samples in sizes]
    passes = LeastPasses(*(np.diff(column) for column in zip(*by_size, strict=True)))
    wholes = trains * np.array([np.diff(cost_model.at(kind, samples, True).backward_s) for samples in sizes])
    full = micro_batches.count(micro_batches[0])
    size = micro_batches[0]
    smaller = None
    if micro_batches[-1] != size:  # a member has its part of it, rounded up or down, and a sample at least
        places = np.clip(np.array(sizes) * micro_batches[-1] // size, 1, most) - 1
        smaller = LeastPasses(*(column[places] for column in passes))
    work, all_work = (Times.of(work_s, cuts) for work_s in passes.works_s(full, smaller))
    return MemberTimes(
        forward=Times.of(passes.forward_s, cuts),
        backward=Times.of(passes.back_s, cuts),
        work=work,
        all_work=all_work,
        backward_part=float((wholes / np.maximum(passes.forward_s + passes.whole_s, 1e-300)).max(initial=0.0)),
        whole_backward_s=cuts.sums(wholes[-1]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _LevelTimes:
    """What members of each sort take at a level, their number of samples, in stages between given cuts."""

    sums: list[Array]  # [sorts][samples - 1, cuts] seconds
    tops: Numbers  # [sorts, stages] the most samples of a member
    counts: Numbers  # [sorts] members
    size: int  # samples of a micro-batch
    first: Numbers  # [stages]
    last: Numbers  # [stages]

    def seconds(self, level: Numbers, at: Numbers) -> Array:
        """By sort, in the stages ``at``: what a member takes at its level, infinite above the top."""
        begin = self.first[at]
        end = self.last[at]
        member_s = np.full(level.shape, inf)
        for sort, own in enumerate(self.sums):
            row = np.minimum(level[sort], len(own)) - 1
            own_s = own[row, end] - own[row, begin]
            member_s[sort] = np.where(level[sort] > self.tops[sort, at], inf, own_s)
        return member_s

    def by_speed(self) -> Numbers:
        """Levels in proportion to how many samples each does in a second, where it does the most."""
        speeds = np.array(
            [len(own) / np.maximum(own[-1, self.last] - own[-1, self.first], 1e-300) for own in self.sums]
        )
        wanted: Numbers = np.ceil(self.size * speeds / (self.counts @ speeds) - 1e-9).astype(np.int64)
        return np.asarray(np.clip(wanted, 1, self.tops))

    def enough(self, level: Numbers) -> Numbers:
        """Levels at which members have all samples, as far as they may: one more for who is the fastest with it."""
        at = np.flatnonzero(self.counts @ level < self.size)
        while len(at):
            after = self.seconds(level[:, at] + 1, at)
            sort = after.argmin(axis=0)
            possible = np.isfinite(after.min(axis=0))
            at = at[possible]
            level[sort[possible], at] += 1
            at = at[self.counts @ level[:, at] < self.size]
        return level

    def raise_to(self, longest: Array, level: Numbers) -> None:
        """Gives those more who do it in no more than the time ``longest``."""
        for sort in range(len(self.sums)):
            at = np.arange(len(longest))
            while len(at):
                more = level[:, at].copy()
                more[sort] += 1
                at = at[self.seconds(more, at)[sort] <= longest[at]]
                level[sort, at] += 1

    def lowered(self, longest: Array, level: Numbers) -> Array:
        """Takes from who takes longest, while all together have enough: the least largest time."""
        is_enough = self.counts @ level >= self.size
        at = np.flatnonzero(is_enough)
        longest[~is_enough] = inf
        while len(at):
            now = self.seconds(level[:, at], at)
            sort = now.argmax(axis=0)
            longest[at] = now.max(axis=0)
            gives = (self.counts @ level[:, at] - self.counts[sort] >= self.size) & (level[sort, at] > 1)
            at = at[gives]
            level[sort[gives], at] -= 1
        return longest


@dataclass(frozen=True, slots=True, eq=False)
class GroupTimes:
    """Of a group with members of several sorts.

    Attributes:
        counts: members of each sort.
        size: samples of a full micro-batch.
        most: by sort the samples that memory lets a member have, by first and last cut; None: any number.
    """

    members: tuple[MemberTimes, ...]
    counts: tuple[int, ...]
    size: int
    most: tuple[Numbers | None, ...]

    def mean(self, of: Callable[[MemberTimes], Times], first: Numbers, last: Numbers) -> Array:
        """The least, over all shares, of the mean over samples of what a sample's member takes."""
        mean_s = np.zeros(np.broadcast(first, last).shape)
        for number in range(2):
            lines = [of(member).lines[number] for member in self.members]
            base = np.minimum.reduce([sums[last] - sums[first] for sums, _ in lines])
            slopes = [np.maximum(sums[last] - sums[first], 1e-300) for _, sums in lines]
            speed = sum(count / slope for count, slope in zip(self.counts, slopes, strict=True))
            np.maximum(mean_s, base + self.size / speed, out=mean_s)
        return mean_s

    def levels(self, of: Callable[[MemberTimes], Times], first: Numbers, last: Numbers) -> tuple[Array, Numbers]:
        """The least largest time of a member, and how many samples a member of each sort may have in it at most.

        Args:
            first, last: cuts, arrays of equal shape, of one dim.

        Returns:
            Seconds, infinite where memory is too short for all samples; samples by (sort, stage).
        """
        sums = [of(member).sums for member in self.members]
        tops = np.array([np.full(first.shape, len(rows)) for rows in sums])
        for top, most in zip(tops, self.most, strict=True):
            if most is not None:
                np.minimum(top, most[first, last], out=top)
        times = _LevelTimes(sums, tops, np.array(self.counts), self.size, first, last)
        level = times.enough(times.by_speed())
        longest = times.seconds(level, np.arange(len(first))).max(axis=0)
        times.raise_to(longest, level)
        return times.lowered(longest, level), level

    def by_member(self, of: Callable[[MemberTimes], Times], first: int, last: int) -> tuple[Array, Numbers]:
        """What each member takes by samples, (member, samples - 1), and the most samples that it may have."""
        seconds = np.full((len(self.counts), self.size), inf)
        tops = np.zeros(len(self.counts), dtype=np.int64)
        for sort, (member, most) in enumerate(zip(self.members, self.most, strict=True)):
            sums = of(member).sums
            seconds[sort, : len(sums)] = sums[:, last] - sums[:, first]
            tops[sort] = len(sums) if most is None else min(len(sums), most[first, last])
        return np.repeat(seconds, self.counts, axis=0), np.repeat(tops, self.counts)

    def shares(self, level: Sequence[int]) -> tuple[int, ...]:
        """The samples of each member, those of a sort one after another, none above ``level`` of its sort.

        Samples that are not there are missing first where members are the slowest.
        """
        order = sorted(range(len(level)), key=lambda sort: -float(self.members[sort].all_work.sums[0, -1]))
        by_sort = [[top] * count for top, count in zip(level, self.counts, strict=True)]
        spare = sum(map(sum, by_sort)) - self.size
        places = [(sort, member) for sort in order for member in reversed(range(self.counts[sort]))]
        while spare > 0:
            for sort, member in places:
                if spare > 0 and by_sort[sort][member] > 1:
                    by_sort[sort][member] -= 1
                    spare -= 1
        return tuple(chain.from_iterable(by_sort))


_MANY_STAGES = 40_000
"""Stages of which the least largest time is not worked out; the mean is a bound of it."""


@dataclass(frozen=True, eq=False)
class SharedBound:
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

    def stage(self, first: Numbers, last: Numbers, num_microbatches: int) -> BoundedStages:
        """As :meth:`StageBound.stage`."""
        exchange_forward_s, exchange_backward_s = self._exchanges_s(first, last)
        forward_s = self.times.mean(lambda member: member.forward, first, last) + exchange_forward_s
        backward_s = self.times.mean(lambda member: member.backward, first, last) + exchange_backward_s
        exchanges_s = num_microbatches * (exchange_forward_s + exchange_backward_s)
        window = np.full(forward_s.shape, num_microbatches, dtype=np.int64)
        if self.single.memory is not None:
            window = self.single.memory.window(first, last, num_microbatches)
        nothing = np.zeros_like(forward_s)
        return BoundedStages(
            forward_s=forward_s,
            backward_s=backward_s,
            slow_forward_s=forward_s,
            slow_backward_s=backward_s,
            accumulate_s=nothing,
            work_s=self.times.mean(lambda member: member.work, first, last) + exchanges_s,
            all_work_s=self.times.mean(lambda member: member.all_work, first, last) + exchanges_s,
            tail_s=self._tail_s(first, last),
            card_s=nothing,
            window=window,
        )

    def largest_work_s(self, first: Numbers, last: Numbers) -> Array:
        """The least largest time of a member for all that it does in a step."""
        return self._largest_works_s()[first, last]

    @once
    def _largest_works_s(self) -> Array:
        largest_s = np.zeros(self.inside.shape)
        begin, end = np.nonzero(self.inside)
        if len(begin) <= _MANY_STAGES:
            largest_s[begin, end] = self.all_times.levels(lambda member: member.all_work, begin, end)[0]
        else:
            largest_s[begin, end] = self.times.mean(lambda member: member.all_work, begin, end)
        return largest_s

    def balanced(self, first: int, last: int) -> tuple[int, ...]:
        """Shares with the least largest time of a member, as far as memory allows; of a stage that may fit."""
        _, level = self.all_times.levels(lambda member: member.all_work, np.array([first]), np.array([last]))
        return self.all_times.shares(level[:, 0].tolist())

    def by_member(self, first: int, last: int) -> tuple[tuple[Array, Array, Array], Numbers]:
        """Of each member, by samples: an F, a B (or I), all that it does; (member, samples - 1). The most samples."""
        exchange_forward_s, exchange_backward_s = self._exchanges_s(np.array(first), np.array(last))
        forward_s, most = self.times.by_member(lambda member: member.forward, first, last)
        backward_s, _ = self.times.by_member(lambda member: member.backward, first, last)
        work_s, _ = self.all_times.by_member(lambda member: member.all_work, first, last)
        columns = (
            forward_s + exchange_forward_s,
            backward_s + exchange_backward_s,
            work_s + self.num_full * (exchange_forward_s + exchange_backward_s),
        )
        return columns, most

    def alone_s(self, first: Numbers, last: Numbers) -> Array:
        """What a step takes that has such a stage."""
        always = self.num_full * sum(self._exchanges_s(first, last))
        return self.largest_work_s(first, last) + always + self._tail_s(first, last)

    def _exchanges_s(self, first: Numbers, last: Numbers) -> tuple[Array, Array]:
        forward_s = self.single.exchange_forward_s
        backward_s = self.single.exchange_backward_s
        return forward_s[last] - forward_s[first], backward_s[last] - backward_s[first]

    def _tail_s(self, first: Numbers, last: Numbers) -> Array:
        longest = np.maximum.reduce([m.whole_backward_s[last] - m.whole_backward_s[first] for m in self.times.members])
        in_time_s = max(member.backward_part for member in self.times.members) * self.upper_s / self.num_full
        _, exchange_backward_s = self._exchanges_s(first, last)
        update_s, sum_s = self.single.after_s(
            first, last, self.single.updates.least(first, last), np.minimum(longest, in_time_s) + exchange_backward_s
        )
        return update_s + sum_s
