"""The suffix DP: for every cut and every set of unused devices, what the rest of the pipeline takes at least.

The program it solves is in :mod:`planner.solvers.best_first.solver`.  For each first group of the suffix there is a
label of each sort (:class:`Labels`), the least over all continuations; (min, max, +) algebra on matrices of first and
last cut.  With an upper bound on the step, only cuts are looked at before and after which the work fits into the
devices used and left.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np

from planner.costs.layers.cost_table import Array
from planner.costs.stages.stage_bound import BoundedStages, columnwise, only
from planner.ir.lazy import once, once_by
from planner.solvers.best_first.device_groups import Counts, DeviceStates, GroupOption
from planner.solvers.best_first.graph_cuts import Flags, Numbers
from planner.solvers.best_first.message_bound import HandoverBounds
from planner.solvers.best_first.priced_groups import GroupPrices, PricedGroup, Version
from planner.solvers.best_first.recurrence import (
    END,
    SORTS,
    STEP,
    Labels,
    across,
    alone,
    labels_of,
    prepend,
    rounds_of,
    stacked,
)
from planner.solvers.budget import NUMBER_S, Budget

_NUMBERS_OF_A_STAGE = 40
"""That are looked at for the labels of one stage, about."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupChoice:
    """A group that may come first, with what is left for the others."""

    group: PricedGroup
    option: GroupOption


_NUMBERS_AT_ONCE = 20_000  # of a table, for all choices that may follow: more do not fit into a cache


