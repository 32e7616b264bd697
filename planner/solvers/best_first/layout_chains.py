"""Pipelines of stretches of layers on groups of ranks, whatever their layouts: by their bounds, the least first.

Stretches are those of ``layout_bound``, each on a group of one pool; the bound holds whatever their layouts.  Of stages
s = 0, 1, ... let W_s, o_s, f_s and b_s be the least of a step, of there and back, and of its parts as above, and c_s a
message into stage s one way.  Stage s begins after the F of those it reads from, works M micro-batches off between the
F of the first and the B of the last, which is before their B, and does none of its B before some micro-batch was behind
it and came back, so that

    step >= R_s + M o_s,                                   R_s = sum over earlier stages of (o + 2 c)
    step >= R_s + max(f_s + M b_s, M f_s + b_s) + E_s,     E_s = sum over later stages of (o + 2 c)
    step >= L_s + W_s,                                     L_s = sum over earlier stages of (f + c)

Who waits for a stage that ends before layer i is the stage with the first reader of layer i - 1
(``LayerLinks.reader``); what that one does before this layer counts for nothing. Where nobody reads it, R and L start
anew. The least values over all ways to go on, A(i, free devices) of the first two without R, V of the third without L,
E, and T, the least that any of the stages behind take, are a DP from the back; pipelines are then built from the front,
the one of least bound first.

Like pools are folded: only how many of their devices are free counts, and a group has as many as one pool at most.  The
bounds hold for all pipelines, and for some that fit into no pools: these are passed over when they are unfolded.

``OrderedPipelines`` are plans to begin with: those whose stages follow one another along the hosts, on the ranks behind
those of the stage before, or the first of the next pool.  So neighbours are on one host unless it ends between them,
and every message has a link of its own: where stages are put on any pool with room, as the folded bound may, most
messages cross hosts.  With o_s an F and a B of stage s, w_s its step, c_s a message behind it one way, over the fewer
of the ranks at both ends, M micro-batches,

    minimise    sum over s of (o_s + 2 c_s)  +  (M - 1) x      subject to  w_s / M <= x,  c_s <= x

for a few paces x, by a DP from the back over ranks used and layers.  Of the ranks at the far end of a message the DP
knows those of the best way on.  Nothing here is a bound: memory, windows and skips over stages are left to the
simulator.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import prod

import numpy as np
from numpy.typing import NDArray

from planner.costs.calibration.apply_corrections import corrected_cluster
from planner.costs.communication.collectives import transfer_s
from planner.costs.communication.links import without_pairs
from planner.costs.layers.cost_table import Array
from planner.ir.graph import Graph, TensorSpec, producer
from planner.ir.lazy import once
from planner.ir.problem import Problem
from planner.layers import kind
from planner.layers.boundary import without_gradient
from planner.solvers.best_first.layout_bound import GroupTable
from planner.solvers.budget import NUMBER_S, Budget, OutOfTimeError, check_time
from planner.solvers.candidates.candidate import DevicePool
from planner.solvers.candidates.feasibility import may_stream
from planner.solvers.layouts.stage import NONE

_LEAST = ("step_s", "once_s", "forward_s", "back_s")

MOST_WAITING = 5_000
"""Stages whose rivals wait at a time, 40 KB each where there are 170 places to cut and 8 ranks in a pool."""

_ENTRY_S = 1.5 * NUMBER_S
"""Of a pair of places to cut, for each group of devices that the DP looks at."""

Free = tuple[int, ...]
"""Devices that are left, by sort of pool."""


Placed = tuple[int, int, tuple[int, ...], GroupTable]
"""A stage: first layer, last layer + 1, ranks, and the table of ranks like these."""


@dataclass(frozen=True, slots=True, eq=False)
class LayoutChain:
    """A whole pipeline, and what it takes at least; without stages where it fits into no pools."""

    bound_s: float
    stages: tuple[Placed, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LayerLinks:
    """What is known of messages at each place to cut.

    Attributes:
        reader: the first layer behind that reads from the layer just before, and answers with gradients; -1: none.
        message_s: F's way in, at least.
        ways: 2 where B comes back, else 1.
    """

    reader: NDArray[np.intp]
    message_s: Array
    ways: int


@dataclass(frozen=True, slots=True, eq=False)
class _Prefix:
    """The first stages of a pipeline, and what is known of it.

    Attributes:
        arrivals: for ends of stages whose reader is still to come: that layer; of the first micro-batch the way to it
            and its B's way back; its way there.
        stages: (first layer, last layer + 1, sort of pool, devices).
    """

    bound_s: float
    at: int
    free: Free
    arrivals: tuple[tuple[int, float, float], ...] = ()
    stages: tuple[tuple[int, int, int, int], ...] = ()


@dataclass(slots=True, eq=False)
class Chains:
    """All pipelines of one size of the micro-batch.

    Attributes:
        pools: of each sort, those that are alike.
        tables: by sort of pool, of 1, 2, ... ranks; None where nothing can be priced.
        positions: where the layers may be cut, both ends included.
        num_full: full micro-batches, M.
    """

    pools: tuple[tuple[DevicePool, ...], ...]
    tables: Mapping[tuple[int, int], GroupTable | None]
    positions: tuple[int, ...]
    links: LayerLinks
    num_full: int
    max_stages: int
    budget: Budget
    _ahead: dict[Free, Array] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Solves the DP.

        Raises:
            OutOfTimeError: the budget is over, or it would be.
        """
        groups = sum(len(like[0].ranks) for like in self.pools)
        work_s = _ENTRY_S * groups * len(self.positions) ** 2
        if not self.budget.allows(work_s * prod(count + 1 for count in self.all_free)):
            raise OutOfTimeError
        for free in itertools.product(*(range(count + 1) for count in self.all_free)):
            self.budget.require(work_s)
            self._ahead[free] = self._solved(free)

    @property
    def all_free(self) -> Free:
        """Every device."""
        return tuple(sum(len(pool.ranks) for pool in like) for like in self.pools)

    def bound_s(self) -> float:
        """No pipeline is faster."""
        return float(self._ahead[self.all_free][:, self.positions[0]].max())

    def best_first(self, upper_s: Callable[[], float]) -> Iterator[LayoutChain]:
        """Pipelines by their bound, as long as it is below ``upper_s()``; of equal ones the longest first.

        Raises:
            OutOfTimeError: there are too many to keep.
        """
        last, number = self.positions[-1], itertools.count()
        heap: list[tuple[float, int, int, Iterator[_Prefix], _Prefix]] = []

        def push(prefixes: Iterator[_Prefix]) -> None:
            prefix = next(prefixes, None)
            if prefix is not None:
                heappush(heap, (prefix.bound_s, -prefix.at, next(number), prefixes, prefix))

        push(iter([_Prefix(self.bound_s(), self.positions[0], self.all_free)]))
        while heap:
            bound_s, _, _, siblings, prefix = heappop(heap)
            if bound_s >= upper_s():
                return
            push(siblings)
            if len(heap) > MOST_WAITING:
                raise OutOfTimeError
            if prefix.at == last:
                yield LayoutChain(bound_s, self._unfolded(prefix))
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
        least = np.array([[getattr(g[2], name)[prefix.at, stops] for g in groups] for name in _LEAST])
        after = np.stack([self._ahead[g[3]][:, stops] for g in groups], axis=1)
        before_s, lead_s = np.zeros((2, len(stops)))
        for reader, back_s, there_s in prefix.arrivals:
            before_s = np.maximum(before_s, np.where(stops > reader, back_s, 0.0))
            lead_s = np.maximum(lead_s, np.where(stops > reader, there_s, 0.0))
        path_s, whole_s, _, behind_s = self._with_stage(least, after, stops)
        bound_s = np.maximum(np.maximum(before_s + path_s, lead_s + whole_s), np.maximum(behind_s, prefix.bound_s))
        before_s = before_s + least[1] + self.links.ways * self.links.message_s[stops]
        lead_s = lead_s + least[2] + self.links.message_s[stops]
        del least, after, path_s, whole_s, behind_s  # what waits is much
        for place in np.argsort(bound_s, axis=None, kind="stable"):
            g, k = divmod(int(place), len(stops))
            if bound_s[g, k] >= upper_s:
                return
            sort, count, _, rest = groups[g]
            stages = (*prefix.stages, (prefix.at, int(stops[k]), sort, count))
            arrival = (int(self.links.reader[stops[k]]), float(before_s[g, k]), float(lead_s[g, k]))
            arrivals = tuple(each for each in (*prefix.arrivals, arrival) if each[0] >= stops[k])
            yield _Prefix(float(bound_s[g, k]), int(stops[k]), rest, arrivals, stages)

    def _groups(self, free: Free) -> Iterator[tuple[int, int, GroupTable, Free]]:
        """(sort of pool, number of ranks, their table, what is free afterwards)."""
        for sort, left in enumerate(free):
            for count in range(1, min(left, len(self.pools[sort][0].ranks)) + 1):
                table = self.tables[sort, count]
                if table is not None:
                    yield sort, count, table, (*free[:sort], left - count, *free[sort + 1 :])

    def _unfolded(self, prefix: _Prefix) -> tuple[Placed, ...]:
        """The stages on ranks, the largest groups first, each in the first pool with room; empty if one finds none."""
        unused = {sort: [pool.ranks for pool in like] for sort, like in enumerate(self.pools)}
        placed: dict[int, Placed] = {}
        for first, last, sort, count in sorted(prefix.stages, key=lambda stage: -stage[3]):
            number = next((k for k, ranks in enumerate(unused[sort]) if len(ranks) >= count), None)
            table = self.tables[sort, count]
            if number is None or table is None:
                return ()
            ranks, unused[sort][number] = unused[sort][number][:count], unused[sort][number][count:]
            placed[first] = first, last, ranks, table
        return tuple(placed[first] for first, *_ in prefix.stages)

    def _solved(self, free: Free) -> Array:
        """A, V, E, T by layer, those of fewer free devices being known; 0 where nobody waits, and behind all layers."""
        count, stops = self.positions[-1], np.array(self.positions)
        behind = stops[None, :] > np.arange(count)[:, None]
        least_ahead = np.full((4, count + 1), np.inf)
        for _, _, table, rest in self._groups(free):
            least = np.stack([getattr(table, name)[:count, stops] for name in _LEAST])
            each_s = np.where(behind, self._with_stage(least, self._ahead[rest][:, None, stops], stops), np.inf)
            least_ahead[:, :count] = np.minimum(least_ahead[:, :count], each_s.min(axis=-1))
        least_ahead[:, count] = 0.0
        least_ahead[:3] = np.where(self.links.reader >= 0, least_ahead[:3, self.links.reader], 0.0)
        least_ahead[3] = least_ahead.max(axis=0)
        return least_ahead

    def _with_stage(self, least: Array, after: Array, stops: NDArray[np.intp]) -> Array:
        """``[4, ..., stops]``: A, V, E, T of a stage of ``least`` times that ends at ``stops``, all ``after`` it."""
        (step_s, once_s, forward_s, back_s), (path_s, whole_s, round_s, behind_s) = least, after
        message_s, num = self.links.message_s[stops], self.num_full
        both_s = self.links.ways * message_s
        round_s = np.where(round_s > 0, both_s + round_s, 0.0)
        own_s = np.maximum(forward_s + num * back_s, num * forward_s + back_s) + round_s
        path_s = np.where(path_s > 0, once_s + both_s + path_s, 0.0)
        whole_s = np.where(whole_s > 0, forward_s + message_s + whole_s, 0.0)
        path_s, whole_s = np.maximum(np.maximum(num * once_s, own_s), path_s), np.maximum(step_s, whole_s)
        return np.stack([path_s, whole_s, once_s + round_s, np.maximum(step_s, behind_s)])


