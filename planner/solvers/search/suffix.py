"""The suffix DP: for every cut and every set of remaining devices, bounds on what the rest of the pipeline takes.

The program it solves is in :mod:`planner.solvers.suffix_dp`.  Everything is a matrix over pairs of cuts, so that one
numpy expression treats all stages that a group of devices could be.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from planner.costs.tables import Array
from planner.solvers.search.bounds import Bounds, Levels, Remaining, canonical
from planner.solvers.search.crossing import Flags
from planner.solvers.search.groups import Group
from planner.solvers.search.windows import Window, range_of


@dataclass(frozen=True, slots=True, eq=False)
class Suffix:
    """Bounds for what starts at each cut, with given devices left.  Each is (budget level, cut).

    Attributes:
        begin_s: from the first F of the first stage to the end of its first B.
        finish_s: from the start of the last F of the first stage to its last B.
        end_s: G: from the first F of the first stage to its last B.
        total_s: V: from the first F of the first stage to the end of the step.
        free_s: the step, whenever the first stage starts: stages that read nothing from it need not wait for it.
    """

    begin_s: Array
    finish_s: Array
    end_s: Array
    total_s: Array
    free_s: Array

    def labels(self) -> tuple[Array, Array, Array, Array, Array]:
        """All five."""
        return self.begin_s, self.finish_s, self.end_s, self.total_s, self.free_s

    def at(self, level: Levels, cut: Levels) -> Suffix:
        """The bounds picked by level and cut, elementwise."""
        return Suffix(*(values[level, cut] for values in self.labels()))


@dataclass(slots=True, eq=False)
class Suffixes:
    """The DP's table for one way to cut the batch and one schedule; filled as it is asked for."""

    bounds: Bounds
    _known: dict[Remaining, Suffix] = field(init=False, default_factory=dict, repr=False)

    def of(self, remaining: Remaining) -> Suffix:
        """The bounds with the devices ``remaining``."""
        key = canonical(self.bounds.pools, remaining)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._solve(key)
        return found

    def stage(self, group: Group, left: Remaining, level: Levels, rows: slice) -> Suffix:
        """What ``group`` as first stage takes with the best of what may follow, by (first cut in ``rows``, last cut).

        Args:
            left: devices for what follows.
            level: budget of the stage, by the same cuts; where it is 0 the stage does not fit.
        """
        bounds = self.bounds
        last = len(bounds.stretches.cuts) - 1
        cut = np.broadcast_to(np.arange(last + 1), level.shape)
        fits = group.allowed[rows] & (level > 0) & (cut > np.arange(last + 1)[rows, None])
        if not any(left):
            return _where(fits & (cut == last), self._last(group, left, rows))
        linked = bounds.stretches.crossing.linked[rows]
        after = np.where(linked, bounds.level_after(level), bounds.any_level)
        followed = self._followed(group, left, self.of(left).at(after, cut), rows)
        return _where(fits, _choose(cut == last, self._last(group, left, rows), followed))

    def _solve(self, remaining: Remaining) -> Suffix:
        bounds = self.bounds
        shape = (bounds.num_levels, len(bounds.stretches.cuts))
        best = [np.full(shape, np.inf) for _ in range(5)]
        for group, left in bounds.used(remaining):
            budget = bounds.budgets[group.pool, group.size]
            for level in range(1, bounds.num_levels):
                found = self.stage(group, left, np.minimum(budget, level), slice(None))
                for label, values in zip(best, found.labels(), strict=True):
                    label[level] = np.minimum(label[level], values.min(axis=1))
        return Suffix(*best)

    def _last(self, group: Group, left: Remaining, rows: slice) -> Suffix:
        """The group's stage with nothing known of what follows."""
        forward, backward, work = group.head_s[rows], group.back_s[rows], self.bounds.work_s(group)[rows]
        least = self._window(1, self.bounds.deepest(left))[0]
        total_s = work + group.last_s[rows]
        begin_s, finish_s = least.early * forward + backward, forward + least.late * backward
        return Suffix(begin_s, finish_s, work, total_s, total_s)

    def _followed(self, group: Group, left: Remaining, behind: Suffix, rows: slice) -> Suffix:
        """The group's stage with the stages ``behind`` it; as in :mod:`planner.solvers.search.refine`."""
        bounds, crossing = self.bounds, self.bounds.stretches.crossing
        there, path, back = (seconds[rows] for seconds in bounds.least_link_s(group, left))
        forward, backward, work = group.head_s[rows], group.back_s[rows], bounds.work_s(group)[rows]
        alone = self._last(group, left, rows)
        first_backward = forward + there + behind.begin_s + back
        last_backward = path + behind.finish_s + back + backward
        end_s = np.maximum(work, forward + there + behind.end_s + back + backward)
        widest = self._window(1, bounds.deepest(left))[1]
        if widest.early <= len(bounds.micro_batches):
            before = widest.early * group.longest_head_s[rows] + group.overhead_s
            after = widest.late * group.longest_back_s[rows] + group.overhead_s
            end_s = np.maximum.reduce([end_s, first_backward + work - before, work - after + last_backward])
            if widest.early < len(bounds.micro_batches):
                end_s = np.maximum(end_s, first_backward + work - before - after + last_backward)
        back_too = crossing.has_gradient[rows]
        end_s = np.where(back_too, end_s, work)
        total_s = end_s + group.last_s[rows]
        total_s = np.where(crossing.linked[rows], np.maximum(total_s, forward + there + behind.total_s), total_s)
        return Suffix(
            np.where(back_too, np.maximum(alone.begin_s, first_backward + backward), alone.begin_s),
            np.where(back_too, np.maximum(alone.finish_s, forward + last_backward), alone.finish_s),
            end_s,
            total_s,
            np.maximum(total_s, behind.free_s),
        )

    def _window(self, fewest: int, most: int) -> tuple[Window, Window]:
        """The least and the greatest window of a stage; of a schedule without windows nothing is known."""
        count = len(self.bounds.micro_batches)
        return range_of(self.bounds.schedule, fewest, most, count) or (Window(1, 1), Window(count + 1, count + 1))


def _choose(condition: Flags, yes: Suffix, no: Suffix) -> Suffix:
    return Suffix(*(np.where(condition, a, b) for a, b in zip(yes.labels(), no.labels(), strict=True)))


def _where(condition: Flags, found: Suffix) -> Suffix:
    return Suffix(*(np.where(condition, values, np.inf) for values in found.labels()))
