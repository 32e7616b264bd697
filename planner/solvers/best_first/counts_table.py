"""A bound of every pipeline of one way to cut the batch, by counts of devices: whatever its groups, and their hosts.

Given       M micro-batches of S samples; kinds k of D_k devices, a device of each worth v_k, a small whole number; all
            together U = sum of v_k D_k                                                                    ``worths``
Relaxed     which devices, and on which hosts: links between stages are the fastest there are, a piece of a micro-batch
            is one sample, sums of gradients take what they take at least over as many ranks or more, on any hosts
Columns     a stage from cut i to cut j on n devices of kind k, of which the fullest has S / n samples of a micro-batch
            or more; it is worth n v_k
Minimise    over columns, after every cut i, for every worth u of devices left, by the recurrence of all pipelines

    labels(i, u) = min over columns (i, j) of worth d of  prepend(column, across(labels(j, u - d)))   ``recurrence``

``end_s`` of labels(0, U) is below every step.  Columns that take longer than an upper bound T of the step are left
out, and of all (i, u) those looked at where the layers before i can be done in T by what is used, and those after by
what is left.

Where there are many columns those of like shares are first taken together (``Columns.grain``): their table says less,
takes a fraction of the time, and is enough for ways to cut the batch that are far from the best.

Where there are many cuts stages begin and end between ``counts_columns.MOST_CUTS`` of them, and of each only what is
surely inside counts.  The bound holds for what coarser groups of ``DeviceStates`` leave out, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from planner.costs.communication.links import fastest
from planner.costs.communication.stage_transfers import least_link
from planner.costs.communication.tables import transfer_s
from planner.costs.layers.cost_table import Array
from planner.costs.stages.stage_bound import columnwise, only
from planner.solvers.best_first.capacity import Capacity
from planner.solvers.best_first.counts_columns import Columns, ColumnStages, CutPlaces
from planner.solvers.best_first.graph_cuts import Flags, Numbers
from planner.solvers.best_first.message_bound import HandoverBound, least_links_of
from planner.solvers.best_first.priced_groups import GroupPrices
from planner.solvers.best_first.recurrence import Labels, across, prepend, rounds_of
from planner.solvers.budget import MOST_BYTES, OutOfTimeError, check_time

MOST_WORTH = 4
"""Of a device, where kinds are unlike."""

_GRAIN = 1.5  # of coarse columns, where fewer by this factor; a table takes a third of the time, and is often enough
_TURN_S = 8e-5  # work of a turn that fills a table
_CELL_S = 8.5e-9  # and of each number that it looks at
_ROUNDING = 1e-9
_NUMBERS_AT_ONCE = 30_000  # of a label: more do not fit into a cache
_MANY_TIMES = 1e6  # the work over capacity
_RISES = 1.25  # how upper bounds of tables rise
_NEAR = 1.003  # what is near enough to one
_FEW_UNITS = 4  # of the smallest stage: where there are more, units are larger
_MANY_UNITS = 128  # of all devices
_SORTS = ("round_trip_s", "last_backward_s", "end_s", "step_s")


def rising_bounds(
    ways: Sequence[tuple[GroupPrices, Capacity]], upper_s: float, mixes_kinds: bool
) -> Iterator[tuple[float, ...]]:
    """For each of several ways to cut the batch no pipeline takes less; better and better bounds, the least first.

    Labels are the least of all pipelines one by one, so a table says the more the lower its upper bound is; and it is
    the cheaper, too.  So upper bounds rise step by step, until one is found below which there may be a pipeline, by
    coarse columns as long as they know of none.

    Args:
        mixes_kinds: whether a stage may have devices of several kinds: then no more is known than all work over all
            devices, unless they are of one.

    Raises:
        OutOfTimeError: the budget that this runs under is over.
    """
    risen = [_Rising.of(prices, capacity, upper_s, mixes_kinds) for prices, capacity in ways]
    yield tuple(each.bound_s for each in risen)
    while open_ways := [each for each in risen if each.is_open]:
        min(open_ways, key=lambda each: each.bound_s).rise()
        yield tuple(each.bound_s for each in risen)


@dataclass(slots=True, eq=False)
class _Rising:
    """The bound of one way to cut the batch, while it rises.

    Attributes:
        columns: coarser ones first; none where work over capacity is all that is known.
        bound_s: no pipeline is faster.
        most_s: bounds from here on are of no interest.
        is_met: whether there may be a pipeline below that.
    """

    columns: tuple[Columns, ...]
    bound_s: float
    most_s: float
    is_met: bool = False

    @classmethod
    def of(cls, prices: GroupPrices, capacity: Capacity, upper_s: float, mixes_kinds: bool) -> _Rising:
        """Begun with all work over all devices."""
        bound_s = min(upper_s, capacity.work_s)
        places = CutPlaces.of(prices)
        is_known = not prices.throughout.any() and not (mixes_kinds and len(capacity.weights) > 1)
        columns: tuple[Columns, ...] = ()
        if is_known and places is not None and capacity.work_s:  # members do not share sites, nor a stage several kinds
            exact = Columns(prices, places, worths(capacity.weights))
            coarse = replace(exact, grain=_GRAIN)
            columns = (coarse, exact) if _GRAIN * coarse.num_shares <= exact.num_shares else (exact,)
        return cls(columns, bound_s, min(upper_s, _MANY_TIMES * bound_s))

    @property
    def is_open(self) -> bool:
        """Whether there is more to know."""
        near_s = _NEAR * self.bound_s if self.is_met else self.bound_s
        return bool(self.columns) and near_s < self.most_s

    def rise(self) -> None:
        """By one table."""
        reached_s = min(self.most_s, _RISES * self.bound_s)
        tried_s = (self.bound_s * reached_s) ** 0.5 if self.is_met else reached_s
        least_s = CountsTable(self.columns[0], tried_s).least_step_s()
        self.bound_s = max(self.bound_s, least_s)
        if least_s < tried_s and len(self.columns) > 1:
            self.columns = self.columns[1:]
        elif least_s < tried_s:
            self.is_met = True
            self.most_s = tried_s


def worths(weights: Sequence[float]) -> tuple[int, ...]:
    """Small whole numbers in about the proportion of ``weights``."""
    largest = max(weights)
    most = MOST_WORTH if len(set(weights)) > 1 else 1
    tried = [tuple(max(1, round(scale * weight / largest)) for weight in weights) for scale in range(1, most + 1)]

    def error(worth: tuple[int, ...]) -> float:
        return max(abs(own / max(worth) - weight / largest) for own, weight in zip(worth, weights, strict=True))

    return min(tried, key=error)


@dataclass(frozen=True, slots=True, eq=False)
class _Ways:
    """How stages go on, flat, by their first places: of each stage one for each sort of next stage.

    Attributes:
        stage: its number.
        slot, next_slot: the rows where its labels are kept, and those of what follows; -1: nothing does.
        reads, returns: whether what follows reads from it, and a gradient comes back.
        forward_s, backward_s: messages of one sample.
    """

    stage: Numbers
    slot: Numbers
    next_slot: Numbers
    reads: Flags
    returns: Flags
    forward_s: Array
    backward_s: Array


@dataclass(eq=False)
class CountsTable:
    """The table of one way to cut the batch.

    Attributes:
        upper_s: T: steps from here on are of no interest.
    """

    columns: Columns
    upper_s: float

    def least_step_s(self) -> float:
        """No pipeline is faster, or none is faster than the upper bound."""
        stages = self.columns.stages(self.upper_s)
        if not len(stages.first):
            return self.upper_s
        return min(self.upper_s, self._folded(stages) * (1 - _ROUNDING))

    def _folded(self, stages: ColumnStages) -> float:
        """The step of the best pipeline of these stages, from the last place to the first."""
        ways = self._ways(stages)
        if not len(ways.stage):
            return inf
        unit = self._unit(stages)
        stages = replace(stages, worth=stages.worth // unit)
        all_worth = self.columns.all_worth // unit
        before = int(stages.worth.max())  # columns for less than nothing left
        shape = (2 + int(max(ways.slot.max(), ways.next_slot.max())), before + all_worth + 1)
        if 8 * len(_SORTS) * shape[0] * shape[1] > MOST_BYTES // 4:
            raise OutOfTimeError
        rounds = rounds_of(self.columns.prices.num_microbatches, stages.window)
        is_needed = {"round_trip_s": bool((rounds > 1).any()), "step_s": not ways.reads[ways.next_slot >= 0].all()}
        table = {sort: np.full(shape, inf) for sort in _SORTS if is_needed.get(sort, True)}
        for of_sort in table.values():
            of_sort[-1, before:] = 0.0  # nothing follows
        fewest, most = self._reach(unit, int(stages.worth.min()))
        starts = np.searchsorted(stages.first[ways.stage], np.arange(len(fewest)))
        for place in reversed(range(len(fewest) - 1)):
            left = before + np.arange(fewest[place], most[place] + 1)
            some = max(1, _NUMBERS_AT_ONCE // max(1, len(left)))
            for start in range(starts[place], starts[place + 1] if len(left) else 0, some):
                part = only(ways, slice(start, min(start + some, starts[place + 1])))
                check_time(_TURN_S + _CELL_S * len(part.stage) * len(left))
                _fill(table, only(stages, part.stage), part, rounds[part.stage], left)
        roots = np.unique(ways.slot[: starts[1]])
        root = _looked_up(table, roots * shape[1] + before + all_worth)
        return float(np.maximum(root.end_s, root.step_s).min(initial=inf))

    def _unit(self, stages: ColumnStages) -> int:
        """Worth is counted in so much, rounded down for each stage, and for all devices: where all stages are large."""
        return max(1, min(int(stages.worth.min()) // _FEW_UNITS, self.columns.all_worth // _MANY_UNITS))

    def _reach(self, unit: int, least: int) -> tuple[Numbers, Numbers]:
        """By place, how much may be left in time: what all layers after it need, and what those before it leave.

        Args:
            least: units of any stage, of which rounding down leaves this share or more; a column of several shares
                counts the devices of the fullest, and the time of the least full.
        """
        places = self.columns.places
        columns = self.columns
        counted = (1.0 if unit == 1 else least / (least + 1) / unit) / columns.grain
        weight = columns.prices.cuts.sums(columns.layer_s) * (counted / self.upper_s * (1 - _ROUNDING))
        after = np.ceil(weight[-1] - weight[places.first] - _ROUNDING)
        before = np.ceil(weight[places.cuts] - _ROUNDING)
        return np.maximum(after, 0).astype(np.int64), columns.all_worth // unit - before.astype(np.int64)

    def _ways(self, stages: ColumnStages) -> _Ways:
        """Every way on of each stage."""
        places = self.columns.places
        cuts = self.columns.prices.cuts
        crossings = cuts.crossings
        trains = self.columns.prices.freedom.trains
        every = np.arange(len(stages.first))
        is_end = stages.last == len(places.cuts) - 1
        if not places.are_all:  # where it is cut is not known
            reads = np.full(len(every), crossings.linked.all())
            returns = np.full(len(every), crossings.has_gradient.all() and trains)
            nothing = np.zeros(len(every))
            return _Ways(every, stages.first, np.where(is_end, -1, stages.last), reads, returns, nothing, nothing)
        slot = cuts.slots[stages.first, cuts.content[stages.first, stages.last]]
        crossing_of = np.where(is_end, -1, cuts.crossing_of[:, stages.first, stages.last])
        crossing_of[0, is_end] = 0  # one way for each of them
        stage, reader = np.nonzero((crossing_of >= 0).T)
        order = np.lexsort((slot[stage], stages.first[stage]))
        stage = stage[order]
        reader = reader[order]
        crossing = crossing_of[reader, stage]
        next_slot = np.where(is_end[stage], -1, crossings.slot[crossing])
        ends = next_slot < 0  # on nothing, that takes no time
        forward_s, backward_s = (np.where(ends, 0.0, by_crossing[crossing]) for by_crossing in self._messages_s())
        returns = (crossings.has_gradient[crossing] | ends) & trains
        return _Ways(stage, slot[stage], next_slot, crossings.linked[crossing] | ends, returns, forward_s, backward_s)

    def _messages_s(self) -> tuple[Array, Array]:
        """A sample's outputs there, and its gradients back, between any two devices, by crossing."""
        prices = self.columns.prices
        crossings = prices.cuts.crossings
        links = list(least_links_of(prices).values())
        if not links:
            return np.zeros(len(crossings.slot)), np.zeros(len(crossings.slot))
        link = least_link(fastest(links))
        overhead_s = min(map(prices.cost_model.tables.overhead_s, self.columns.kinds))
        forward_s = transfer_s(link, crossings.forward_bytes)
        backward_s = transfer_s(link, crossings.backward_bytes)
        return forward_s + overhead_s, backward_s + overhead_s


