"""Pipelines of stretches of layers on groups of one pool each, by a bound that holds whatever their layouts.

Of stages s = 0, 1, ... let W_s and o_s be the least of a step and of one F and B (``layout_bound``), and c_s a message
into stage s one way.  Stage s works M micro-batches off between the F of the first and the B of the last, after the F
and before the B of what it reads from, so that

    step >= max over s of  R_s + M o_s,   R_s = sum over earlier stages of (o + 2 c)       and   step >= max W_s

A stage need not read from the one before; R starts anew where the layer behind a cut does not read from the layer just
before it (``Links.joined``).  The least values over all ways to go on, A(i, free devices) and B(i, free devices),
are a DP from the back; pipelines are then built from the front, the one of least bound first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.costs.calibration.apply_corrections import corrected_cluster
from planner.costs.communication.collectives import transfer_s
from planner.costs.communication.links import without_pairs
from planner.costs.layers.cost_table import Array
from planner.ir.graph import Graph, TensorSpec, producer
from planner.ir.problem import Problem
from planner.layers import kind
from planner.solvers.best_first.layout_bound import GroupTable
from planner.solvers.candidates.candidate import Pool
from planner.solvers.layouts.stage import NONE, WHOLE

MOST_STATES = 30_000
"""Cuts x free devices x groups that the DP looks at; beyond it only work over capacity bounds."""

Free = tuple[int, ...]
"""Devices that are left, by pool."""


Placed = tuple[int, int, tuple[int, ...], GroupTable]
"""A stage: first layer, last layer + 1, ranks, and the table of ranks like these."""


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """A whole pipeline, and what it takes at least."""

    bound_s: float
    stages: tuple[Placed, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """What is known of messages at each place to cut.

    Attributes:
        joined: whether the layer behind it reads from the layer before it, and answers with gradients.
        message_s: F's way in and B's way back, at least.
    """

    joined: NDArray[np.bool_]
    message_s: Array


@dataclass(slots=True, eq=False)
class Chains:
    """All pipelines of one size of the micro-batch.

    Attributes:
        tables: by pool, of 1, 2, ... ranks; None where nothing can be priced.
        positions: where the layers may be cut, both ends included.
        num_full: full micro-batches, M.
    """

    pools: tuple[Pool, ...]
    tables: Mapping[tuple[int, int], GroupTable | None]
    positions: tuple[int, ...]
    links: Links
    num_full: int
    max_stages: int
    _ahead: dict[Free, tuple[Array, Array]] = field(init=False, default_factory=dict, repr=False)

    @property
    def all_free(self) -> Free:
        """Every device."""
        return tuple(len(pool.ranks) for pool in self.pools)

    def bound_s(self) -> float:
        """No pipeline is faster."""
        first = self.positions[0]
        chain, bottleneck = self._solved(self.all_free)
        return max(float(chain[first]), float(bottleneck[first]))

    def best_first(self, upper_s: Callable[[], float]) -> Iterator[Chain]:
        """Pipelines by their bound, as long as it is below ``upper_s()``."""
        first, last = self.positions[0], self.positions[-1]
        number = itertools.count()
        heap: list[tuple[float, int, int, Free, float, float, tuple[Placed, ...]]] = []
        heappush(heap, (self.bound_s(), next(number), first, self.all_free, 0.0, 0.0, ()))
        while heap:
            bound_s, _, at, free, before_s, most_s, stages = heappop(heap)
            if bound_s >= upper_s():
                return
            if at == last:
                yield Chain(bound_s, stages)
                continue
            if self.max_stages and len(stages) >= self.max_stages:
                continue
            for pool, count, rest in self._groups(free):
                table = self.tables[pool, count]
                if table is None:
                    continue
                chain, bottleneck = self._solved(rest)
                taken = len(self.pools[pool].ranks) - free[pool]
                ranks = self.pools[pool].ranks[taken : taken + count]
                for stop in self.positions:
                    if stop <= at or not np.isfinite(table.step_s[at, stop]):
                        continue
                    once_s = float(table.once_s[at, stop])
                    most = max(most_s, float(table.step_s[at, stop]), before_s + self.num_full * once_s)
                    there_s = before_s + once_s + self.links.message_s[stop] if self.links.joined[stop] else 0.0
                    rest_s = 0.0 if stop == last else max(there_s + chain[stop], bottleneck[stop])
                    bound = max(bound_s, most, float(rest_s))
                    if bound < upper_s():
                        entry = (
                            bound,
                            next(number),
                            stop,
                            rest,
                            float(there_s),
                            most,
                            (*stages, (at, stop, ranks, table)),
                        )
                        heappush(heap, entry)

    def _groups(self, free: Free) -> Iterator[tuple[int, int, Free]]:
        """(pool, number of its ranks, what is free afterwards)."""
        for pool, left in enumerate(free):
            for count in range(1, left + 1):
                yield pool, count, (*free[:pool], left - count, *free[pool + 1 :])

    def _solved(self, free: Free) -> tuple[Array, Array]:
        """A and B by first layer."""
        found = self._ahead.get(free)
        if found is not None:
            return found
        chain = np.full(self.positions[-1] + 1, np.inf)
        bottleneck = chain.copy()
        chain[self.positions[-1]] = bottleneck[self.positions[-1]] = 0.0
        groups = [(table, rest) for p, c, rest in self._groups(free) if (table := self.tables[p, c]) is not None]
        ahead = [(table, *self._solved(rest)) for table, rest in groups]
        for at, first in enumerate(self.positions[:-1]):
            stops = np.array(self.positions[at + 1 :])
            for table, chain_after, bottleneck_after in ahead:
                once_s = table.once_s[first, stops]
                onward = np.where(self.links.joined[stops], once_s + self.links.message_s[stops], 0.0)
                onward[-1] = 0.0
                values = np.maximum(self.num_full * once_s, onward + chain_after[stops])
                chain[first] = min(chain[first], float(values.min()))
                values = np.maximum(table.step_s[first, stops], bottleneck_after[stops])
                bottleneck[first] = min(bottleneck[first], float(values.min()))
        self._ahead[free] = chain, bottleneck
        return chain, bottleneck


def num_states(pools: tuple[Pool, ...], positions: tuple[int, ...]) -> int:
    """How much the DP would look at."""
    states = int(np.prod([len(pool.ranks) + 1 for pool in pools]))
    return len(positions) * states * sum(len(pool.ranks) for pool in pools)


def links_of(problem: Problem, samples: int, backward: str) -> Links:
    """What is known of messages at each place between two layers, for micro-batches of ``samples``.

    Nothing where gradients do not come back, or weights' gradients may be left for later: then the stage before need
    not wait for the end of the stage behind.

    Args:
        backward: ``Question.backward``.
    """
    graph = problem.profile.graph
    values = graph.values()
    joined, message_s = np.zeros(len(graph.layers) + 1, dtype=bool), np.zeros(len(graph.layers) + 1)
    for at, (before, behind) in enumerate(pairwise(graph.layers), start=1):
        reads = {value for value in behind.inputs if producer(value) == before.name}
        if backward != NONE:
            reads = {value for value in reads if values[value].is_float and backward == WHOLE}
        joined[at] = bool(reads)
        if reads:
            size = max(_bytes_read(graph, at, value, values, samples) for value in reads)
            message_s[at] = _least_message_s(problem, size) * (1 if backward == NONE else 2)
    return Links(joined, message_s)


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
    links = without_pairs(corrected_cluster(problem.profile)).links.values()
    pairs = (len(problem.ranks) // 2) * (len(problem.ranks) - len(problem.ranks) // 2)
    return min((float(transfer_s(link, num_bytes / max(1, pairs))) for link in links), default=0.0)
