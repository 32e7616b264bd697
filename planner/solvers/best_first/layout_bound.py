"""Least times of every stretch of layers on a group, whatever the layouts of its layers: what the bounds are made of.

For layers i ... j - 1 of the graph's order on one group of ranks, and M full micro-batches a step,

    step_s[i, j]      all F and B, additions, the sum of gradients, the update
    once_s[i, j]      one F and one B; where backwards may be split, only I of it
    forward_s[i, j]   one F
    back_s[i, j]      the other part of once_s

are no more than over any choice of layouts (``all_spans``), and than over samples shared as in any other plan, which is
priced otherwise.  Memory is ignored.

Pipelines of these stretches on groups of one pool each have a bound that holds whatever their layouts.  Of stages
s = 0, 1, ... let W_s, o_s, f_s and b_s be the least of a step, of there and back, and of its parts as above, and c_s a
message into stage s one way.  Stage s begins after the F of those it reads from, works M micro-batches off between the
F of the first and the B of the last, which is before their B, and does none of its B before some micro-batch was behind
it and came back, so that

    step >= R_s + M o_s,                                   R_s = sum over earlier stages of (o + 2 c)
    step >= R_s + max(f_s + M b_s, M f_s + b_s) + E_s,     E_s = sum over later stages of (o + 2 c)
    step >= L_s + W_s,                                     L_s = sum over earlier stages of (f + c)

Who waits for a stage that ends before layer i is the stage with the first reader of layer i - 1 (``Links.reader``);
what that one does before this layer counts for nothing.  Where nobody reads it, R and L start anew.  The least values
over all ways to go on, A(i, free devices) of the first two without R, V of the third without L, E, and T, the least
that any of the stages behind take, are a DP from the back; pipelines are then built from the front, the one of least
bound first.

Like pools are folded: only how many of their devices are free counts, and a group has as many as one pool at most.  The
bounds hold for all pipelines, and for some that fit into no pools: these are passed over when they are unfolded.
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
from planner.solvers.budget import NUMBER_S, Budget, OutOfTimeError
from planner.solvers.candidates.candidate import Pool, group_shares, micro_batches
from planner.solvers.candidates.constraints import Constraints, Flags
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.candidates.feasibility import may_stream, mixing_layers, usable
from planner.solvers.layouts.factor_graph import LabelledGraph
from planner.solvers.layouts.stage import (
    INPUT,
    LEAST,
    NONE,
    Options,
    Question,
    labelled_graph,
    most_options,
    options_of,
    simplest,
)
from planner.solvers.layouts.variable_elimination import all_spans, eliminate, order_of

_LEAST = ("step_s", "once_s", "forward_s", "back_s")

_ENTRY_S = 8 * NUMBER_S
"""Of a pair of places to cut, for each group of devices that the DP looks at."""

Free = tuple[int, ...]
"""Devices that are left, by sort of pool."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupTable:
    """One group of ranks at one size of the micro-batch.

    Attributes:
        step_s, once_s, forward_s, back_s: ``[first, last]``: the least of any stage of these layers.
        by_samples_s: a step of one cut along samples alone; infinity where there is none.
        shares: samples of each rank of a stage cut along samples alone.
        options: of each layer; empty on one rank.
        graph: of all layers, a step.
        is_restricted: whether layers have options that were not looked at: then nothing here is a bound.
    """

    ranks: tuple[int, ...]
    shares: tuple[int, ...]
    step_s: Array
    once_s: Array
    forward_s: Array
    back_s: Array
    by_samples_s: Array
    options: tuple[Options, ...]
    graph: LabelledGraph | None
    is_restricted: bool = False

    def layouts(self, first: int, last: int) -> dict[int, Option]:
        """The layouts of least ``step_s``, by layer; empty where samples alone are as good."""
        part = self.graph.part(range(first, last)) if self.graph is not None else None
        if part is None or not (order := order_of(part)).is_narrow:
            return {}
        found = eliminate(part, order)
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
            OutOfTimeError: the budget is over.
        """
        count = len(self.problem.profile.graph.layers)
        try:
            least = self._by_samples(ranks)
        except MissingMeasurementError:
            least = np.full((4, count + 1, count + 1), np.inf)
        least = np.where(self._allowed(ranks, Ways(sample=len(ranks))), least, np.inf)
        plain_s = least[0]
        options: tuple[Options, ...] = ()
        graph, is_restricted = None, False
        if len(ranks) > 1:
            try:
                prices = self.evaluator.layouts.prices(ranks, self.size)
                most = most_options(prices, self.work_s)
                options = simplest(self._options(prices), most) if most else ()
                is_restricted = not most or any(len(prices.options(index)) > most for index in range(count))
                if options and all(options):
                    graph = self._graph(prices, options)
                    once = self._once(prices, options, INPUT if self.backward == LEAST else self.backward)
                    forward = self._once(prices, options, NONE)
                    spans_s = np.stack(
                        [all_spans(each, self.budget) for each in (graph, once, forward, _less(once, forward))]
                    )
                    order = order_of(graph)
                    if order.is_narrow:  # of all layers the bound is exact
                        self.budget.require(NUMBER_S * order.all_tables)
                        spans_s[0, 0, count] = eliminate(graph, order).cost
                    least = np.minimum(least, np.where(self._allowed(ranks, None), spans_s, np.inf))
            except MissingMeasurementError:
                graph = None
        if not np.isfinite(least[0, 0, 1:]).any() and not np.isfinite(np.diagonal(least[0], 1)).any():
            return None
        shares = group_shares(self.problem, self.evaluator.book, ranks, self.size)
        step_s, once_s, forward_s, back_s = least
        return GroupTable(ranks, shares, step_s, once_s, forward_s, back_s, plain_s, options, graph, is_restricted)

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

    def _once(self, prices: LayoutPrices, options: tuple[Options, ...], backward: str) -> LabelledGraph:
        """One F and what ``backward`` says; what it needs is priced already."""
        layers = tuple(range(len(prices.layers)))
        return labelled_graph(prices, Question(layers, 1, backward=backward, once_a_step=False), options)

    def _by_samples(self, ranks: tuple[int, ...]) -> Array:
        """Step, there and back, its parts, of stages cut along samples alone; infinity where there are none."""
        problem, book = self.problem, self.evaluator.book
        count = len(problem.profile.graph.layers)
        shares = group_shares(problem, book, ranks, self.size)
        batches = micro_batches(problem, self.size)
        if (len(ranks) > 1 and SAMPLE_DIMS not in problem.allow) or not usable(problem, book, ranks, shares, batches):
            return np.full((4, count + 1, count + 1), np.inf)
        exchanged = self._exchanged(ranks)
        least = samples_of(shares, self.rest) if self.rest else (0,) * len(ranks)
        found: Array = np.max(
            [
                self._member(book.kind(rank), samples, rest, exchanged, len(ranks) > 1)
                for rank, samples, rest in zip(ranks, shares, least, strict=True)
            ],
            axis=0,
        )
        if len(ranks) > 1:
            if self.backward != NONE:
                found[0] += self._reduction_s(ranks, shares, least)
            mixing = mixing_layers(problem.profile.graph)
            mixes = _between(running(np.array([layer.name in mixing for layer in problem.profile.graph.layers], float)))
            found[:, mixes > 0] = np.inf
        return found

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

    def _exchanged(self, ranks: tuple[int, ...]) -> tuple[Array, Array]:
        """Exchanges of statistics of one F and B, and of F alone."""
        if len(ranks) < 2:
            return np.zeros((1, 1)), np.zeros((1, 1))
        again, trains = self.problem.recompute == ALWAYS, self.backward != NONE
        forward, backward = self.evaluator.book.exchanges_s(ranks, self.rest or self.size, again, trains)
        of_forward = self.evaluator.book.exchanges_s(ranks, self.rest or self.size, False, False)[0]
        return _between(forward) + (_between(backward) if trains else 0.0), _between(of_forward)

    def _member(self, kind: str, samples: int, rest: int, exchanged: tuple[Array, Array], shared: bool) -> Array:
        """Step, there and back, its parts, of a rank with so many samples, and so many of the last micro-batch."""
        book, (both, of_forward) = self.evaluator.book, exchanged
        whole_s, once_s, forward_s = self._passes(kind, samples, shared)
        step_s = self.num_full * (whole_s + both) + (self._passes(kind, rest, shared)[0] + both if rest else 0.0)
        if self.backward != NONE:
            again, updates = self.num_full - (not self.rest), _between(book.tables.parameters(kind).update_s)
            step_s = step_s + again * _between(book.accumulate_s(kind, shared)) + updates
        return np.stack([step_s, once_s + both, forward_s + of_forward, once_s - forward_s + both - of_forward])

    def _passes(self, kind: str, samples: int, shared: bool) -> tuple[Array, Array, Array]:
        """All of one F and B, there and back, F."""
        sums = self.evaluator.book.sums(kind, samples, shared, self.problem.recompute == ALWAYS)
        forward_s = _between(sums.forward_s)
        if self.backward == NONE:
            return forward_s, forward_s, forward_s
        whole_s, back_s = (of(self.backward == LEAST) for of in (sums.whole_back_s, sums.path_back_s))
        return forward_s + _between(whole_s), forward_s + _between(back_s), forward_s


def _less(graph: LabelledGraph, part: LabelledGraph) -> LabelledGraph:
    """What ``graph`` costs beside ``part`` of it."""

    def rest(whole: Array, of_it: Array) -> Array:
        return np.where(np.isfinite(whole), np.maximum(whole - np.where(np.isfinite(of_it), of_it, 0.0), 0.0), np.inf)

    return LabelledGraph(
        tuple(map(rest, graph.node_cost, part.node_cost)),
        {edge: rest(cost, part.edge_cost[edge]) for edge, cost in graph.edge_cost.items()},
    )


def _between(sums: Array) -> Array:
    """``[first, last]`` of a running sum."""
    found: Array = sums[None, :] - sums[:, None]
    return found


Placed = tuple[int, int, tuple[int, ...], GroupTable]
"""A stage: first layer, last layer + 1, ranks, and the table of ranks like these."""


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """A whole pipeline, and what it takes at least; without stages where it fits into no pools."""

    bound_s: float
    stages: tuple[Placed, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Links:
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

    pools: tuple[tuple[Pool, ...], ...]
    tables: Mapping[tuple[int, int], GroupTable | None]
    positions: tuple[int, ...]
    links: Links
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

    def best_first(self, upper_s: Callable[[], float]) -> Iterator[Chain]:
        """Pipelines by their bound, as long as it is below ``upper_s()``; of equal ones the longest first."""
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
            if prefix.at == last:
                yield Chain(bound_s, self._unfolded(prefix))
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
        found = np.full((4, count + 1), np.inf)
        for _, _, table, rest in self._groups(free):
            least = np.stack([getattr(table, name)[:count, stops] for name in _LEAST])
            each_s = np.where(behind, self._with_stage(least, self._ahead[rest][:, None, stops], stops), np.inf)
            found[:, :count] = np.minimum(found[:, :count], each_s.min(axis=-1))
        found[:, count] = 0.0
        found[:3] = np.where(self.links.reader >= 0, found[:3, self.links.reader], 0.0)
        found[3] = found.max(axis=0)
        return found

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


def links_of(problem: Problem, samples: int, backward: str) -> Links:
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
                again = reader[at] == index
                size = _bytes_read(graph, index, value, values, samples)
                least_s = _least_message_s(problem, size)
                reader[at], message_s[at] = index, max(least_s, message_s[at] if again else 0.0)
    return Links(reader, message_s, 1 if backward == NONE else 2)


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
