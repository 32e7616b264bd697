"""Least times of every stretch of layers on a group, whatever the layouts of its layers: what the bounds are made of.

For layers i ... j - 1 of the graph's order on one group of ranks, and M full micro-batches a step,

    step_s[i, j]   all F and B, additions, the sum of gradients, the update
    once_s[i, j]   one F and one B

are the least over all choices of layouts (``all_spans``: exact) and over samples shared as in any other plan, which
is priced otherwise.  Memory is ignored.

Pipelines of these stretches on groups of one pool each have a bound that holds whatever their layouts.  Of stages
s = 0, 1, ... let W_s and o_s be the least of a step and of one F and B as above, and c_s a message into stage s one
way.  Stage s works M micro-batches off between the F of the first and the B of the last, after the F and before the B
of what it reads from, so that

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
from planner.costs.layers.cost_table import Array, running
from planner.costs.shards.option import Option
from planner.costs.stages.gradient_overlap import least_exposed_s, least_reduction_s
from planner.costs.stages.layouts import LayoutPrices
from planner.ir.constraints import Ways
from planner.ir.errors import MissingMeasurementError
from planner.ir.graph import Graph, TensorSpec, producer
from planner.ir.layout import samples_of
from planner.ir.problem import ALWAYS, NEVER, SAMPLE_DIMS, Problem
from planner.layers import kind
from planner.layers.boundary import without_gradient
from planner.solvers.budget import Budget
from planner.solvers.candidates.candidate import Pool, group_shares, micro_batches
from planner.solvers.candidates.constraints import Constraints, Flags
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.candidates.feasibility import may_stream, mixing_layers, usable
from planner.solvers.layouts.factor_graph import LabelledGraph
from planner.solvers.layouts.stage import (
    NONE,
    WHOLE,
    Options,
    Question,
    labelled_graph,
    most_options,
    options_of,
    simplest,
)
from planner.solvers.layouts.variable_elimination import LARGEST_TABLE, all_spans, eliminate, spans_table

MOST_STATES = 30_000
"""Cuts x free devices x groups that the DP looks at; beyond it only work over capacity bounds."""

Free = tuple[int, ...]
"""Devices that are left, by pool."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupTable:
    """One group of ranks at one size of the micro-batch.

    Attributes:
        step_s, once_s: ``[first, last]``: the least of any stage of these layers.
        by_samples_s: of one cut along samples alone; infinity where there is none.
        shares: samples of each rank of a stage cut along samples alone.
        options: of each layer; empty on one rank.
        graph: of all layers, a step.
        is_restricted: whether layers have options that were not looked at: then nothing here is a bound.
    """

    ranks: tuple[int, ...]
    shares: tuple[int, ...]
    step_s: Array
    once_s: Array
    by_samples_s: Array
    options: tuple[Options, ...]
    graph: LabelledGraph | None
    is_restricted: bool = False

    def layouts(self, first: int, last: int) -> dict[int, Option]:
        """The layouts of least ``step_s``, by layer; empty where samples alone are as good."""
        if self.graph is None:
            return {}
        found = eliminate(self.graph.part(range(first, last)))
        if not found.cost < self.by_samples_s[first, last]:
            return {}
        return {first + k: self.options[first + k][choice] for k, choice in enumerate(found.assignment)}


