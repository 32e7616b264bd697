"""Pipelines of like stages: p balanced stages x d replicas, for the first answers of a search.

Given       a chain of cuts; devices of each kind, told apart by number alone; M micro-batches of one size; columns
                a stage on d devices of a kind, or on a part of every kind                                ``Column``
                a block of 2, 4, 8 stages that share hosts, each with a part of every host: activations stay on hosts,
                and sums of gradients cross
            t   of a column between two cuts: a micro-batch there and back, and over the boundary after it
            p   what a micro-batch keeps its busiest stage, or a network card, busy
            u   the sum of gradients, and the update
Try         each column as often as there are devices for, alone; and of several kinds one column each, in any order
Cut         such that the largest p is least                                                      ``balanced_places``
Rank        by the sum of t + (M - 1) times the largest p + the largest u

Which hosts devices are on is decided when stages are placed (:func:`placed`), and what they take then by
``first_answers``.  What a table over counts of devices adds, whose stages need not be alike (least trip under a pace,
after Zheng et al., Alpa, OSDI 2022, 5.2), is less than what it takes to fill.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, pairwise, permutations, product
from math import inf

import numpy as np

from planner.costs.layers.cost_table import Array
from planner.costs.stages.stage_bound import BoundedStages
from planner.ir.lazy import once_by
from planner.solvers.best_first.device_groups import Counts
from planner.solvers.best_first.graph_cuts import Handed, Numbers
from planner.solvers.best_first.message_bound import HandoverBound, HandoverBounds, handovers_of
from planner.solvers.best_first.priced_groups import GroupPrices, PricedGroup, RunMode
from planner.solvers.budget import NUMBER_S, Budget
from planner.solvers.candidates.candidate import DevicePool

MOST_CUTS = 128
"""That pipelines are cut at."""

MOST_PLACES = 48
"""Of cuts that are told apart where pipelines are ranked."""

BLOCKS = (2, 4, 8)
"""Stages that share hosts."""

MOST_ALIKE = 64
"""Choices of a column for every kind, of a way to cut the batch; they come in every order."""

MOST_COLUMNS = 8
"""Of a way to cut the batch."""

_FURTHEST = 3.0  # in times of the most promising one
_NUMBERS_OF_A_STAGE = 5  # that are looked at for a column between two cuts
_NUMBERS_OF_A_PAIR = 0.25  # of places, where stages are balanced: for each of them


@dataclass(frozen=True, slots=True)
class ColumnDevices:
    """The devices of a column.

    Attributes:
        devices: of each kind, in the order of pools.
        stages: how many share them.
    """

    devices: tuple[int, ...]
    stages: int = 1


@dataclass(frozen=True, slots=True)
class LikePipeline:
    """Columns one after another, and about what their step takes."""

    step_s: float
    columns: tuple[ColumnDevices, ...]


def placed(columns: Sequence[ColumnDevices], pools: Sequence[DevicePool]) -> tuple[Counts, ...] | None:
    """The devices of each stage by pool, hosts whole where a column is as large as one; None if there are too few."""
    left = [len(pool.ranks) for pool in pools]
    members: dict[str, list[int]] = {}
    for number, pool in enumerate(pools):
        members.setdefault(pool.kind, []).append(number)
    by_stage: list[Counts] = []
    for column in columns:
        counts = [0] * len(pools)
        for numbers, wanted in zip(members.values(), column.devices, strict=True):
            enough = next((number for number in numbers if left[number] >= wanted), None)
            for number in numbers if enough is None else [enough]:
                counts[number] = min(left[number], wanted)
                left[number] -= counts[number]
                wanted -= counts[number]
            if wanted:
                return None
        if any(count % column.stages for count in counts):
            return None
        by_stage += [tuple(count // column.stages for count in counts)] * column.stages
    return tuple(by_stage)


@dataclass(frozen=True, slots=True, eq=False)
class _Choice:
    """Devices of a column, and the group of its first stage; see ``LikeStages._alike_s``."""

    alike_s: float
    places: ColumnDevices
    mode: RunMode
    group: PricedGroup


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """What stages on given devices take, by first and last place of the chain.

    Attributes:
        places: their devices; the stages.
        trip_s: [places, places] a micro-batch there and back, and over the next boundary.
        pace_s: [places, places] what a micro-batch keeps the busiest stage or card busy; infinite where there is none.
        tail_s: [places, places] sums of gradients and updates after the last backward.
    """

    places: ColumnDevices
    trip_s: Array
    pace_s: Array
    tail_s: Array


@dataclass(eq=False)
class LikeStages:
    """Those of one way to cut the batch.

    Attributes:
        budget: in which its work is counted.
        cuts: that follow one another, at most ``MOST_CUTS``.
        chain: some of ``cuts``, spread as evenly; places are numbers of these.
    """

    prices: GroupPrices
    budget: Budget
    links: HandoverBounds = field(init=False)
    cuts: Numbers = field(init=False)
    chain: Numbers = field(init=False)

    def __post_init__(self) -> None:
        self.links = handovers_of(self.prices)
        self.cuts = np.array(self.prices.cuts.chain(self._work_s, MOST_CUTS))
        places = np.linspace(0, len(self.cuts) - 1, min(MOST_PLACES, len(self.cuts)))
        self.chain = self.cuts[np.round(places).astype(np.int64)]

    @cached_property
    def _work_s(self) -> Array:
        """By cut, all work before it on the fastest kind; where that is not known, as if every cut were as much."""
        work_s = self.prices.cuts.sums(self.prices.capacity_s().min(axis=0))
        return work_s if np.isfinite(work_s).all() and work_s[-1] > 0 else np.arange(len(work_s), dtype=np.float64)

    @cached_property
    def choices(self) -> list[_Choice]:
        """All columns that can be priced, the most promising first."""
        choices = []
        for places in self._places():
            for mode, group in self._groups(places).items():
                choices.append(_Choice(self._alike_s(places, group), places, mode, group))
        return sorted(choices, key=lambda choice: choice.alike_s)

    @cached_property
    def pipelines(self) -> list[LikePipeline]:
        """Of like columns on all devices of their kind, or of one for each kind, in any order."""
        pipelines = list[LikePipeline]()
        for columns in self._columns.values():
            by_kinds: dict[tuple[bool, ...], list[Column]] = {}
            for column in columns:
                by_kinds.setdefault(tuple(map(bool, column.places.devices)), []).append(column)
            of_one_kind = [some for kinds, some in by_kinds.items() if sum(kinds) == 1]
            several = islice(product(*of_one_kind), MOST_ALIKE if len(of_one_kind) > 1 else 0)
            orders = [(column,) for column in columns]
            for order in [*orders, *(order for chosen in several for order in permutations(chosen))]:
                pipelines += self._in_turn(order)
        return pipelines

    def _in_turn(self, columns: Sequence[Column]) -> Iterator[LikePipeline]:
        """As many of each as there are devices and places for, if that may be; balanced."""
        most = min(self.prices.freedom.max_stages or len(self.chain), len(self.chain) - 1)
        row = list[Column]()
        for column in columns:
            row += [column] * min(self._most(column.places), (most - len(columns) + 1) // column.places.stages)
        if sum(column.places.stages for column in row) > most or len(set(map(id, row))) < len(columns):
            return
        self.budget.spend(NUMBER_S * _NUMBERS_OF_A_PAIR * len(row) * len(self.chain) ** 2)
        places = balanced_places([column.pace_s for column in row])
        if places is not None:
            own = [(column, ends) for column, ends in zip(row, pairwise(places), strict=True)]
            trip_s = sum(float(column.trip_s[ends]) for column, ends in own)
            pace_s = max(float(column.pace_s[ends]) for column, ends in own)
            tail_s = max(float(column.tail_s[ends]) for column, ends in own)
            step_s = trip_s + (self.prices.num_microbatches - 1) * pace_s + tail_s
            yield LikePipeline(step_s, tuple(column.places for column in row))

    @cached_property
    def _columns(self) -> Mapping[RunMode, Sequence[Column]]:
        """The most promising ones, by mode."""
        columns: dict[RunMode, list[Column]] = {}
        for choice in self._promising():
            self.budget.spend(NUMBER_S * _NUMBERS_OF_A_STAGE * len(self.chain) ** 2)
            columns.setdefault(choice.mode, []).append(self._column(choice))
        return columns

    def _promising(self) -> Iterator[_Choice]:
        """The most promising columns, as many of each kind of device and of every kind together."""
        by_kinds: dict[tuple[bool, ...], list[_Choice]] = {}
        for choice in self.choices:
            by_kinds.setdefault(tuple(map(bool, choice.places.devices)), []).append(choice)
        for choices in by_kinds.values():
            for choice in choices[:MOST_COLUMNS]:
                if choice.alike_s <= _FURTHEST * choices[0].alike_s:
                    yield choice

    def _alike_s(self, places: ColumnDevices, group: PricedGroup) -> float:
        """The step of a pipeline of such columns alone, were all of its stages alike."""
        whole = group.stage(np.array([0]), np.array([self.prices.cuts.last]))
        depth = min(self._most(places) * places.stages, self.prices.cuts.last)
        work_s = float(whole.all_work_s[0])
        count = self.prices.num_microbatches
        return work_s / depth * (1 + (depth - 1) / count) + float(whole.tail_s[0]) / depth

    @property
    def _host(self) -> int:
        return max(len(pool.ranks) for pool in self.prices.pools)

    @property
    def _counts(self) -> tuple[int, ...]:
        return tuple(self.prices.devices_by_kind().values())

    def _most(self, places: ColumnDevices) -> int:
        """Columns that there are devices for."""
        return min(count // size for count, size in zip(self._counts, places.devices, strict=True) if size)

    def _places(self) -> Iterator[ColumnDevices]:
        """Parts of a host, whole hosts, and parts of all kinds; none so small that most devices could not be used."""
        counts = self._counts
        host = self._host
        may_replicate = self.prices.freedom.may_replicate
        for kind, count in enumerate(counts):
            parts = [size for size in range(1, host) if host % size == 0] if may_replicate else [1]
            whole = [*(host * number for number in _numbers(count // host)), count] if may_replicate else []
            for size in sorted({*parts, *whole}):
                devices = tuple(size * (other == kind) for other in range(len(counts)))
                if size <= count < 2 * size * len(self.chain) or not may_replicate:
                    yield ColumnDevices(devices)
                    yield from (ColumnDevices(devices, b) for b in BLOCKS if size > host and host % b == 0)
        for part in _numbers(min(counts)) if len(counts) > 1 and may_replicate else ():
            if part < len(self.chain):
                yield ColumnDevices(tuple(count // part for count in counts))

    def _groups(self, places: ColumnDevices) -> Mapping[RunMode, PricedGroup]:
        """A column's stage, by mode; none where it cannot be priced."""
        if sum(places.devices) > places.stages * self.prices.micro_batches[0] and not self.prices.throughout.any():
            return {}
        stages = placed((places,), self.prices.pools)
        return self.prices.quickest(stages[0]) if stages else {}

    def _stage_after(self, choice: _Choice) -> PricedGroup | None:
        """A stage after a column: one like its own, else the first device that is left; None: there is none."""
        pools = self.prices.pools
        stages = placed((choice.places, choice.places), pools)
        if stages is None:
            own = placed((choice.places,), pools) or ()
            used = [sum(counts) for counts in zip(*own, strict=True)]
            left = [len(pool.ranks) > count for pool, count in zip(pools, used, strict=True)]
            if not any(left):
                return None
            stages = (tuple(int(number == left.index(True)) for number in range(len(pools))),)
        return self.prices.quickest(stages[-1]).get(choice.mode)

    @once_by(lambda _, source, destination: (source.counts, source.shares, destination.counts, destination.shares))
    def message(self, source: PricedGroup, destination: PricedGroup) -> HandoverBound:
        """Between two stages on such groups: as ``links`` say, or as long as its part of their loads."""
        link = self.links.between(source, destination)
        count = self.prices.num_microbatches
        forward_s = np.maximum(link.forward_s, link.load_forward_s / count)
        backward_s = np.maximum(link.backward_s, link.load_backward_s / count)
        return replace(link, forward_s=forward_s, least_forward_s=forward_s, least_backward_s=backward_s)

    @once_by(lambda _, source, destination: (source.counts, source.shares, destination.counts, destination.shares))
    def on_cards(self, source: PricedGroup, destination: PricedGroup) -> tuple[Array, Array]:
        """For each byte of a sample: how long outputs and gradients keep network cards busy (``HandoverBounds``)."""
        return self.links.on_cards(source, destination, Handed(0, 1, 1.0, 1.0, has_gradient=True))

    @once_by(lambda _, group: group.alike)
    def stages(self, group: PricedGroup) -> BoundedStages:
        """The group's, between any two of ``cuts``."""
        ends = self.cuts[:, None], self.cuts[None, :]
        stage = group.stage(*ends)
        return replace(stage, window=np.where(self.prices.cuts.inside[ends], stage.window, 0))

    def _column(self, choice: _Choice) -> Column:
        """The column of stages on a group and others like it."""
        places = choice.places
        group = choice.group
        count = self.prices.num_microbatches
        stages = group.stage(self.chain[:, None], self.chain[None, :])
        trip_s, there_s, back_s = self._across(group, self._stage_after(choice))
        inside_s = self._across(group, group)[0] if places.stages > 1 else trip_s
        part = self._parts[places.stages]
        here = np.arange(len(self.chain))[:, None]
        window = stages.window[here, part]
        is_stage = self.prices.cuts.inside[np.ix_(self.chain, self.chain)] & (window > 0)
        busy_s = np.maximum(stages.all_work_s / places.stages, stages.all_work_s[here, part]) / count
        return Column(
            places=places,
            trip_s=stages.forward_s + stages.backward_s + (places.stages - 1) * inside_s.mean() + trip_s,
            pace_s=np.where(is_stage, np.maximum(busy_s, there_s[None, :] + back_s[:, None]), inf),
            tail_s=stages.tail_s,
        )

    @cached_property
    def _parts(self) -> dict[int, Numbers]:
        """By stages of a block, between two places: where its first stage ends, were all as much work."""
        work_s = self._work_s[self.chain]
        before_s = work_s[:, None]
        after_s = work_s[None, :]
        each = {stages: before_s + (after_s - before_s) / stages for stages in (1, *BLOCKS)}
        return {stages: np.clip(np.searchsorted(work_s, ends_s), 0, len(work_s) - 1) for stages, ends_s in each.items()}

    def _across(self, source: PricedGroup, destination: PricedGroup | None) -> tuple[Array, Array, Array]:
        """By place of the boundary, wherever the stage before begins; nothing where there is no other stage.

        A micro-batch there and back, and how busy it keeps the channel or card, there and back.
        """
        if destination is None:  # nor need there be a link
            nothing = np.zeros(len(self.chain))
            return nothing, nothing, nothing
        cuts = self.prices.cuts
        count = self.prices.num_microbatches
        crossing = cuts.crossing_of[cuts.content[self.chain, cuts.last], 0, self.chain]
        is_handed = crossing >= 0
        returns = is_handed & self.prices.returns()[crossing]
        message = self.message(source, destination)
        forward_s = np.where(is_handed, message.forward_s[crossing], 0.0)
        backward_s = np.where(returns, message.least_backward_s[crossing], 0.0)
        load_forward_s = np.where(is_handed, message.load_forward_s[crossing], 0.0) / count
        load_backward_s = np.where(returns, message.load_backward_s[crossing], 0.0) / count
        return forward_s + backward_s, load_forward_s, load_backward_s


def _numbers(most: int) -> list[int]:
    """Those that divide ``most``, and powers of two."""
    return [number for number in range(1, most + 1) if most % number == 0 or number & (number - 1) == 0]


def balanced_places(costs: Sequence[Array]) -> list[int] | None:
    """Places of a chain's cuts, both ends included, such that the largest cost of a stage is least; None if infinite.

    Args:
        costs: by stage, of first and last place.
    """
    above = np.triu(np.ones(costs[0].shape, dtype=bool), 1)
    best = np.where(above, costs[-1], inf)[:, -1]
    chosen = []
    for cost in reversed(costs[:-1]):
        both = np.maximum(np.where(above, cost, inf), best[None, :])
        chosen.append(both.argmin(axis=1))
        best = both.min(axis=1)
    places = [0]
    for choice in reversed(chosen):
        places.append(int(choice[places[-1]]))
    return [*places, len(above) - 1] if np.isfinite(best[0]) else None
