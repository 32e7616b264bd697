"""Pipelines to begin with along the hosts, whatever the layouts of their layers; nothing here is a bound.

Their stages are on the ranks behind those of the stage before, or the first of the next pool.  So neighbours are on one
host unless it ends between them: where stages are put on any pool with room, as the folded bound of ``layout_chains``
may, most messages cross hosts.  With o_s an F and a B of stage s, w_s its step, c_s a message behind it one way, over
the fewer of the ranks at both ends and on the card, M micro-batches,

    minimise    sum over s of (o_s + 2 c_s)  +  (M - 1) x      subject to  w_s / M <= x,  c_s <= x

for a few paces x, by a DP from the back over ranks used and layers.  Of the ranks at the far end of a message the DP
knows those of the best way on.  Memory, windows and skips over stages are left to the simulator.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner.costs.communication.collectives import transfer_s
from planner.costs.layers.cost_table import Array
from planner.ir.graph import producer
from planner.ir.lazy import once
from planner.ir.problem import Problem
from planner.solvers.best_first.layout_bound import GroupTable
from planner.solvers.best_first.layout_chains import ENTRY_S, LayoutChain, PlacedStage
from planner.solvers.budget import check_time
from planner.solvers.candidates.candidate import DevicePool


def doubled(most: int) -> list[int]:
    """1, 2, 4, ... and ``most``."""
    return sorted({*(1 << power for power in range(most.bit_length())), most})


_PARTS = (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96)
"""Paces that are tried: the least F and B of all layers, in so many parts."""


@dataclass(frozen=True, slots=True, eq=False)
class _BestFrom:
    """The best pipelines from a number of ranks used and a place on, as far as they are known; filled by the DP."""

    trip_s: Array  # [ranks used, places] a micro-batch there and back
    count: NDArray[np.intp]  # [ranks used, places] ranks of the first stage
    stop: NDArray[np.intp]  # [ranks used, places] the place where it ends
    after: NDArray[np.intp]  # [ranks used, places] ranks used before the next one

    @classmethod
    def none(cls, num_ranks: int, num_places: int) -> _BestFrom:
        """None as yet."""
        numbers = np.zeros((3, num_ranks, num_places), dtype=np.intp)
        return cls(np.full((num_ranks, num_places), np.inf), *numbers)

    def take(self, start: int, count: int, after: int, each_s: Array) -> None:
        """Those that begin with a stage of ``count`` ranks, by place and end, where they are better."""
        stops = each_s.argmin(axis=1)
        least_s = each_s[np.arange(len(stops)), stops]
        is_less = least_s < self.trip_s[start]
        self.trip_s[start, is_less] = least_s[is_less]
        self.count[start, is_less] = count
        self.stop[start, is_less] = stops[is_less]
        self.after[start, is_less] = after


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
            check_time(ENTRY_S * num_groups * len(self.positions) ** 2)
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
        best = _BestFrom.none(len(self._ranks), len(self.positions))
        for start, count in self._groups():
            table = self.tables.get((self._sort_of[start], count))
            if table is not None:
                once_s = self._once_s(table, pace_s)
                for after in self._starts(start + count):
                    best.take(start, count, after, once_s + self._onward_s(best, (start, count, after), pace_s))
        return [self._read(begin, best) for begin in begins]

    @property
    def _num_full(self) -> int:
        """Micro-batches."""
        return self.problem.global_batch // self.size

    def _once_s(self, table: GroupTable, pace_s: float) -> Array:
        """``[places, places]``: an F and a B of stages that keep the pace; infinite where there is none."""
        ends = np.ix_(self.positions, self.positions)
        is_stage = np.triu(table.step_s[ends] <= self._num_full * pace_s, 1)
        return np.where(is_stage, table.once_s[ends], np.inf)

    def _onward_s(self, best: _BestFrom, stage: tuple[int, int, int], pace_s: float) -> Array:
        """By place where a stage ends, the least from there on: messages there and back, and what is behind them.

        Args:
            stage: ranks used before it, its own, and ranks that are passed by before the next one begins.
        """
        start, count, after = stage
        places = np.arange(len(self.positions))
        is_end = places == places[-1]
        if after == len(self._ranks):
            return np.where(is_end, 0.0, np.inf)
        fewer = np.minimum(count, np.maximum(best.count[after], 1))
        message_s = self._message_s(start + count - 1, after, count)[fewer - 1, places]
        way_s = np.where(message_s > pace_s, np.inf, 2 * message_s + best.trip_s[after])
        return np.where(is_end, 0.0, way_s)

    def _read(self, start: int, best: _BestFrom) -> LayoutChain:
        """The pipeline that begins on rank ``start``, by the DP's choices."""
        trip_s = float(best.trip_s[start, 0])
        if not np.isfinite(trip_s):
            return LayoutChain(np.inf, ())
        stages: list[PlacedStage] = []
        at = 0
        slowest_s = 0.0
        while at < len(self.positions) - 1:
            count = int(best.count[start, at])
            stop = int(best.stop[start, at])
            table = self.tables.get((self._sort_of[start], count))
            assert table is not None, "choices are among tables"
            begin = self.positions[at]
            end = self.positions[stop]
            slowest_s = max(slowest_s, float(table.step_s[begin, end]) / self._num_full)
            stages.append((begin, end, self._ranks[start : start + count], table))
            start = int(best.after[start, at])
            at = stop
        return LayoutChain(trip_s + (self._num_full - 1) * slowest_s, tuple(stages))

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