def links_of(problem: Problem, samples: int, backward: str) -> LayerLinks:
    """What is known of messages at each place between two layers, for micro-batches of ``samples``.

    Nothing where gradients do not come back: then the stage before need not wait for the end of the stage behind.

    Args:
        backward: ``Question.backward``.
    """
    graph = problem.profile.graph
    count, values, silent = len(graph.layers), graph.values(), without_gradient(graph)
    names = {layer.name: index for index, layer in enumerate(graph.layers)}
    reader, message_s = np.full(count + 1, -1), np.zeros(count + 1)
    reader[0] = 0
    for index in reversed(range(count)):
        for value in graph.layers[index].inputs:
            answers = backward == NONE or (values[value].is_float and value not in silent)
            at = names.get(producer(value), -1) + 1
            if at and answers:
                is_same_reader = reader[at] == index
                size = _bytes_read(graph, index, value, values, samples)
                least_s = _least_message_s(problem, size)
                reader[at], message_s[at] = index, max(least_s, message_s[at] if is_same_reader else 0.0)
    return LayerLinks(reader, message_s, 1 if backward == NONE else 2)


def _bytes_read(graph: Graph, at: int, value: str, values: Mapping[str, TensorSpec], samples: int) -> float:
    """What is certainly read of the value, whatever the parts: all by layers that skip nothing, else something."""
    layer = graph.layers[at]
    same = layer.kind == "pointwise" and layer.outputs[0].shape == values[value].shape
    stride = layer.attributes.get("stride")
    sliding = layer.kind == "conv" and isinstance(stride, tuple) and set(stride) == {1} and layer.inputs[0] == value
    whole = same or sliding or kind(layer.kind).REDUCTION == "statistics"
    return float(values[value].at(samples, graph.samples).num_bytes) if whole else 1.0


