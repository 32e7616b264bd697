"""The table of first answers: pipelines none of whose stages takes longer than a pace, over counts of devices.

Given       a chain of cuts; devices of each kind, told apart by their number alone, in units; M micro-batches of one
            size; columns                                                                                  ``Column``
                a stage from cut i to cut j on d devices of a kind, or on a part of every kind
                a block of 2, 4, 8 stages that share hosts, each with a part of every host: activations stay on hosts,
                and sums of gradients cross
            t   of a column: a micro-batch there and back, and over the boundary behind it
            p   what a micro-batch keeps its busiest stage, or a network card, busy
            W   the most micro-batches that memory lets its stages keep
Minimise    for a pace x, behind every cut i, for every count u of devices left

    E(i, u) = min over columns and j of t + E(j, u - d)    subject to  p <= x,  t + E(j, u - d) <= W x

for a stage that keeps W micro-batches begins W more only when the first has come back.  A step is about
E(0, D) + (M - 1) x + the longest sum of gradients with its update.  A few x are tried, from the pace of all devices
together upwards (Zheng et al., Alpa, OSDI 2022, 5.2).  Which hosts devices are on is decided when stages are placed
(:func:`placed`), and what they take then by ``first_answers``.

Where stages are limited in number, they are one more resource beside devices: a column takes as many as it has.

A block's stages are balanced by halves: the pace of b stages from i to j is the least over k of the larger of the pace
of b / 2 stages from i to k, and that from k to j.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, pairwise, permutations, product

import numpy as np

from planner.costs.candidate import Recomputes
from planner.costs.layers.cost_table import Array
from planner.costs.stages.stage_bound import BoundedStages
from planner.ir.lazy import once_by
from planner.solvers.best_first.device_groups import Counts
from planner.solvers.best_first.graph_cuts import Handed, Numbers
from planner.solvers.best_first.message_bound import HandoverBound, HandoverBounds
from planner.solvers.best_first.priced_groups import GroupPrices, PricedGroup
from planner.solvers.budget import NUMBER_S, Budget
from planner.solvers.candidates.candidate import DevicePool

MOST_UNITS = 32
"""Of one kind of device."""

MOST_STATES = 150
"""Counts of devices of all kinds that are told apart."""

PACES = (1.03, 1.12, 1.25, 1.5, 2.0, 3.5)
"""In times of the pace of all devices together."""

MOST_CUTS = 128
"""That pipelines are cut at."""

MOST_PLACES = 48
"""Of cuts that the table tells apart."""

BLOCKS = (2, 4, 8)
"""Stages that share hosts."""

MOST_ALIKE = 64
"""Choices of a column for every kind, of a way to cut the batch; they come in every order."""

MOST_TABLES = 4
"""Ways to cut the batch."""

MOST_COLUMNS = 8
"""Of a way to cut the batch."""

_FURTHEST = 3.0  # in times of the most promising one
_NUMBERS_OF_A_STAGE = 12  # that are looked at for a column between two cuts
_NUMBERS_OF_A_PAIR = 0.25  # of places, where stages are balanced: for each of them
_NUMBERS_OF_AN_ENTRY = 0.15  # for one in a table
_PACE_S = 4e-4  # for one pace, whatever the table


@dataclass(frozen=True, slots=True)
class Places:
    """The devices of a column.

    Attributes:
        devices: of each kind, in the order of pools.
        stages: how many share them.
    """

    devices: tuple[int, ...]
    stages: int = 1


@dataclass(frozen=True, slots=True)
class PacedPipeline:
    """A pipeline out of the table.

    Attributes:
        trip_s: of its first micro-batch, there and back.
        step_s: about.
        columns: their devices, along it.
    """

    trip_s: float
    step_s: float
    columns: tuple[Places, ...]


def placed(columns: Sequence[Places], pools: Sequence[DevicePool]) -> tuple[Counts, ...] | None:
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


def units_of(counts: Sequence[int], host: int) -> tuple[int, ...]:
    """How many devices of each kind are told apart at a time: parts of a host, then 1, 2, 4, ... hosts."""
    sizes = [size for size in range(1, host) if host % size == 0]
    most = min(MOST_UNITS, int(MOST_STATES ** (1 / len(counts))) - 1)
    units = []
    for count in counts:
        more = iter([*sizes, *(host << power for power in range(count.bit_length()))])
        units.append(next((unit for unit in more if count <= unit * most), count))
    return tuple(units)


@dataclass(frozen=True, slots=True, eq=False)
class _Choice:
    """Devices of a column, and the group of its first stage; see ``PaceTable._alike_s``."""

    alike_s: float
    places: Places
    version: tuple[Recomputes, bool]
    group: PricedGroup


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """What stages on given devices take, by first and last place of the chain.

    Attributes:
        places: their devices; the stages.
        takes: [kinds] units of each kind, then stages where they are limited.
        trip_s: [places, places] a micro-batch there and back, and over the boundary behind.
        pace_s: [places, places] what a micro-batch keeps the busiest stage or card busy; infinite where there is none.
        tail_s: [places, places] sums of gradients and updates behind the last backward.
        window: [places, places] the most micro-batches that every stage may keep.
    """

    places: Places
    takes: Numbers
    trip_s: Array
    pace_s: Array
    tail_s: Array
    window: Array


@dataclass(eq=False)
class PaceTable:
    """The table of one way to cut the batch.

    Attributes:
        budget: in which its work is counted.
        cuts: that follow one another, at most ``MOST_CUTS``.
        chain: some of ``cuts``, spread as evenly; places are numbers of these.
        units: devices of each kind that are told apart at a time.
        limits: units of each kind; then stages, where these are limited.
    """

    prices: GroupPrices
    budget: Budget
    links: HandoverBounds = field(init=False)
    cuts: Numbers = field(init=False)
    chain: Numbers = field(init=False)
    units: tuple[int, ...] = field(init=False)
    limits: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.links = HandoverBounds(self.prices)
        self.cuts = np.array(self.prices.cuts.chain(self._work_s, MOST_CUTS))
        places = np.linspace(0, len(self.cuts) - 1, min(MOST_PLACES, len(self.cuts)))
        self.chain = self.cuts[np.round(places).astype(np.int64)]
        counts = tuple(self.prices.devices_by_kind().values())
        self.units = units_of(counts, self._host)
        self.limits = tuple(count // unit for count, unit in zip(counts, self.units, strict=True))
        if self.prices.freedom.max_stages:
            self.limits = (*self.limits, self.prices.freedom.max_stages)

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
            for version, group in self._groups(places).items():
                choices.append(_Choice(self._alike_s(places, group), places, version, group))
        return sorted(choices, key=lambda choice: choice.alike_s)

    @cached_property
    def pipelines(self) -> list[PacedPipeline]:
        """For each pace the pipelines of least trip on all devices: of stages alone, and of blocks of each size."""
        by_stages: dict[tuple[object, int], list[Column]] = {}
        for version, columns in self._columns.items():
            for column in columns:
                by_stages.setdefault((version, column.places.stages), []).append(column)
        return [pipeline for columns in by_stages.values() for pipeline in self._paced(columns)]

    @cached_property
    def alike(self) -> list[PacedPipeline]:
        """Of like stages, or blocks, on all devices of their kind, kinds in any order."""
        pipelines = list[PacedPipeline]()
        for columns in self._columns.values():
            by_kinds: dict[tuple[bool, ...], list[Column]] = {}
            for column in columns:
                by_kinds.setdefault(tuple(map(bool, column.places.devices)), []).append(column)
            of_one_kind = [some for kinds, some in by_kinds.items() if sum(kinds) == 1]
            for chosen in islice(product(*of_one_kind), MOST_ALIKE):
                for order in permutations(chosen):
                    pipelines += self._in_turn(order)
        return pipelines

    def _in_turn(self, columns: Sequence[Column]) -> Iterator[PacedPipeline]:
        """As many of each as there are devices for, if that may be; balanced."""
        counts = tuple(self.prices.devices_by_kind().values())
        row = [column for column in columns for _ in range(_most(counts, column.places))]
        limit = self.prices.freedom.max_stages or len(self.chain)
        if not row or sum(column.places.stages for column in row) > limit:
            return
        self.budget.spend(NUMBER_S * _NUMBERS_OF_A_PAIR * len(row) * len(self.chain) ** 2)
        places = balanced_places([column.pace_s for column in row])
        if places is not None:
            own = [(column, ends) for column, ends in zip(row, pairwise(places), strict=True)]
            trip_s = sum(float(column.trip_s[ends]) for column, ends in own)
            pace_s = max(float(column.pace_s[ends]) for column, ends in own)
            tail_s = max(float(column.tail_s[ends]) for column, ends in own)
            step_s = trip_s + (len(self.prices.micro_batches) - 1) * pace_s + tail_s
            yield PacedPipeline(trip_s, step_s, tuple(column.places for column in row))

    @cached_property
    def _columns(self) -> Mapping[tuple[Recomputes, bool], Sequence[Column]]:
        """The most promising ones, by version."""
        columns: dict[tuple[Recomputes, bool], list[Column]] = {}
        for choice in self._promising():
            self.budget.spend(NUMBER_S * _NUMBERS_OF_A_STAGE * len(self.chain) ** 2)
            columns.setdefault(choice.version, []).append(self._column(choice))
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

    def _alike_s(self, places: Places, group: PricedGroup) -> float:
        """The step of a pipeline of such columns alone, were all of its stages alike."""
        whole = group.stage(np.array([0]), np.array([self.prices.cuts.last]))
        num_columns = _most(tuple(self.prices.devices_by_kind().values()), places)
        depth = min(num_columns * places.stages, self.prices.cuts.last)
        work_s, count = float(whole.all_work[0]), len(self.prices.micro_batches)
        return work_s / depth * (1 + (depth - 1) / count) + float(whole.tail[0]) / depth

    @property
    def _host(self) -> int:
        return max(len(pool.ranks) for pool in self.prices.pools)

    def least_pace_s(self) -> float:
        """Of all devices together."""
        seconds = self.prices.capacity_s().sum(axis=1)
        counts = self.prices.devices_by_kind().values()
        speed = sum(count / each for count, each in zip(counts, seconds, strict=True) if 0 < each < np.inf)
        return 1 / (speed * len(self.prices.micro_batches)) if speed else 0.0

    def _places(self) -> Iterator[Places]:
        counts = tuple(self.prices.devices_by_kind().values())
        if not self.prices.freedom.may_replicate:
            for kind in range(len(counts)):
                yield Places(tuple(int(other == kind) for other in range(len(counts))))
            return
        for kind, (unit, limit) in enumerate(zip(self.units, self.limits, strict=False)):
            for number in _numbers(limit):
                size = unit * number
                devices = tuple(size * (other == kind) for other in range(len(counts)))
                if size <= self._host or size % self._host == 0:
                    yield Places(devices)
                if size > self._host and size % self._host == 0:
                    yield from (Places(devices, stages) for stages in BLOCKS if self._host % stages == 0)
        if len(counts) > 1:
            for part in _numbers(min(self.limits[: len(counts)])):
                yield Places(
                    tuple(unit * (limit // part) for unit, limit in zip(self.units, self.limits, strict=False))
                )

    def _groups(self, places: Places) -> Mapping[tuple[Recomputes, bool], PricedGroup]:
        """A column's stage, by version; none where it cannot be priced."""
        if sum(places.devices) > places.stages * self.prices.micro_batches[0] and not self.prices.throughout.any():
            return {}
        stages = placed((places,), self.prices.pools)
        return self.prices.quickest(stages[0]) if stages else {}

    def _behind(self, choice: _Choice) -> PricedGroup | None:
        """A stage behind a column: one like its own, else the first device that is left; None: there is none."""
        pools = self.prices.pools
        stages = placed((choice.places, choice.places), pools)
        if stages is None:
            own = placed((choice.places,), pools) or ()
            used = [sum(counts) for counts in zip(*own, strict=True)]
            left = [len(pool.ranks) > count for pool, count in zip(pools, used, strict=True)]
            if not any(left):
                return None
            stages = (tuple(int(number == left.index(True)) for number in range(len(pools))),)
        return self.prices.quickest(stages[-1]).get(choice.version)

    @once_by(lambda _, source, destination: (source.counts, source.shares, destination.counts, destination.shares))
    def message(self, source: PricedGroup, destination: PricedGroup) -> HandoverBound:
        """Between two stages on such groups: as ``links`` say, or as long as its part of their loads."""
        link, count = self.links.between(source, destination), len(self.prices.micro_batches)
        there, back = np.maximum(link.there, link.load_there / count), np.maximum(link.back_all, link.load_back / count)
        return replace(link, there=there, path=there, back=back)

    @once_by(lambda _, source, destination: (source.counts, source.shares, destination.counts, destination.shares))
    def on_cards(self, source: PricedGroup, destination: PricedGroup) -> tuple[Array, Array]:
        """For each byte of a sample: how long outputs and gradients keep network cards busy (``HandoverBounds``)."""
        return self.links.on_cards(source, destination, Handed(0, 1, 1.0, 1.0, has_gradient=True))

    @once_by(lambda _, group: (id(group.prices), group.size > 1, id(group.allowed)))
    def stages(self, group: PricedGroup) -> BoundedStages:
        """The group's, between any two of ``cuts``."""
        ends = self.cuts[:, None], self.cuts[None, :]
        stage = group.stage(*ends)
        return replace(stage, window=np.where(self.prices.cuts.inside[ends], stage.window, 0))

    def _column(self, choice: _Choice) -> Column:
        """The column of stages on a group and others like it."""
        places, group, count = choice.places, choice.group, len(self.prices.micro_batches)
        stages = group.stage(self.chain[:, None], self.chain[None, :])
        trip_s, there_s, back_s = self._across(group, self._behind(choice))
        inside_s = self._across(group, group)[0] if places.stages > 1 else trip_s
        part = self._parts[places.stages]
        here = np.arange(len(self.chain))[:, None]
        window = stages.window[here, part]
        is_stage = self.prices.cuts.inside[np.ix_(self.chain, self.chain)] & (window > 0)
        busy_s = np.maximum(stages.all_work / places.stages, stages.all_work[here, part]) / count
        takes = [size // unit for size, unit in zip(places.devices, self.units, strict=True)]
        return Column(
            places=places,
            takes=np.array([*takes, places.stages][: len(self.limits)]),
            trip_s=stages.head + stages.back + (places.stages - 1) * inside_s.mean() + trip_s,
            pace_s=np.where(is_stage, np.maximum(busy_s, there_s[None, :] + back_s[:, None]), np.inf),
            tail_s=stages.tail,
            window=np.where(window < count, window, np.inf),
        )

    @cached_property
    def _parts(self) -> dict[int, Numbers]:
        """By stages of a block, between two places: where its first stage ends, were all as much work."""
        work_s = self._work_s[self.chain]
        before_s, after_s = work_s[:, None], work_s[None, :]
        each = {stages: before_s + (after_s - before_s) / stages for stages in (1, *BLOCKS)}
        return {stages: np.clip(np.searchsorted(work_s, ends_s), 0, len(work_s) - 1) for stages, ends_s in each.items()}

    def _across(self, source: PricedGroup, destination: PricedGroup | None) -> tuple[Array, Array, Array]:
        """By place of the boundary, wherever the stage before begins; nothing where there is no other stage.

        A micro-batch there and back, and how busy it keeps the channel or card, there and back.
        """
        cuts, count = self.prices.cuts, len(self.prices.micro_batches)
        row = cuts.column[cuts.content[self.chain, cuts.last], 0, self.chain]
        is_handed = (row >= 0) & (destination is not None)
        returns = is_handed & cuts.columns.has_gradient[row] & self.prices.freedom.trains
        message = self.message(source, destination or source)
        trip_s = np.where(is_handed, message.there[row], 0.0) + np.where(returns, message.back[row], 0.0)
        there_s = np.where(is_handed, message.load_there[row], 0.0) / count
        back_s = np.where(returns, message.load_back[row], 0.0) / count
        return trip_s, there_s, back_s

    def _paced(self, columns: Sequence[Column]) -> Iterator[PacedPipeline]:
        least_s = self.least_pace_s()
        table = Entries.of(columns, self.limits, PACES[-1] * least_s, len(self.prices.micro_batches))
        for pace in PACES:
            self.budget.spend(_PACE_S + NUMBER_S * _NUMBERS_OF_AN_ENTRY * len(table.trip_s) * len(table.counts))
            pipeline = table.pipeline(pace * least_s)
            if pipeline is not None:
                yield pipeline


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """The columns between all places, the first place of each in order.

    Attributes:
        columns: which there are.
        counts: [states, kinds] units of devices left, and stages left where they are limited; the last state has all.
        rest: [states, columns] the state behind a column; the number of states where it takes too many.
        column, first, last: [entries]
        trip_s, pace_s, tail_s, window: [entries] as of the column.
        num_places: of the chain.
        num_microbatches: M.
    """

    columns: Sequence[Column]
    counts: Numbers
    rest: Numbers
    column: Numbers
    first: Numbers
    last: Numbers
    trip_s: Array
    pace_s: Array
    tail_s: Array
    window: Array
    num_places: int
    num_microbatches: int

    @classmethod
    def of(
        cls, columns: Sequence[Column], limits: tuple[int, ...], most_pace_s: float, num_microbatches: int
    ) -> Entries:
        """Those of a pace of at most ``most_pace_s``."""
        shape = tuple(limit + 1 for limit in limits)
        counts = np.array(list(np.ndindex(*shape)))
        rest = np.full((len(counts), len(columns)), len(counts))
        for number, column in enumerate(columns):
            left = counts - column.takes
            is_enough = (left >= 0).all(axis=1)
            rest[is_enough, number] = np.ravel_multi_index(tuple(left[is_enough].T), shape)
        pace_s = np.array([column.pace_s for column in columns])
        first, own_column, last = np.nonzero((pace_s <= most_pace_s).swapaxes(0, 1))

        def of_entries(by_column: Sequence[Array]) -> Array:
            return np.asarray(np.array(by_column)[own_column, first, last])

        return cls(
            columns=columns,
            counts=counts,
            rest=rest,
            column=own_column,
            first=first,
            last=last,
            trip_s=of_entries([column.trip_s for column in columns]),
            pace_s=of_entries([column.pace_s for column in columns]),
            tail_s=of_entries([column.tail_s for column in columns]),
            window=of_entries([column.window for column in columns]),
            num_places=pace_s.shape[1],
            num_microbatches=num_microbatches,
        )

    def pipeline(self, pace_s: float) -> PacedPipeline | None:
        """That of least trip under a pace, on all devices or fewer; None if there is none."""
        own = np.flatnonzero(self.pace_s <= pace_s)
        if not len(own) or self.first[own[0]] > 0:
            return None
        trips_s = self._trips_s(own, pace_s)
        if not np.isfinite(trips_s[-2, 0]):
            return None
        entries = self._traced(own, pace_s, trips_s)
        trip_s = float(trips_s[-2, 0])
        others_s = (self.num_microbatches - 1) * float(self.pace_s[entries].max())
        step_s = trip_s + others_s + float(self.tail_s[entries].max())
        return PacedPipeline(trip_s, step_s, tuple(self.columns[self.column[entry]].places for entry in entries))

    def _trips_s(self, own: Numbers, pace_s: float) -> Array:
        """E by state and place: [states + 1, places], infinite where there are too few devices."""
        num_states = len(self.counts)
        trips_s = np.full((num_states + 1, self.num_places), np.inf)
        trips_s[:num_states, -1] = 0.0
        begins = np.flatnonzero(np.diff(self.first[own], prepend=-1))
        level = self.counts.sum(axis=1)
        for number in range(1, int(level.max()) + 1):
            states = np.flatnonzero(level == number)
            of_entries_s = self._through_s(own, pace_s, trips_s, states)
            trips_s[np.ix_(states, self.first[own[begins]])] = np.minimum.reduceat(of_entries_s, begins, axis=1)
        return trips_s

    def _through_s(self, own: Numbers, pace_s: float, trips_s: Array, states: Numbers) -> Array:
        """E by state if an entry comes first: [states, entries]."""
        behind_s = trips_s[self.rest[states][:, self.column[own]], self.last[own]]
        through_s = self.trip_s[own] + behind_s
        window = self.window[own]
        limits_s = np.full(len(own), np.inf)
        np.multiply(window, pace_s, out=limits_s, where=np.isfinite(window))
        return np.where(through_s <= limits_s, through_s, np.inf)

    def _traced(self, own: Numbers, pace_s: float, trips_s: Array) -> list[int]:
        """The entries of the pipeline of least trip, along it; of equal ones on the fewest devices."""
        least = np.flatnonzero(trips_s[:-1, 0] <= trips_s[-2, 0])
        state = least[self.counts[least].sum(axis=1).argmin()]
        place, entries = 0, list[int]()
        while place < self.num_places - 1:
            here = own[self.first[own] == place]
            entry = here[self._through_s(here, pace_s, trips_s, np.array([state]))[0].argmin()]
            entries.append(int(entry))
            state, place = self.rest[state, self.column[entry]], self.last[entry]
        return entries


def _most(counts: Sequence[int], places: Places) -> int:
    """Columns on such places that there are devices for."""
    return min(count // size for count, size in zip(counts, places.devices, strict=True) if size)


def _numbers(most: int) -> list[int]:
    """1 to 8, and powers of two and three times such, up to ``most`` and that itself."""
    powers = [1 << power for power in range(most.bit_length())]
    return sorted({n for n in (*range(1, 9), *powers, *(3 * power for power in powers), most) if 0 < n <= most})


def balanced_places(costs: Sequence[Array]) -> list[int] | None:
    """Places of a chain's cuts, both ends included, such that the largest cost of a stage is least; None if infinite.

    Args:
        costs: by stage, of first and last place.
    """
    above = np.triu(np.ones(costs[0].shape, dtype=bool), 1)
    best, chosen = np.where(above, costs[-1], np.inf)[:, -1], []
    for cost in reversed(costs[:-1]):
        both = np.maximum(np.where(above, cost, np.inf), best[None, :])
        chosen.append(both.argmin(axis=1))
        best = both.min(axis=1)
    places = [0]
    for choice in reversed(chosen):
        places.append(int(choice[places[-1]]))
    return [*places, len(above) - 1] if np.isfinite(best[0]) else None
