"""Pipelines whose stages follow one another along the hosts: plans to begin with, for the search over layouts.

Of the pipelines of ``layout_chains`` those whose stages take the ranks behind those of the stage before, or the first
of the next pool.  So neighbours are on one host unless it ends between them, and every message has a link of its own:
where stages are put on any pool with room, as the folded bound may, most messages cross hosts.  With o_s an F and a B
of stage s, w_s its step, c_s a message behind it one way, over the fewer of the ranks at both ends, M micro-batches,

    minimise    sum over s of (o_s + 2 c_s)  +  (M - 1) x      subject to  w_s / M <= x,  c_s <= x

for a few paces x, by a DP from the back over ranks used and layers.  Of the ranks at the far end of a message the DP
knows those of the best way on.  Nothing here is a bound: memory, windows and skips over stages are left to the
simulator.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner.costs.communication.collectives import transfer_s
from planner.costs.layers.cost_table import Array
from planner.ir.graph import producer
from planner.ir.lazy import Memo
from planner.ir.problem import Problem
from planner.solvers.best_first.layout_bound import GroupTable
from planner.solvers.best_first.layout_chains import LayoutChain, Placed
from planner.solvers.budget import NUMBER_S, check_time
from planner.solvers.candidates.candidate import DevicePool

_PARTS = (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96)
"""Paces that are tried: the least F and B of all layers, in so many parts."""

_ENTRY_S = 1.5 * NUMBER_S
"""Of a pair of places to cut, for each group of ranks that a stage may have."""


@dataclass(slots=True, eq=False)
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
    _messages: Memo[tuple[int, int, int], Array] = field(init=False)

    def __post_init__(self) -> None:
        pools = sorted((pool.ranks, sort) for sort, like in enumerate(self.pools) for pool in like)
        self._ranks = tuple(rank for ranks, _ in pools for rank in ranks)
        self._sort_of = tuple(sort for ranks, sort in pools for _ in ranks)
        ends = itertools.accumulate(len(ranks) for ranks, _ in pools)
        self._ends = tuple(end for end, (ranks, _) in zip(ends, pools, strict=True) for _ in ranks)
        self.crossing_bytes = _crossing_bytes(self.problem, self.size)[list(self.positions)]
        self._messages = Memo(lambda key: self._message_s(*key))

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
                        message_s = self._messages[start + count - 1, after, count][few - 1, places]
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