def _looked_up(table: Mapping[str, Array], cells: Numbers) -> Labels:
    """Labels out of a table, by their numbers in it, row after row; where a sort is not in it what it is at least."""
    labels = {sort: of_sort.ravel().take(cells) for sort, of_sort in table.items()}
    lacking = {"round_trip_s": np.zeros(1), "step_s": labels["end_s"], "sums_s": labels["last_backward_s"]}
    return Labels(**{**lacking, **labels})


def _fill(table: Mapping[str, Array], stages: ColumnStages, ways: _Ways, rounds: Array, left: Numbers) -> None:
    """Writes the labels of stages that go on in such ways, by what is left with them: those of one place.

    Args:
        stages, rounds: of each of ``ways``.
        left: columns of the table, one after another.
    """
    height, width = table["end_s"].shape
    own = columnwise(lambda column: column[:, None], stages)
    forward_s = ways.forward_s[:, None]
    backward_s = ways.backward_s[:, None]
    nothing = np.zeros(1)
    message = HandoverBound(
        forward_s=forward_s,
        least_forward_s=forward_s,
        least_backward_s=backward_s,
        backward_s=backward_s,
        load_forward_s=nothing,
        load_backward_s=nothing,
        load_both_s=nothing,
    )
    cells = (ways.next_slot % height * width - stages.worth)[:, None] + left  # [ways, left]
    after = across(_looked_up(table, cells), message)
    labels = prepend(own, after, rounds[:, None], 0.0, ways.reads[:, None], ways.returns[:, None])
    slots = np.flatnonzero(np.concatenate(([True], ways.slot[1:] != ways.slot[:-1])))
    columns = slice(left[0], left[-1] + 1)
    for sort, of_sort in table.items():
        of_stage = getattr(labels, sort)
        if sort == "step_s":
            of_stage = np.maximum(of_stage, stages.alone_s[:, None])
        least = np.minimum.reduceat(of_stage, slots, axis=0)
        of_sort[ways.slot[slots], columns] = np.minimum(of_sort[ways.slot[slots], columns], least)
