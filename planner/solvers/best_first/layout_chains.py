"""Pipelines of stretches of layers on groups of ranks, whatever their layouts: by their bounds, the least first.

Stretches are those of ``layout_bound``, each on a group of one pool; the bound holds whatever their layouts.  It is
``recurrence``, whose numbers are the least of all layouts, each by itself: of a stage its step, its round trip, and F
and B of that (so all its work is that of M round trips, and a round trip is more than F and B); of a message the way,
and its bytes on a network card, of which M - 1 follow the first.

Who waits for a stage, and how long messages take at least, is in ``layer_links``.  The least labels over all ways to go
on, by the ranks of the stage that reads, are a DP from the back; pipelines are then built from the front, the one of
least bound first.

Stages that follow one another on one host are no larger than it together: beside the ranks of the stage that reads the
DP tells apart how many ranks there are on its host from it on, without a stage elsewhere between.  One that is before
it is on that host, and adds to these, or on another one, and all that passes between them is on a card of either: a
message takes no less than its bytes on a card then (``LayerLinks.message_s``).  Samples that are shared unequally
arrive unequally: the last byte need not be the slowest rank's, and nothing is known of cards.

Like pools are folded: only how many of their devices are free counts, and a group has as many as one pool at most.  The
bounds hold for all pipelines, and for some that fit into no pools: these are passed over when they are unfolded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from math import inf

import numpy as np
from numpy.typing import NDArray

from planner.costs.layers.cost_table import Array
from planner.ir.lazy import once
from planner.solvers.best_first.layer_links import LayerLinks
from planner.solvers.best_first.layout_bound import GroupTable
from planner.solvers.best_first.message_bound import HandoverBound
from planner.solvers.best_first.recurrence import (
    STEP,
    Labels,
    LaidOutStages,
    across,
    labels_of,
    others_of,
    prepend,
    stacked,
)
from planner.solvers.budget import NUMBER_S, Budget, OutOfTimeError
from planner.solvers.candidates.candidate import DevicePool

MOST_WAITING = 5_000
"""Stages whose rivals wait at a time, 40 KB each where there are 170 places to cut and 8 ranks in a pool."""

_EVERY = np.array(True)
"""The next stage reads, and answers: where none does, labels are 0."""
_ONE_ROUND = np.array(1)
"""No window is known: memory is ignored."""

_ENTRY_S = 1.5 * NUMBER_S
"""Of a pair of places to cut, for each group of devices."""

Free = tuple[int, ...]
"""Devices that are left, by sort of pool."""


PlacedStage = tuple[int, int, tuple[int, ...], GroupTable]
"""A stage: first layer, last layer + 1, ranks, and the table of ranks like these."""

Host = tuple[int, int]
"""Ranks of a stage; of it and of those that follow on its host without one elsewhere between."""


@dataclass(frozen=True, slots=True, eq=False)
class LayoutChain:
    """A whole pipeline, and what it takes at least; without stages where it fits into no pools.

    Attributes:
        laid_out: first layers of stages that have layouts of their own, even where samples alone are as good.
        folded: its stages as (first layer, last layer + 1, sort of pool, devices).
    """

    bound_s: float
    stages: tuple[PlacedStage, ...]
    laid_out: frozenset[int] = frozenset()
    folded: tuple[tuple[int, int, int, int], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Arrival:
    """What a stage hands on to a reader that is still to come.

    Attributes:
        place, maker: where the stage ends, and its number of ranks.
        reader: the layer.
        back_s, lead_s: of the first micro-batch, before its message leaves: the way to there and its B's way back; the
            way there.
    """

    place: int
    maker: int
    reader: int
    back_s: float
    lead_s: float


@dataclass(frozen=True, slots=True, eq=False)
class _Prefix:
    """The first stages of a pipeline, and what is known of it.

    Attributes:
        stages: (first layer, last layer + 1, sort of pool, devices).
        by_samples: whether all of them are cut along samples alone, where such pipelines are of no interest.
        laid_out: the first layer of the one that is not, so that the others may be; -1: there is none.
    """

    bound_s: float
    at: int
    free: Free
    arrivals: tuple[_Arrival, ...] = ()
    stages: tuple[tuple[int, int, int, int], ...] = ()
    by_samples: bool = False
    laid_out: int = -1


FreeGroup = tuple[int, int, GroupTable, Free]
"""Ranks that a stage may have: sort of pool, how many, their table, and what is free afterwards."""


@dataclass(frozen=True, slots=True, eq=False)
class _Following:
    """Stages that may come after a prefix: rows are groups of ranks, each with its sorts of stages one after another.

    Attributes:
        num_sorts: 2 where stages along samples alone are told from others, else 1.
    """

    num_sorts: int
    stops: NDArray[np.intp]  # [stops] where they end
    bound_s: Array  # [rows, stops] no pipeline that begins so is faster
    back_s: Array  # [rows, stops] of the first micro-batch, until its F there, and its B's way back
    lead_s: Array  # [rows, stops] until its F there


@dataclass(eq=False)
class Chains:
    """All pipelines of one size of the micro-batch.

    Attributes:
        pools: of each sort, those that are alike.
        tables: by sort of pool, of 1, 2, ... ranks; None where nothing can be priced.
        positions: where the layers may be cut, both ends included.
        num_full: full micro-batches, M.
    """

    pools: tuple[tuple[DevicePool, ...], ...]
    tables: dict[tuple[int, int], GroupTable | None]
    positions: tuple[int, ...]
    links: LayerLinks
    num_full: int
    max_stages: int
    budget: Budget
    _ahead: dict[Free, Array] = field(init=False, default_factory=dict, repr=False)

    @once
    def _messages(self, maker: int, on_one_host: bool | None = None) -> tuple[Array, Array]:
        """``[ranks, place]``: to all readers (``LayerLinks.message_s``); by default on one host if they fit on it."""
        most = self.links.ranks_of_host
        places = [maker + reader <= most if on_one_host is None else on_one_host for reader in self._counts]
        readers = zip(self._counts, places, strict=True)
        messages_s, cards_s = zip(*(self.links.message_s(maker, *reader) for reader in readers), strict=True)
        return np.stack(messages_s), np.stack(cards_s)

    @property
    def _counts(self) -> range:
        """Ranks that a group may have."""
        return range(1, max(len(like[0].ranks) for like in self.pools) + 1)

    @property
    def _has_hosts(self) -> bool:
        return sum(self.all_free) > self.links.ranks_of_host

    @cached_property
    def _hosts(self) -> tuple[Host, ...]:
        """What the DP tells apart of the stage that reads; where there is one host its ranks alone."""
        most = self.links.ranks_of_host if self._has_hosts else 0
        return tuple((count, on_host) for count in self._counts for on_host in range(count, max(count, most) + 1))

    @property
    def all_free(self) -> Free:
        """Every device."""
        return tuple(sum(len(pool.ranks) for pool in like) for like in self.pools)

    def replace(self, tables: Mapping[tuple[int, int], GroupTable | None]) -> None:
        """Takes other tables of some groups."""
        self.tables.update(tables)
        self._ahead.clear()

    def bound_s(self, free: Free = ()) -> float:
        """No pipeline is faster on the devices ``free``, by default every one.

        Raises:
            OutOfTimeError: the budget is over, or it would be.
        """
        self._solve(free or self.all_free)
        return float(self._ahead[free or self.all_free][:, :, self.positions[0]].max(axis=0).min())

    def best_first(
        self, upper_s: Callable[[], float], free: Free = (), by_samples: bool = True
    ) -> Iterator[LayoutChain]:
        """Pipelines by their bound, as long as it is below ``upper_s()``; of equal ones the longest first.

        Args:
            free: the devices that may be used; by default every one.
            by_samples: whether those are asked for whose stages are all cut along samples alone.

        Raises:
            OutOfTimeError: there are too many to keep.
        """
        last = self.positions[-1]
        number = itertools.count()
        heap: list[tuple[float, int, int, Iterator[_Prefix], _Prefix]] = []

        def push(prefixes: Iterator[_Prefix]) -> None:
            prefix = next(prefixes, None)
            if prefix is not None:
                heappush(heap, (prefix.bound_s, -prefix.at, next(number), prefixes, prefix))

        start = _Prefix(self.bound_s(free), self.positions[0], free or self.all_free, by_samples=not by_samples)
        push(iter([start]))
        while heap:
            bound_s, _, _, siblings, prefix = heappop(heap)
            if bound_s >= upper_s():
                return
            push(siblings)
            if len(heap) > MOST_WAITING:
                raise OutOfTimeError
            if prefix.at == last:
                if not prefix.by_samples:
                    laid_out = frozenset({prefix.laid_out} - {-1})
                    yield LayoutChain(bound_s, self._unfolded(prefix), laid_out, prefix.stages)
            elif not self.max_stages or len(prefix.stages) < self.max_stages:
                push(self._after(prefix, upper_s()))

    def _after(self, prefix: _Prefix, upper_s: float) -> Iterator[_Prefix]:
        """``prefix`` and one more stage, by their bounds."""
        groups = list(self._groups(prefix.free))
        if not groups:
            return
        following = self._following(prefix, groups)
        for place in np.argsort(following.bound_s, axis=None, kind="stable"):
            row, k = divmod(int(place), len(following.stops))
            if following.bound_s[row, k] >= upper_s:
                return
            number, is_laid_out = divmod(row, following.num_sorts)
            yield self._longer(prefix, groups[number], bool(is_laid_out), following, (row, k))

    def _longer(
        self, prefix: _Prefix, group: FreeGroup, is_laid_out: bool, following: _Following, at: tuple[int, int]
    ) -> _Prefix:
        """``prefix`` and the stage on ``group`` that is at this place."""
        sort, count, _, rest = group
        stop = int(following.stops[at[1]])
        reader = int(self.links.reader[stop])
        own = _Arrival(stop, count, reader, float(following.back_s[at]), float(following.lead_s[at]))
        return _Prefix(
            bound_s=float(following.bound_s[at]),
            at=stop,
            free=rest,
            arrivals=tuple(each for each in (*prefix.arrivals, own) if each.reader >= stop),
            stages=(*prefix.stages, (prefix.at, stop, sort, count)),
            by_samples=prefix.by_samples and not is_laid_out,
            laid_out=prefix.at if is_laid_out else prefix.laid_out,
        )

    def _following(self, prefix: _Prefix, groups: list[FreeGroup]) -> _Following:
        """The stages that may come after ``prefix`` on these groups."""
        stops = np.array(self.positions[self.positions.index(prefix.at) + 1 :])
        self.budget.spend(_ENTRY_S * len(groups) * len(stops))
        tables_s = [
            table_s
            for _, _, table, _ in groups
            for table_s in ((table.by_samples_s, table.laid_out_s) if prefix.by_samples else (table.least_s,))
        ]
        num_sorts = len(tables_s) // len(groups)
        least = np.stack([table_s[:, prefix.at, stops] for table_s in tables_s], axis=1)
        onward = [list(self._onward(rest, count, stops).values()) for _, count, _, rest in groups]
        after = np.repeat(np.stack([np.min(each, axis=0) for each in onward], axis=1), num_sorts, axis=1)
        counts = np.repeat([count for _, count, _, _ in groups], num_sorts)
        bound_s, before_s, lead_s = self._arrived(prefix, counts, stops, labels_of(self._with_stage(least, after)))
        return _Following(num_sorts, stops, bound_s, before_s + least[1], lead_s + least[2])

    def _arrived(
        self, prefix: _Prefix, counts: NDArray[np.intp], stops: NDArray[np.intp], labels: Labels
    ) -> tuple[Array, Array, Array]:
        """``[rows, stops]``: what pipelines take at least; of it, before the last F and after its B; before that F.

        Args:
            counts: of ranks of the stage after ``prefix``, by row.
            labels: of it and of what is after it.
        """
        bound_s = np.maximum(labels.step_s, prefix.bound_s)
        before_s = np.zeros(bound_s.shape)
        lead_s = np.zeros(bound_s.shape)
        for arrival in prefix.arrivals:
            message_s, card_s = (each[counts - 1, arrival.place, None] for each in self._messages(arrival.maker))
            reads = stops > arrival.reader
            back_s = np.where(reads, arrival.back_s + self.links.ways * message_s, 0.0)
            before_s = np.maximum(before_s, back_s)
            lead_s = np.maximum(lead_s, np.where(reads, arrival.lead_s + message_s, 0.0))
            others_s = (self.num_full - 1) * card_s
            bound_s = np.maximum(bound_s, np.where(reads, back_s + others_s + labels.round_trip_s, 0.0))
        bound_s = np.maximum(bound_s, np.maximum(before_s + labels.last_backward_s, lead_s + labels.end_s))
        return bound_s, before_s, lead_s

    def _groups(self, free: Free) -> Iterator[FreeGroup]:
        """Groups of like ranks that are free."""
        for sort, left in enumerate(free):
            for count in range(1, min(left, len(self.pools[sort][0].ranks)) + 1):
                table = self.tables[sort, count]
                if table is not None:
                    yield sort, count, table, (*free[:sort], left - count, *free[sort + 1 :])

    def _unfolded(self, prefix: _Prefix) -> tuple[PlacedStage, ...]:
        """The stages on ranks, the largest groups first, each in the first pool with room; empty if one finds none."""
        unused = {sort: [pool.ranks for pool in like] for sort, like in enumerate(self.pools)}
        placed: dict[int, PlacedStage] = {}
        for first, last, sort, count in sorted(prefix.stages, key=lambda stage: -stage[3]):
            number = next((k for k, ranks in enumerate(unused[sort]) if len(ranks) >= count), None)
            table = self.tables[sort, count]
            if number is None or table is None:
                return ()
            ranks = unused[sort][number][:count]
            unused[sort][number] = unused[sort][number][count:]
            placed[first] = first, last, ranks, table
        return tuple(placed[first] for first, *_ in prefix.stages)

    def _solve(self, most: Free) -> None:
        """Solves the DP for every number of devices up to ``most``.

        Raises:
            OutOfTimeError: the budget is over, or it would be.
        """
        every = itertools.product(*(range(count + 1) for count in most))
        missing = [free for free in every if free not in self._ahead]
        groups = sum(count <= len(like[0].ranks) for like in self.pools for count, _ in self._hosts)
        work_s = NUMBER_S * groups * len(self.positions) ** 2
        if not self.budget.allows(work_s * len(missing)):
            raise OutOfTimeError
        for free in missing:
            self.budget.require(work_s)
            self._ahead[free] = self._solved(free)

    def _solved(self, free: Free) -> Array:
        """``[4, hosts, layer]``: labels (:func:`stacked`), those of fewer free devices being known; 0: nobody waits.

        All but the last are those of the stage with the layer's reader, by ``_hosts``; that is of any stage after it.
        """
        last = self.positions[-1]
        layers = np.arange(last)
        stops = np.array(self.positions)
        is_after = stops[None, :] > layers[:, None]
        ahead = np.full((4, len(self._hosts), last + 1), inf)
        for _, count, table, rest in self._groups(free):
            least = table.least_s[:, :last, stops]
            for on_host, after in self._onward(rest, count, stops).items():
                each_s = np.where(is_after, self._with_stage(least, after[:, None, :]), inf).min(axis=-1)
                own = self._hosts.index((count, on_host))
                ahead[:, own, :last] = np.minimum(ahead[:, own, :last], each_s)
        ahead[..., last] = 0.0
        is_next = self.links.reader[:last] == layers  # else what is on the host between is not known
        elsewhere = np.full(ahead.shape, inf)
        for count in self._counts:
            like = [host for host, (ranks, _) in enumerate(self._hosts) if ranks == count]
            elsewhere[:, like[0]] = ahead[:, like].min(axis=1)
        by_reader = np.where(self.links.reader >= 0, elsewhere[:STEP, :, self.links.reader], 0.0)
        ahead[:STEP, :, last] = by_reader[..., last]
        ahead[:STEP, :, :last] = np.where(is_next, ahead[:STEP, :, :last], by_reader[..., :last])
        ahead[STEP] = ahead.min(axis=1).max(axis=0)
        return ahead

    def _onward(self, free: Free, maker: int, stops: NDArray[np.intp]) -> dict[int, Array]:
        """``[4, stops]``: what follows a stage of ``maker`` ranks that ends there, as that one sees it, at least.

        Whoever reads; by the ranks on its host from it on.
        """
        onward: dict[int, Array] = {}
        for on_host, hosts, on_one_host in self._joins(maker):
            after = labels_of(self._ahead[free][:, hosts][:, :, stops])
            readers = [self._hosts[host][0] - 1 for host in hosts]
            message_s, card_s = (
                np.where(after.round_trip_s > 0, each[readers][:, stops], 0.0)  # where nobody waits nothing is sent
                for each in self._messages(maker, on_one_host)
            )
            least_s = stacked(across(after, self._handover(message_s, card_s))).min(axis=1)
            onward[on_host] = np.minimum(onward.get(on_host, inf), least_s)
        return onward

    def _handover(self, message_s: Array, card_s: Array) -> HandoverBound:
        """Messages that take so long one way, and keep a network card busy so long."""
        load_s = message_s + (self.num_full - 1) * card_s
        returns = self.links.ways == 2
        back_s = message_s * returns
        return HandoverBound(
            forward_s=message_s,
            least_forward_s=message_s,
            least_backward_s=back_s,
            backward_s=back_s,
            load_forward_s=load_s,
            load_backward_s=load_s * returns,
            load_both_s=np.zeros_like(message_s),
        )

    @once
    def _joins(self, maker: int) -> tuple[tuple[int, list[int], bool], ...]:
        """Ranks on the host of a stage of ``maker`` ranks, from it on; which of ``_hosts`` may read; whether there."""
        every = list(range(len(self._hosts)))
        if not self._has_hosts:
            return ((maker, every, True),)
        joined: dict[int, list[int]] = {}
        for host, (_, on_host) in enumerate(self._hosts):
            if maker + on_host <= self.links.ranks_of_host:
                joined.setdefault(maker + on_host, []).append(host)
        return (maker, every, False), *((on_host, hosts, True) for on_host, hosts in joined.items())

    def _with_stage(self, least: Array, after: Array) -> Array:
        """``[4, ...]``: pipelines that begin with a stage of ``least`` times (``GroupTable.least_s``)."""
        step_s, once_s, forward_s, _ = least  # infinite where there is no such stage
        _, _, finite_forward_s, finite_back_s = np.where(np.isfinite(least), least, 0.0)
        stage = LaidOutStages(forward_s, once_s - finite_forward_s, self.num_full * once_s, step_s)
        others_s = others_of(self.num_full, finite_forward_s, finite_back_s)
        return stacked(prepend(stage, labels_of(after), _ONE_ROUND, 0.0, _EVERY, _EVERY, others_s))