@dataclass(eq=False)
class Suffixes:
    """The DP's tables for one way to cut the batch; filled as they are asked for.

    Attributes:
        upper_s: steps from here on are of no interest.
        budget: for the tables; building them raises OutOfTimeError when it is over.
    """

    prices: GroupPrices
    devices: DeviceStates
    links: HandoverBounds
    upper_s: float = inf
    budget: Budget | None = None

    @cached_property
    def _weight_and_speed(self) -> tuple[Array, Array]:
        """By cut, the work before it as seconds of the first kind of device; by pool, a device's most a second."""
        kinds = list(self.prices.devices_by_kind())
        least = self.prices.capacity_s()
        usable = np.isfinite(least).all(axis=1)
        reference = least[usable.argmax()] if usable.any() else np.zeros(least.shape[1])
        speeds = dict.fromkeys(kinds, inf)
        for kind, seconds in zip(np.array(kinds)[usable].tolist(), least[usable], strict=True):
            ratio = np.divide(reference, seconds, out=np.zeros_like(reference), where=reference > 0)
            speeds[kind] = float(ratio.max(initial=1e-12))
        return self.prices.cuts.sums(reference), np.array([speeds[pool.kind] for pool in self.prices.pools])

    def _starts(self, state: Counts) -> Numbers:
        """The cuts at which a suffix on ``state`` may start."""
        weight, _ = self._weight_and_speed
        if not np.isfinite(self.upper_s):
            return np.arange(len(weight) - 1)
        used = np.array(self.devices.all_unused) - np.array(state)
        may_start = (self._done(used) >= weight) & self._fits_after(state)
        may_start[-1] = False
        if not used.any():
            may_start[1:] = False
        return np.flatnonzero(may_start)

    def _fits_after(self, state: Counts) -> Flags:
        """By cut, whether the devices ``state`` can do all layers after it in time."""
        weight, _ = self._weight_and_speed
        if not np.isfinite(self.upper_s):
            return np.ones(len(weight), dtype=bool)
        return np.asarray(self._done(np.array(state)) >= weight[-1] - weight)

    def _done(self, counts: Numbers) -> float:
        weight, speed = self._weight_and_speed
        own = counts > 0
        return float((speed[own] * counts[own]).sum() * self.upper_s * (1 + 1e-9) + 1e-12 * weight[-1])

    @property
    def sorts(self) -> tuple[str, ...]:
        """Those of labels that differ: on one host no sum has to wait for another."""
        return SORTS if self.links.has_cards else SORTS[:-1]

    def choices(self, state: Counts) -> tuple[GroupChoice, ...]:
        """The groups that may come first, those with recompute apart."""
        return tuple(
            GroupChoice(group, option)
            for option in self.devices.options(state)
            for group in self.prices.versions(option.group)
        )

    @once
    def of(self, state: Counts) -> tuple[tuple[GroupChoice, ...], Array]:
        """The choices with the devices ``state``, and their labels by (sort of label, choice, first slot)."""
        choices = self.choices(state)
        firsts = self._starts(state)
        labels = np.full((len(self.sorts), len(choices), 1 + int(self.prices.cuts.slots.max())), inf)
        for number, choice in enumerate(choices):
            if self.budget is not None:
                self.budget.require()
            if len(firsts):
                self._fill(labels[:, number], choice, firsts)
        return choices, labels

    def root_s(self) -> float:
        """What every pipeline takes at least."""
        _, labels = self.of(self.devices.all_unused)
        slots = self.prices.cuts.slots[0]
        return float(labels[[END, STEP]][..., slots[slots >= 0]].max(axis=0).min(initial=inf))

    def stages(self, choice: GroupChoice, first: Numbers, last: Numbers) -> tuple[BoundedStages, Labels]:
        """Stages of ``choice`` between the cuts ``first`` and ``last``, elementwise, with the best that may follow.

        Labels are infinite where the stage is not possible.
        """
        group = choice.group
        cuts = self.prices.cuts
        count = self.prices.num_microbatches
        stage = group.stage(first, last)
        is_end = last == cuts.last
        may_follow = any(choice.option.left)
        least, most = self.prices.freedom.in_flight(1 + sum(choice.option.left), count)
        window = np.minimum(stage.window, most)
        fits = cuts.inside[first, last] & (window >= least)
        fits &= is_end if not may_follow else True
        rounds = rounds_of(self.prices.num_counted, window)
        card_s = self.card_s(choice, stage)
        labels = stacked(alone(stage, rounds, card_s), self.sorts)
        if may_follow and not is_end.all():
            after = self._best_after(choice)
            by_reader = [
                self._followed(choice, stage, rounds, after, cuts.crossing_of[reader, first, last])
                for reader in range(len(cuts.crossing_of))
            ]
            followed = np.minimum.reduce(by_reader)
            fits &= is_end | np.isfinite(followed[END])
            labels = np.where(is_end, labels, followed)
        if group.any_shares is not None:
            labels[STEP] = np.maximum(labels[STEP], group.any_shares.alone_s(first, last))
        return stage, labels_of(np.where(fits, labels, inf))

    def card_s(self, choice: GroupChoice, stage: BoundedStages) -> Array:
        """How long sums of gradients keep network cards busy, in the mean of all hosts."""
        hosts = self.links.hosts
        own = {hosts[pool] for pool, count in enumerate(choice.option.group) if count}
        return stage.card_s * (len(own) / len(set(hosts)))

    def _followed(
        self, choice: GroupChoice, stage: BoundedStages, rounds: Array, after: Labels, crossing: Numbers
    ) -> Array:
        """The labels of stages with the best of one sort of next stage: (sort of label, first, last)."""
        prices = self.prices
        reads = prices.cuts.crossings.linked[crossing]
        returns = prices.returns()[crossing]
        overhead_s = prices.num_microbatches * choice.group.prices.overhead_s * returns
        waiting = replace(stage, work_s=stage.work_s + overhead_s)
        best = only(after, crossing)
        labels = stacked(prepend(waiting, best, rounds, self.card_s(choice, stage), reads, returns), self.sorts)
        possible = (crossing >= 0) & np.isfinite(best.end_s)
        return np.where(possible, labels, inf)

    def pairs(self, choice: GroupChoice, firsts: Numbers) -> tuple[Numbers, Numbers]:
        """The stages that the choice may have in time: first cuts, each of ``firsts``, in order, and last cuts."""
        lasts = np.flatnonzero(self._fits_after(choice.option.left))
        rows, columns = np.nonzero(self._in_time(choice.group)[np.ix_(firsts, lasts)])
        return firsts[rows], lasts[columns]

    @once_by(lambda self, group: id(group.prices))
    def _in_time(self, group: PricedGroup) -> Flags:
        """By first and last cut, whether the group does the layers between in less than the upper bound."""
        inside = self.prices.cuts.inside
        if not np.isfinite(self.upper_s):
            return inside
        every = np.arange(len(inside))
        return inside & (group.largest_work_s(every[:, None], every[None, :]) <= self.upper_s)

    def _fill(self, labels: Array, choice: GroupChoice, firsts: Numbers) -> None:
        """Writes the choice's labels: (sort of label, slot)."""
        cuts = self.prices.cuts
        first, last = self.pairs(choice, firsts)
        if not len(first):
            return
        if self.budget is not None:
            self.budget.spend(_NUMBERS_OF_A_STAGE * NUMBER_S * len(first))
        _, own_labels = self.stages(choice, first, last)
        possible = own_labels.step_s <= self.upper_s
        first = first[possible]
        last = last[possible]
        if not len(first):
            return
        slots = cuts.slots[first, cuts.content[first, last]]
        own = stacked(only(own_labels, possible), self.sorts)
        if cuts.slots.shape[1] > 1:
            order = np.argsort(slots, kind="stable")
            slots = slots[order]
            own = own[:, order]
        starts = np.flatnonzero(np.concatenate(([True], slots[1:] != slots[:-1])))
        labels[:, slots[starts]] = np.minimum.reduceat(own, starts, axis=1)

    @once_by(lambda self, choice: (choice.option.left, choice.option.renamed, choice.group.shares))
    def _best_after(self, choice: GroupChoice) -> Labels:
        """The best that may follow, by crossing.

        From the end of the F before it to the start of the B before it; ``end_s`` to the end of the step.
        """
        slots = self.prices.cuts.crossings.slot
        others, labels = self.of(choice.option.left)
        best = np.full((len(self.sorts), len(slots)), inf)
        source = self.renamed(choice)
        possible = np.flatnonzero(np.isfinite(labels[END]).any(axis=1))
        some = max(1, _NUMBERS_AT_ONCE // max(1, len(slots)))
        for numbers in (possible[start : start + some] for start in range(0, len(possible), some)):
            firsts = labels_of(labels[:, numbers].take(slots, axis=2))
            links = [self.links.between(source, others[number].group) for number in numbers]
            link = columnwise(lambda *columns: np.array(columns), *links)
            least = stacked(across(firsts, link), self.sorts).min(axis=1)
            np.minimum(best, least, out=best)
        return labels_of(best)

    def renamed(self, choice: GroupChoice) -> PricedGroup:
        """The group with its hosts called as in what is left."""
        return self.version(choice.option.renamed, choice.group.version)

    def version(self, counts: Counts, version: Version) -> PricedGroup:
        """The devices ``counts`` as a stage that is run in one way."""
        return next(group for group in self.prices.versions(counts) if group.version == version)
