"""Pipelines of stretches of layers on groups of ranks, whatever their layouts: by their bounds, the least first.

Stretches are those of ``layout_bound``, each on a group of one pool; the bound holds whatever their layouts.  It is
``recurrence``, whose numbers are the least of all layouts: of stages s = 0, 1, ... W_s a step, o_s there and back, f_s
and b_s its parts, each by itself (so w_s = M o_s, and o_s is more than f_s + b_s), c_s a message one way, and k_s its
bytes on a network card, of which M - 1 follow the first.

Who waits for a stage that ends before layer i is the stage with the first reader of layer i - 1
(``LayerLinks.reader``); what that one does before this layer counts for nothing. Where nobody reads it, nothing is
behind.  The least labels over all ways to go on, by the ranks of the stage that reads, are a DP from the back;
pipelines are then built from the front, the one of least bound first.

Stages that follow one another on one host are no larger than it together: beside the ranks of the stage that reads the
DP tells apart how many ranks there are on its host from it on, without a stage elsewhere between.  One that is before
it is on that host, and adds to these, or on another one, and all that passes between them is on a card of either: c_s
is not less than k_s then (``LayerLinks.message_s``).  Samples that are shared unequally arrive unequally: the last
byte need not be the slowest rank's, and nothing is known of cards.

Like pools are folded: only how many of their devices are free counts, and a group has as many as one pool at most.  The
bounds hold for all pipelines, and for some that fit into no pools: these are passed over when they are unfolded.

``OrderedPipelines`` are plans to begin with: those whose stages follow one another along the hosts, on the ranks behind
those of the stage before, or the first of the next pool.  So neighbours are on one host unless it ends between them:
where stages are put on any pool with room, as the folded bound may, most messages cross hosts.  With o_s an F and a B
of stage s, w_s its step, c_s a message behind it one way, over the fewer of the ranks at both ends and on the card, M
micro-batches,

    minimise    sum over s of (o_s + 2 c_s)  +  (M - 1) x      subject to  w_s / M <= x,  c_s <= x

for a few paces x, by a DP from the back over ranks used and layers.  Of the ranks at the far end of a message the DP
knows those of the best way on.  Nothing here is a bound: memory, windows and skips over stages are left to the
simulator.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from math import prod

import numpy as np
from numpy.typing import NDArray

from planner.costs.calibration.apply_corrections import corrected_cluster
from planner.costs.communication.collectives import transfer_s
from planner.costs.communication.links import NetworkPrices, fastest, without_pairs
from planner.costs.layers.cost_table import Array
from planner.ir.box import Interval, whole
from planner.ir.cluster import Link
from planner.ir.graph import Graph, TensorSpec, producer
from planner.ir.lazy import once
from planner.ir.problem import Problem
from planner.layers.boundary import without_gradient
from planner.layers.sized import SizedLayer
from planner.solvers.best_first.layout_bound import GroupTable
from planner.solvers.best_first.message_bound import HandoverBound
from planner.solvers.best_first.recurrence import Labels, LaidOutStages, across, others_of, prepend
from planner.solvers.budget import NUMBER_S, Budget, OutOfTimeError, check_time
from planner.solvers.candidates.candidate import DevicePool
from planner.solvers.candidates.feasibility import may_stream
from planner.solvers.layouts.stage import NONE

MOST_WAITING = 5_000
"""Stages whose rivals wait at a time, 40 KB each where there are 170 places to cut and 8 ranks in a pool."""

_EVERY = np.array(True)
"""Who is behind reads, and answers: where nobody does, labels are 0."""
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
class LayerLinks:
    """What is known of messages at each place to cut.

    Attributes:
        reader: the first layer behind that reads from the layer just before, and answers with gradients; -1: none.
        num_bytes: what F brings there, at least.
        ways: 2 where B comes back, else 1.
        samples: of a micro-batch.
        within, across: no link is faster; none between two hosts.
        card_bytes_per_s: no network card carries more.
        ranks_of_host: the most that a host has.
    """

    reader: NDArray[np.intp]
    num_bytes: Array
    ways: int
    samples: int
    within: Link | None
    across: Link | None
    card_bytes_per_s: float
    ranks_of_host: int

    def message_s(self, maker: int, reader: int, on_one_host: bool) -> tuple[Array, Array]:
        """F's way between groups of so many ranks, by place; and how long all of it is on a network card."""
        link = self.within if on_one_host else self.across
        is_even = {self.samples % count for count in (maker, reader)} <= {0, self.samples}
        each_s = transfer_s(link, self.num_bytes / (maker * reader)) if link else np.zeros_like(self.num_bytes)
        card_s = self.num_bytes / self.card_bytes_per_s * (is_even and not on_one_host)
        return np.maximum(each_s, card_s), card_s


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
        start = self.positions.index(prefix.at)
        stops = np.array(self.positions[start + 1 :])
        groups = list(self._groups(prefix.free))
        if not groups:
            return
        self.budget.spend(_ENTRY_S * len(groups) * len(stops))
        tables_s = [[table.least_s] for _, _, table, _ in groups]
        if prefix.by_samples:  # a stage that is not is told from one that is
            tables_s = [[table.by_samples_s, table.laid_out_s] for _, _, table, _ in groups]
        kinds = len(tables_s[0])
        least = np.stack([each[:, prefix.at, stops] for own in tables_s for each in own], axis=1)
        onward = [self._onward(rest, count, stops) for _, count, _, rest in groups]
        after = np.stack([np.min(list(each.values()), axis=0) for each in onward for _ in range(kinds)], axis=1)
        labels = _labels(self._with_stage(least, after))
        bound_s = np.maximum(labels.free, prefix.bound_s)
        before_s = np.zeros(bound_s.shape)
        lead_s = np.zeros(bound_s.shape)
        readers = np.repeat([count - 1 for _, count, _, _ in groups], kinds)
        for arrival in prefix.arrivals:
            message_s, card_s = (each[readers, arrival.place, None] for each in self._messages(arrival.maker))
            reads = stops > arrival.reader
            back_s = np.where(reads, arrival.back_s + self.links.ways * message_s, 0.0)
            before_s = np.maximum(before_s, back_s)
            lead_s = np.maximum(lead_s, np.where(reads, arrival.lead_s + message_s, 0.0))
            bound_s = np.maximum(bound_s, np.where(reads, back_s + (self.num_full - 1) * card_s + labels.trip, 0.0))
        bound_s = np.maximum(bound_s, np.maximum(before_s + labels.end, lead_s + labels.total))
        before_s += least[1]
        lead_s += least[2]
        del least, onward, after, labels  # what waits is much
        for place in np.argsort(bound_s, axis=None, kind="stable"):
            row, k = divmod(int(place), len(stops))
            if bound_s[row, k] >= upper_s:
                return
            g, is_laid_out = divmod(row, kinds)
            sort, count, _, rest = groups[g]
            stop = int(stops[k])
            stages = (*prefix.stages, (prefix.at, stop, sort, count))
            own = _Arrival(stop, count, int(self.links.reader[stop]), float(before_s[row, k]), float(lead_s[row, k]))
            arrivals = tuple(each for each in (*prefix.arrivals, own) if each.reader >= stop)
            by_samples = prefix.by_samples and not is_laid_out
            laid_out = prefix.at if is_laid_out else prefix.laid_out
            yield _Prefix(float(bound_s[row, k]), stop, rest, arrivals, stages, by_samples, laid_out)

    def _groups(self, free: Free) -> Iterator[tuple[int, int, GroupTable, Free]]:
        """(sort of pool, number of ranks, their table, what is free afterwards)."""
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
        """``[4, hosts, layer]``: labels (:func:`_stacked`), those of fewer free devices being known; 0: nobody waits.

        G, V and E are those of the stage with the layer's reader, by ``_hosts``; the last is of any stage behind.
        """
        last = self.positions[-1]
        layers = np.arange(last)
        stops = np.array(self.positions)
        behind = stops[None, :] > layers[:, None]
        ahead = np.full((4, len(self._hosts), last + 1), np.inf)
        for _, count, table, rest in self._groups(free):
            least = table.least_s[:, :last, stops]
            for on_host, after in self._onward(rest, count, stops).items():
                each_s = np.where(behind, self._with_stage(least, after[:, None, :]), np.inf).min(axis=-1)
                own = self._hosts.index((count, on_host))
                ahead[:, own, :last] = np.minimum(ahead[:, own, :last], each_s)
        ahead[..., last] = 0.0
        is_next = self.links.reader[:last] == layers  # else what is on the host between is not known
        elsewhere = np.full(ahead.shape, np.inf)
        for count in self._counts:
            like = [host for host, (ranks, _) in enumerate(self._hosts) if ranks == count]
            elsewhere[:, like[0]] = ahead[:, like].min(axis=1)
        by_reader = np.where(self.links.reader >= 0, elsewhere[:3, :, self.links.reader], 0.0)
        ahead[:3, :, last] = by_reader[..., last]
        ahead[:3, :, :last] = np.where(is_next, ahead[:3, :, :last], by_reader[..., :last])
        ahead[3] = ahead.min(axis=1).max(axis=0)
        return ahead

    def _onward(self, free: Free, maker: int, stops: NDArray[np.intp]) -> dict[int, Array]:
        """``[4, stops]``: what is behind a stage of ``maker`` ranks that ends there, as that one sees it, at least.

        Whoever reads; by the ranks on its host from it on.
        """
        onward: dict[int, Array] = {}
        for on_host, hosts, on_one_host in self._joins(maker):
            behind = _labels(self._ahead[free][:, hosts][:, :, stops])
            readers = [self._hosts[host][0] - 1 for host in hosts]
            message_s, card_s = (
                np.where(behind.trip > 0, each[readers][:, stops], 0.0)  # where nobody waits nothing is sent
                for each in self._messages(maker, on_one_host)
            )
            least_s = _stacked(across(behind, self._handover(message_s, card_s))).min(axis=1)
            onward[on_host] = np.minimum(onward.get(on_host, np.inf), least_s)
        return onward

    def _handover(self, message_s: Array, card_s: Array) -> HandoverBound:
        """Messages that take so long one way, and keep a network card busy so long."""
        load_s = message_s + (self.num_full - 1) * card_s
        returns = self.links.ways == 2
        back_s = message_s * returns
        return HandoverBound(
            there=message_s,
            path=message_s,
            back=back_s,
            back_all=back_s,
            load_there=load_s,
            load_back=load_s * returns,
            load_both=np.zeros_like(message_s),
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

    def _with_stage(self, least: Array, behind: Array) -> Array:
        """``[4, ...]``: pipelines that begin with a stage of ``least`` times (``GroupTable.least_s``)."""
        step_s, once_s, forward_s, _ = least  # infinite where there is no such stage
        _, _, finite_forward_s, finite_back_s = np.where(np.isfinite(least), least, 0.0)
        stage = LaidOutStages(forward_s, once_s - finite_forward_s, self.num_full * once_s, step_s)
        others_s = others_of(self.num_full, finite_forward_s, finite_back_s)
        return _stacked(prepend(stage, _labels(behind), _ONE_ROUND, 0.0, _EVERY, _EVERY, others_s))


def _labels(stacked: Array) -> Labels:
    """Of ``[4, ...]``, as the DP holds them: G, V, E, and the step as a whole."""
    end, total, trip, free = stacked
    return Labels(trip, end, total, free, sums=end)


def _stacked(labels: Labels) -> Array:
    """The other way round."""
    return np.stack([labels.end, labels.total, labels.trip, labels.free])


def links_of(problem: Problem, samples: int, backward: str) -> LayerLinks:
    """What is known of messages at each place between two layers, for micro-batches of ``samples``.

    Nothing where gradients do not come back: then the stage before need not wait for the end of the stage behind.

    Args:
        backward: ``Question.backward``.
    """
    graph = problem.profile.graph
    count = len(graph.layers)
    values = graph.values()
    silent = without_gradient(graph)
    names = {layer.name: index for index, layer in enumerate(graph.layers)}
    reader = np.full(count + 1, -1)
    num_bytes = np.zeros(count + 1)
    reader[0] = 0
    for index in reversed(range(count)):
        for value in graph.layers[index].inputs:
            answers = backward == NONE or (values[value].is_float and value not in silent)
            at = names.get(producer(value), -1) + 1
            if at and answers:
                is_same_reader = reader[at] == index
                size = _bytes_read(graph, index, value, values, samples)
                reader[at] = index
                num_bytes[at] = max(size, num_bytes[at] if is_same_reader else 0.0)
    if may_stream(problem):
        num_bytes[:] = 0.0
    cluster = without_pairs(corrected_cluster(problem.profile))
    tiers = [tier.name for tier in cluster.nested_tiers]
    inside = tiers[: tiers.index(cluster.host_tier) + 1]
    hosts = Counter(cluster.devices[rank].host for rank in problem.ranks)
    across = [link for name, link in cluster.links.items() if name not in inside]
    return LayerLinks(
        reader,
        num_bytes,
        1 if backward == NONE else 2,
        samples,
        fastest(list(cluster.links.values())) if cluster.links else None,
        fastest(across) if across else None,
        NetworkPrices(corrected_cluster(problem.profile)).most_card_bytes_per_s,
        max(hosts.values()),
    )


_READ_IN_ORDER = ("pointwise", "conv", "transposed_conv", "pool", "batch_norm", "global_pool", "concat")
"""Kinds whose windows all have one size and follow one another at one stride."""


def _bytes_read(graph: Graph, at: int, value: str, values: Mapping[str, TensorSpec], samples: int) -> float:
    """What is certainly read of the value, whatever the parts; of other kinds of layers a byte."""
    layer = graph.layers[at]
    if layer.kind not in _READ_IN_ORDER:
        return 1.0
    sized = SizedLayer.of(graph, layer, values, samples, False)
    position = layer.inputs.index(value)
    box = whole(sized.work.shape)
    read = [interval.stop - interval.start for interval in sized.input_boxes(box)[position]]
    for dim, extent in enumerate(sized.work.shape):
        if extent > 1:
            parts = ((*box[:dim], Interval(k, k + 1), *box[dim + 1 :]) for k in range(2))
            first, second = (sized.input_boxes(part)[position] for part in parts)
            for axis, (one, other) in enumerate(zip(first, second, strict=True)):
                if other.start > one.stop:  # windows are apart: what lies between is not read
                    read[axis] = min(read[axis], (extent - 1) * (other.stop - other.start))
    spec = sized.inputs[position]
    return max(1.0, spec.num_bytes * prod(read) / max(1, prod(spec.shape)))


def doubled(most: int) -> list[int]:
    """1, 2, 4, ... and ``most``."""
    return sorted({*(1 << power for power in range(most.bit_length())), most})


_PARTS = (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96)
"""Paces that are tried: the least F and B of all layers, in so many parts."""


@dataclass(eq=False)
class OrderedPipelines:
    """Pipelines along the hosts for one size of the micro-batch.

    Attributes:
        pools: of each sort, those that are alike.
        tables: by sort of pool and number of ranks; what is not there no stage is made of.
        positions: where the layers may be cut, both ends included.
        size: of the micro-batch.
        crossing_bytes: at each place to cut, of all that is made before it and read behind.
    """

    problem: Problem
    pools: tuple[tuple[DevicePool, ...], ...]
    tables: Mapping[tuple[int, int], GroupTable | None]
    positions: tuple[int, ...]
    size: int
    crossing_bytes: Array = field(init=False)
    _ranks: tuple[int, ...] = field(init=False)
    _sort_of: tuple[int, ...] = field(init=False)
    _ends: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        pools = sorted((pool.ranks, sort) for sort, like in enumerate(self.pools) for pool in like)
        self._ranks = tuple(rank for ranks, _ in pools for rank in ranks)
        self._sort_of = tuple(sort for ranks, sort in pools for _ in ranks)
        ends = itertools.accumulate(len(ranks) for ranks, _ in pools)
        self._ends = tuple(end for end, (ranks, _) in zip(ends, pools, strict=True) for _ in ranks)
        self.crossing_bytes = _crossing_bytes(self.problem, self.size)[list(self.positions)]

    def by_pace(self) -> Iterator[tuple[int, LayoutChain]]:
        """The best of each pace, the slowest first, on the last 1, 2, 4, ... pools and on all; each once.

        With the number of ranks that it may use; the estimate stands for the bound.

        Raises:
            OutOfTimeError: the budget that this runs under is over.
        """
        once_s = min((float(table.once_s[0, -1]) for table in self.tables.values() if table is not None), default=0.0)
        made = set[object]()
        num_groups = sum((self._sort_of[start], count) in self.tables for start, count in self._groups())
        begins = sorted({0, *self._ends} - {len(self._ranks)}, reverse=True)
        begins = [begins[number - 1] for number in doubled(len(begins))]
        for parts in _PARTS:
            check_time(_ENTRY_S * num_groups * len(self.positions) ** 2)
            for begin, pipeline in zip(begins, self._least(once_s / parts, begins), strict=True):
                shape = begin, tuple((first, ranks) for first, _, ranks, _ in pipeline.stages)
                if pipeline.stages and shape not in made:
                    made.add(shape)
                    if len(pipeline.stages) <= (self.problem.max_stages or len(pipeline.stages)):
                        yield len(self._ranks) - begin, pipeline

    def _groups(self) -> Iterator[tuple[int, int]]:
        """(ranks used before, ranks), the last first."""
        for start in reversed(range(len(self._ranks))):
            for count in range(1, self._ends[start] - start + 1):
                yield start, count

    def _least(self, pace_s: float, begins: Sequence[int]) -> list[LayoutChain]:
        """Those of least estimate at a pace on the ranks from each begin on; without stages where there is none."""
        positions = np.array(self.positions)
        num = self.problem.global_batch // self.size
        last = len(positions) - 1
        places = np.arange(len(positions))
        trip_s = np.full((len(self._ranks), len(places)), np.inf)  # [ranks used, place]: from there on
        first_count = np.zeros(trip_s.shape, dtype=np.intp)
        choices: dict[int, tuple[NDArray[np.intp], NDArray[np.intp]]] = {}
        for start, own in itertools.groupby(self._groups(), key=lambda group: group[0]):
            stop_at, start_at = np.zeros((2, len(places)), dtype=np.intp)
            for _, count in own:
                table = self.tables.get((self._sort_of[start], count))
                if table is None:
                    continue
                least = np.ix_(positions, positions)
                is_slow = (table.step_s[least] > num * pace_s) | (places[None, :] <= places[:, None])
                once_s = np.where(is_slow, np.inf, table.once_s[least])
                for after in self._starts(start + count):
                    onward_s = np.where(places == last, 0.0, np.inf)
                    if after < len(self._ranks):
                        few = np.minimum(count, np.maximum(first_count[after], 1))
                        message_s = self._message_s(start + count - 1, after, count)[few - 1, places]
                        way_s = np.where(message_s > pace_s, np.inf, 2 * message_s + trip_s[after])
                        onward_s = np.where(places == last, 0.0, way_s)
                    each_s = once_s + onward_s
                    stops = each_s.argmin(axis=1)
                    each_s = each_s[places, stops]
                    is_less = each_s < trip_s[start]
                    trip_s[start, is_less] = each_s[is_less]
                    first_count[start, is_less] = count
                    stop_at[is_less] = stops[is_less]
                    start_at[is_less] = after
            choices[start] = stop_at, start_at
        return [self._read(begin, trip_s[begin, 0], first_count, choices) for begin in begins]

    def _read(
        self,
        start: int,
        trip_s: float,
        first_count: NDArray[np.intp],
        choices: Mapping[int, tuple[NDArray[np.intp], NDArray[np.intp]]],
    ) -> LayoutChain:
        """The pipeline that begins on rank ``start``, by the DP's choices."""
        if not np.isfinite(trip_s):
            return LayoutChain(np.inf, ())
        num = self.problem.global_batch // self.size
        last = len(self.positions) - 1
        stages: list[PlacedStage] = []
        at = 0
        slowest_s = 0.0
        while at < last:
            count = int(first_count[start, at])
            stop = int(choices[start][0][at])
            table = self.tables.get((self._sort_of[start], count))
            assert table is not None, "choices are among tables"
            begin = self.positions[at]
            end = self.positions[stop]
            slowest_s = max(slowest_s, float(table.step_s[begin, end]) / num)
            stages.append((begin, end, self._ranks[start : start + count], table))
            start = int(choices[start][1][at])
            at = stop
        return LayoutChain(float(trip_s) + (num - 1) * slowest_s, tuple(stages))

    def _starts(self, end: int) -> tuple[int, ...]:
        """Where the stage behind one that ends before ``end`` may begin."""
        if end == len(self._ranks):
            return (end,)
        following = self._ends[end]
        return (end,) if end == self._ends[end - 1] or following == len(self._ranks) else (end, following)

    @once
    def _message_s(self, src: int, dst: int, most: int) -> Array:
        """``[ranks - 1, places]``: one way between neighbours, over up to ``most`` ranks."""
        cluster = self.problem.profile.cluster
        ends = (self._ranks[src], self._ranks[dst])
        shares = self.crossing_bytes[None, :] / np.arange(1, most + 1)[:, None]
        hosts = [cluster.devices[rank].host for rank in ends]
        card_bytes_per_s = cluster.nic_bytes_per_s(hosts[0]) if hosts[0] != hosts[1] else None
        card_s = self.crossing_bytes / card_bytes_per_s if card_bytes_per_s else 0.0
        return np.maximum(transfer_s(cluster.link(*ends), shares), card_s)


def _crossing_bytes(problem: Problem, samples: int) -> Array:
    """``[places]``: bytes of all values that layers before a place make and layers behind it read."""
    graph = problem.profile.graph
    values = graph.values()
    made = {layer.name: index + 1 for index, layer in enumerate(graph.layers)}
    last_read = {value: index for index, layer in enumerate(graph.layers) for value in layer.inputs}
    crossing = np.zeros(len(graph.layers) + 1)
    for value, reader in last_read.items():
        if producer(value) in made:
            crossing[made[producer(value)] : reader + 1] += values[value].at(samples, graph.samples).num_bytes
    return crossing
