"""What a stage costs at least on a group of devices, whatever the shares of its members are."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner.costs.layers.cost_table import Array
from planner.costs.memory.memory_bound import Numbers
from planner.costs.stages.shared_times import GroupTimes
from planner.costs.stages.stage_bound import BoundedStages, StageBound

_MANY_STAGES = 40_000
"""Of so many the least largest time is not worked out; the mean is a bound of it."""


@dataclass(frozen=True, slots=True, eq=False)
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
    inside: NDArray[np.bool_]
    upper_s: float
    _alone: list[Array] = field(default_factory=list)

    def stage(self, first: Numbers, last: Numbers, num_microbatches: int) -> BoundedStages:
        """As :meth:`StageBound.stage`."""
        there, back = self._exchanges_s(first, last)
        head = self.times.mean(lambda member: member.forward, first, last) + there
        back_s = self.times.mean(lambda member: member.back, first, last) + back
        always = num_microbatches * (there + back)
        work = self.times.mean(lambda member: member.work, first, last) + always
        all_work = self.times.mean(lambda member: member.all_work, first, last) + always
        window = np.full(head.shape, num_microbatches, dtype=np.int64)
        if self.single.memory is not None:
            window = self.single.memory.window(first, last, num_microbatches)
        tail = self._tail_s(first, last)
        return BoundedStages(
            head, back_s, head, back_s, np.zeros_like(head), work, all_work, tail, np.zeros_like(head), window
        )

    def largest_work_s(self, first: Numbers, last: Numbers) -> Array:
        """The least largest time of a member for all that it does in a step."""
        if not self._alone:
            largest_s = np.zeros(self.inside.shape)
            begin, end = np.nonzero(self.inside)
            if len(begin) <= _MANY_STAGES:
                largest_s[begin, end] = self.all_times.levels(lambda member: member.all_work, begin, end)[0]
            else:
                largest_s[begin, end] = self.times.mean(lambda member: member.all_work, begin, end)
            self._alone.append(largest_s)
        return self._alone[0][first, last]

    def balanced(self, first: int, last: int) -> tuple[int, ...]:
        """Shares with the least largest time of a member, as far as memory allows; of a stage that may fit."""
        _, level = self.all_times.levels(lambda member: member.all_work, np.array([first]), np.array([last]))
        return self.all_times.shares(level[:, 0].tolist())

    def by_member(self, first: int, last: int) -> tuple[tuple[Array, Array, Array], Numbers]:
        """Of each member, by samples: an F, a B (or I), all that it does; (member, samples - 1). The most samples."""
        there, back = self._exchanges_s(np.array(first), np.array(last))
        heads, most = self.times.by_member(lambda member: member.forward, first, last)
        backs, _ = self.times.by_member(lambda member: member.back, first, last)
        works, _ = self.all_times.by_member(lambda member: member.all_work, first, last)
        return (heads + there, backs + back, works + self.num_full * (there + back)), most

    def alone_s(self, first: Numbers, last: Numbers) -> Array:
        """What a step takes that has such a stage."""
        always = self.num_full * sum(self._exchanges_s(first, last))
        return self.largest_work_s(first, last) + always + self._tail_s(first, last)

    def _exchanges_s(self, first: Numbers, last: Numbers) -> tuple[Array, Array]:
        there, back = self.single.exchange_forward, self.single.exchange_backward
        return there[last] - there[first], back[last] - back[first]

    def _tail_s(self, first: Numbers, last: Numbers) -> Array:
        longest = np.maximum.reduce([m.whole_back[last] - m.whole_back[first] for m in self.times.members])
        in_time_s = max(member.back_part for member in self.times.members) * self.upper_s / self.num_full
        _, back = self._exchanges_s(first, last)
        update_s, sum_s = self.single.after_s(
            first, last, self.single.updates.least(first, last), np.minimum(longest, in_time_s) + back
        )
        return update_s + sum_s