@dataclass(frozen=True, slots=True, eq=False)
class TableMaker:
    """Makes tables for one problem and one size of the micro-batch.

    Attributes:
        backward: which backward passes the schedules that may be used have (``Question.backward``).
        budget: for the tables of this size.
        work_s: what the options of one group may take to be priced.
    """

    evaluator: Evaluator
    constraints: Constraints
    size: int
    backward: str
    budget: Budget
    work_s: float

    @property
    def problem(self) -> Problem:
        """What is asked."""
        return self.evaluator.problem

    @property
    def num_full(self) -> int:
        """Micro-batches of the full size, M."""
        return self.problem.global_batch // self.size

    @property
    def rest(self) -> int:
        """Samples of a last, smaller micro-batch; 0: there is none."""
        return self.problem.global_batch % self.size

    def table(self, ranks: tuple[int, ...]) -> GroupTable | None:
        """The table of a group; None if nothing can be priced on it.

        Raises:
            MemoryError: the network is too far from a chain.
            OutOfTimeError: the budget is over.
        """
        count = len(self.problem.profile.graph.layers)
        try:
            step_s, once_s = self._by_samples(ranks)
        except MissingMeasurementError:
            step_s, once_s = np.full((2, count + 1, count + 1), np.inf)
        plain = self._allowed(ranks, Ways(sample=len(ranks)))
        step_s, once_s = np.where(plain, step_s, np.inf), np.where(plain, once_s, np.inf)
        plain_s = step_s
        options: tuple[Options, ...] = ()
        graph, is_restricted = None, False
        if len(ranks) > 1:
            try:
                prices = self.evaluator.layouts.prices(ranks, self.size)
                most = most_options(prices, self.work_s)
                options = simplest(self._options(prices), most) if most else ()
                is_restricted = not most or any(len(prices.options(index)) > most for index in range(count))
                if options and all(options):
                    edges = prices.edges(tuple(range(count)))
                    if spans_table([len(each) for each in options], edges) > LARGEST_TABLE:
                        raise MemoryError("the network is too far from a chain")
                    graph = self._graph(prices, options)
                    laid_out = self._allowed(ranks, None)
                    spans_s = all_spans(graph, self.budget)
                    step_s = np.minimum(step_s, np.where(laid_out, spans_s, np.inf))
                    spans_s = all_spans(self._once(prices, options), self.budget)
                    once_s = np.minimum(once_s, np.where(laid_out, spans_s, np.inf))
            except MissingMeasurementError:
                graph = None
        if not np.isfinite(step_s[0, 1:]).any() and not np.isfinite(np.diagonal(step_s, 1)).any():
            return None
        shares = group_shares(self.problem, self.evaluator.book, ranks, self.size)
        return GroupTable(ranks, shares, step_s, once_s, plain_s, options, graph, is_restricted)

    def _allowed(self, ranks: tuple[int, ...], ways: Ways | None) -> Flags:
        """``[first, last]``: the stages on a group like ``ranks`` that side constraints allow.

        Args:
            ways: of all layers of the stage; None: each has its own, of ``options``.
        """
        count = len(self.problem.profile.graph.layers)
        if not self.constraints.rules:
            return np.ones((count + 1, count + 1), dtype=bool)
        return self.constraints.mask(np.arange(count + 1), ranks, None, ways)

    def _options(self, prices: LayoutPrices) -> tuple[Options, ...]:
        recompute = ALWAYS if self.problem.recompute == ALWAYS else NEVER
        found = options_of(prices, Question(tuple(range(len(prices.layers))), recompute=recompute))
        if not self.constraints.rules:
            return found
        return tuple(
            tuple(option for option in each if self.constraints.allows_layer(index, Ways.of(dict(option.cuts))))
            for index, each in enumerate(found)
        )

    def _graph(self, prices: LayoutPrices, options: tuple[Options, ...]) -> LabelledGraph:
        """A step of all layers: full micro-batches, then the rest of the batch at its own price."""
        layers = tuple(range(len(prices.layers)))
        full = labelled_graph(prices, Question(layers, self.num_full, backward=self.backward), options, self.budget)
        if not self.rest:
            return full
        smaller = self.evaluator.layouts.prices(prices.ranks, self.rest)
        asked = Question(layers, 1, backward=self.backward, once_a_step=False)
        rest = labelled_graph(smaller, asked, options, self.budget)
        nodes = []
        for index, each in enumerate(options):
            table = smaller.layer(index, each)
            more = 0.0 if self.backward == NONE else table.accumulate_s.max(axis=-1)
            nodes.append(np.where((table.shards.share > 0).all(axis=-1), rest.node_cost[index] + more, np.inf))
        return LabelledGraph(
            tuple(a + b for a, b in zip(full.node_cost, nodes, strict=True)),
            {edge: cost + rest.edge_cost[edge] for edge, cost in full.edge_cost.items()},
        )

    def _once(self, prices: LayoutPrices, options: tuple[Options, ...]) -> LabelledGraph:
        layers = tuple(range(len(prices.layers)))
        asked = Question(layers, 1, backward=self.backward, once_a_step=False)
        return labelled_graph(prices, asked, options, self.budget)

    def _by_samples(self, ranks: tuple[int, ...]) -> tuple[Array, Array]:
        """(a step, one F and B) of stages cut along samples alone, or of one rank; infinity where there are none."""
        problem, book = self.problem, self.evaluator.book
        count = len(problem.profile.graph.layers)
        step_s, once_s = np.full((2, count + 1, count + 1), np.inf)
        shares = group_shares(problem, book, ranks, self.size)
        batches = micro_batches(problem, self.size)
        if (len(ranks) > 1 and SAMPLE_DIMS not in problem.allow) or not usable(problem, book, ranks, shares, batches):
            return step_s, once_s
        exchanged = self._exchanged(ranks)
        least = samples_of(shares, self.rest) if self.rest else (0,) * len(ranks)
        each = [
            self._member(book.kind(rank), samples, rest, exchanged, len(ranks) > 1)
            for rank, samples, rest in zip(ranks, shares, least, strict=True)
        ]
        step_s, once_s = (np.max([pair[k] for pair in each], axis=0) for k in (0, 1))
        if len(ranks) > 1:
            if self.backward != NONE:
                step_s += self._reduction_s(ranks, shares, least)
            mixing = mixing_layers(problem.profile.graph)
            mixes = _between(running(np.array([layer.name in mixing for layer in problem.profile.graph.layers], float)))
            step_s[mixes > 0], once_s[mixes > 0] = np.inf, np.inf
        return step_s, once_s

    def _reduction_s(self, ranks: tuple[int, ...], shares: tuple[int, ...], rest: tuple[int, ...]) -> Array:
        """The least that stages cut along samples alone wait for the sum of their gradients."""
        book, cluster = self.evaluator.book, self.evaluator.book.profile.cluster
        size = np.maximum(_between(book.tables.graph.parameter_bytes), 0.0)
        if zero := self.problem.zero_over(len(ranks)):
            return least_reduction_s(cluster, ranks, size, np.zeros_like(size), zero)
        last = zip(ranks, rest if self.rest else shares, strict=True)
        backs = [_between(book.at(book.kind(rank), samples, True).backward_s) for rank, samples in last]
        exchanged = _between(book.exchanges_s(ranks, self.rest or self.size)[1])
        return least_exposed_s(cluster, ranks, size, np.max(backs, axis=0) + exchanged)

    def _exchanged(self, ranks: tuple[int, ...]) -> Array:
        """Exchanges of statistics of one F and B."""
        if len(ranks) < 2:
            return np.zeros((1, 1))
        again, trains = self.problem.recompute == ALWAYS, self.backward != NONE
        forward, backward = self.evaluator.book.exchanges_s(ranks, self.rest or self.size, again, trains)
        return _between(forward) + (_between(backward) if trains else 0.0)

    def _member(self, kind: str, samples: int, rest: int, exchanged: Array, shared: bool) -> tuple[Array, Array]:
        """(a step, one F and B) of a rank with so many samples, and so many of the last micro-batch."""
        book = self.evaluator.book
        once_s = self._pass(kind, samples, shared) + exchanged
        step_s = self.num_full * once_s + (self._pass(kind, rest, shared) + exchanged if rest else 0.0)
        if self.backward == NONE:
            return step_s, once_s
        again, updates = self.num_full - (not self.rest), _between(book.tables.parameters(kind).update_s)
        return step_s + again * _between(book.accumulate_s(kind, shared)) + updates, once_s

    def _pass(self, kind: str, samples: int, shared: bool) -> Array:
        """One F and B."""
        sums = self.evaluator.book.sums(kind, samples, shared, self.problem.recompute == ALWAYS)
        back_s = 0.0 if self.backward == NONE else _between(sums.whole_back_s(self.backward != WHOLE))
        return _between(sums.forward_s) + back_s


def _between(sums: Array) -> Array:
    """``[first, last]`` of a running sum."""
    found: Array = sums[None, :] - sums[:, None]
    return found


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
    values, silent = graph.values(), without_gradient(graph)
    joined, message_s = np.zeros(len(graph.layers) + 1, dtype=bool), np.zeros(len(graph.layers) + 1)
    for at, (before, behind) in enumerate(pairwise(graph.layers), start=1):
        reads = {value for value in behind.inputs if producer(value) == before.name}
        if backward != NONE:
            reads = {v for v in reads if values[v].is_float and v not in silent and backward == WHOLE}
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
    if may_stream(problem):
        return 0.0
    links = without_pairs(corrected_cluster(problem.profile)).links.values()
    pairs = (len(problem.ranks) // 2) * (len(problem.ranks) - len(problem.ranks) // 2)
    return min((float(transfer_s(link, num_bytes / max(1, pairs))) for link in links), default=0.0)