def _least_message_s(problem: Problem, num_bytes: float) -> float:
    """The shortest that the longest of the messages between two groups may take: equal ones, on the fastest link."""
    if may_stream(problem):
        return 0.0
    links = without_pairs(corrected_cluster(problem.profile)).links.values()
    pairs = (len(problem.ranks) // 2) * (len(problem.ranks) - len(problem.ranks) // 2)
    return min((float(transfer_s(link, num_bytes / max(1, pairs))) for link in links), default=0.0)


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

    def by_pace(self) -> Iterator[LayoutChain]:
        """The best of each pace, the slowest first, each once; the estimate stands for the bound.

        Raises:
            OutOfTimeError: the budget that this runs under is over.
        """
        once_s = min((float(table.once_s[0, -1]) for table in self.tables.values() if table is not None), default=0.0)
        made = set[tuple[tuple[int, tuple[int, ...]], ...]]()
        num_groups = sum((self._sort_of[start], count) in self.tables for start, count in self._groups())
        for parts in _PARTS:
            check_time(_ENTRY_S * num_groups * len(self.positions) ** 2)
            pipeline = self._least(once_s / parts)
            if pipeline is None:
                return
            stages = tuple((first, ranks) for first, _, ranks, _ in pipeline.stages)
            if stages not in made and len(stages) <= (self.problem.max_stages or len(stages)):
                made.add(stages)
                yield pipeline

    def _groups(self) -> Iterator[tuple[int, int]]:
        """(ranks used before, ranks), the last first."""
        for start in reversed(range(len(self._ranks))):
            for count in range(1, self._ends[start] - start + 1):
                yield start, count

    def _least(self, pace_s: float) -> LayoutChain | None:
        """The pipeline of least estimate at a pace; None if there is none."""
        positions, num = np.array(self.positions), self.problem.global_batch // self.size
        last, places = len(positions) - 1, np.arange(len(positions))
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
                    stop_at[is_less], start_at[is_less] = stops[is_less], after
            choices[start] = stop_at, start_at
        if not np.isfinite(trip_s[0, 0]):
            return None
        stages: list[Placed] = []
        at = start = 0
        slowest_s = 0.0
        while at < last:
            count, stop = int(first_count[start, at]), int(choices[start][0][at])
            table = self.tables.get((self._sort_of[start], count))
            if table is None:
                return None
            begin, end = int(positions[at]), int(positions[stop])
            slowest_s = max(slowest_s, float(table.step_s[begin, end]) / num)
            stages.append((begin, end, self._ranks[start : start + count], table))
            start, at = int(choices[start][1][at]), stop
        return LayoutChain(float(trip_s[0, 0]) + (num - 1) * slowest_s, tuple(stages))

    def _starts(self, end: int) -> tuple[int, ...]:
        """Where the stage behind one that ends before ``end`` may begin."""
        if end == len(self._ranks):
            return (end,)
        following = self._ends[end]
        return (end,) if end == self._ends[end - 1] or following == len(self._ranks) else (end, following)

    @once
    def _message_s(self, src: int, dst: int, most: int) -> Array:
        """``[ranks - 1, places]``: one way between neighbours, over up to ``most`` ranks."""
        link = self.problem.profile.cluster.link(self._ranks[src], self._ranks[dst])
        shares = self.crossing_bytes[None, :] / np.arange(1, most + 1)[:, None]
        return np.where(shares > 0, transfer_s(link, shares), 0.0)


def _crossing_bytes(problem: Problem, samples: int) -> Array:
    """``[places]``: bytes of all values that layers before a place make and layers behind it read."""
    graph = problem.profile.graph
    values, made = graph.values(), {layer.name: index + 1 for index, layer in enumerate(graph.layers)}
    last_read = {value: index for index, layer in enumerate(graph.layers) for value in layer.inputs}
    crossing = np.zeros(len(graph.layers) + 1)
    for value, reader in last_read.items():
        if producer(value) in made:
            crossing[made[producer(value)] : reader + 1] += values[value].at(samples, graph.samples).num_bytes
    return crossing
