"""Least times of every stretch of layers on a group, whatever the layouts of its layers: what the bounds are made of.

For layers i ... j - 1 of the graph's order on one group of ranks, and M full micro-batches a step,

    step_s[i, j]      all F and B, additions, the sum of gradients, the update
    once_s[i, j]      one F and one B; where backwards may be split, only I of it
    forward_s[i, j]   one F
    back_s[i, j]      the other part of once_s

are no more than over any choice of layouts (``all_spans``), and than over samples shared as in any other plan, which is
priced otherwise.  Memory is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from planner.costs.layers.cost_table import Array, running
from planner.costs.shards.device_mesh import layout_on
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.costs.stages.gradient_overlap import least_reduction_s
from planner.costs.stages.layouts import LayoutPrices
from planner.ir.cluster import RankIds
from planner.ir.constraints import CutDegrees
from planner.ir.errors import MissingMeasurementError
from planner.ir.layout import Shares, samples_of
from planner.ir.problem import ALWAYS, CHANNEL_DIMS, NEVER, SAMPLE_DIMS, Problem
from planner.layers.sized import REPLICA
from planner.solvers.best_first.capacity import least_work_s
from planner.solvers.budget import NUMBER_S, Budget
from planner.solvers.candidates.candidate import group_shares, micro_batches
from planner.solvers.candidates.constraints import Constraints, Flags
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.candidates.feasibility import usable
from planner.solvers.layouts.factor_graph import LabelledGraph
from planner.solvers.layouts.stage import (
    INPUT,
    LEAST,
    NONE,
    LayerOptions,
    PricedOptions,
    Question,
    labelled_graph,
    most_options,
    options_of,
    simplest,
)
from planner.solvers.layouts.variable_elimination import all_spans, eliminate, order_of


@dataclass(frozen=True, eq=False)
class GroupTable:
    """One group of ranks at one size of the micro-batch.

    Attributes:
        shares: samples of each rank of a stage cut along samples alone.
        by_samples_s: ``[4, first, last]``: step, once, forward and back (above) of a stage cut along samples alone;
            infinity where there is none.
        laid_out_s: of one whose layers have layouts of their own.
        options: of each layer; empty on one rank.
        graph: of all layers, a step.
        is_restricted: whether layers have options that were not looked at: then nothing here is a bound.
        is_rough: whether options were not priced (``TableMaker.rough``).
    """

    ranks: RankIds
    shares: Shares
    by_samples_s: Array
    laid_out_s: Array
    options: tuple[LayerOptions, ...]
    graph: LabelledGraph | None
    is_restricted: bool = False
    is_rough: bool = False

    @cached_property
    def least_s(self) -> Array:
        """``[4, first, last]``: the least of any stage of these layers."""
        return np.minimum(self.by_samples_s, self.laid_out_s)

    @property
    def step_s(self) -> Array:
        """``[first, last]``."""
        return np.asarray(self.least_s[0])

    def layouts(self, first: int, last: int, by_samples_s: float | None = None) -> dict[int, ShardingSpec]:
        """The layouts of least ``step_s``, by layer; empty where samples alone are as good.

        Args:
            by_samples_s: what samples alone take; by default as the table says.
        """
        part = self.graph.part(range(first, last)) if self.graph is not None else None
        if part is None or not (order := order_of(part)).is_narrow:
            return {}
        least = eliminate(part, order)
        if not least.cost < (self.by_samples_s[0, first, last] if by_samples_s is None else by_samples_s):
            return {}
        return {first + k: self.options[first + k][choice] for k, choice in enumerate(least.assignment)}


@dataclass(frozen=True, eq=False)
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

    def table(self, ranks: RankIds, of_stretches: bool = True) -> GroupTable | None:
        """The table of a group; None if nothing can be priced on it.

        Args:
            of_stretches: whether stretches of layers are asked about; else layouts are for steps of all layers alone.

        Raises:
            OutOfTimeError: the budget is over.
        """
        count = len(self.problem.graph.layers)
        by_samples_s = self._by_samples_if_allowed(ranks)
        laid_out_s = np.full(by_samples_s.shape, inf)
        options: tuple[LayerOptions, ...] = ()
        graph = None
        is_restricted = False
        if len(ranks) > 1:
            try:
                prices = self.evaluator.layouts.prices(ranks, self.size)
                recompute = ALWAYS if self.problem.recompute == ALWAYS else NEVER
                question = Question(tuple(range(count)), recompute=recompute)
                options, most = open_options(self.constraints, prices, question, self.work_s)
                is_restricted = not most or any(len(prices.options(index)) > most for index in range(count))
                if options and all(options):
                    priced = PricedOptions.of(prices, question.layers, options, self.budget)
                    graph = self._graph(priced, options)
                    order = order_of(graph)
                    if of_stretches or not order.is_narrow:
                        once = self._once(priced, INPUT if self.backward == LEAST else self.backward)
                        forward = self._once(priced, NONE)
                        graphs = graph, once, forward, _less(once, forward)
                        laid_out_s = np.stack([all_spans(each, self.budget) for each in graphs])
                    if order.is_narrow:  # of all layers the bound is exact
                        self.budget.require(NUMBER_S * order.all_tables)
                        laid_out_s[0, 0, count] = eliminate(graph, order).cost
                    laid_out_s = np.where(self._allowed(ranks, None), laid_out_s, inf)
            except MissingMeasurementError:
                graph = None
                laid_out_s = np.full(by_samples_s.shape, inf)
        shares = group_shares(self.problem, self.evaluator.cost_model, ranks, self.size)
        table = GroupTable(ranks, shares, by_samples_s, laid_out_s, options, graph, is_restricted)
        is_empty = not np.isfinite(table.step_s[0, 1:]).any() and not np.isfinite(np.diagonal(table.step_s, 1)).any()
        return None if is_empty else table

    def rough(self, ranks: RankIds) -> GroupTable:
        """The table of a group with options of layers not priced: their work is even, normalisations exchange.

        What it says is no more than :meth:`table` does of the same stages.
        """
        by_samples_s = self._by_samples_if_allowed(ranks)
        laid_out_s = np.full(by_samples_s.shape, inf)
        if len(ranks) > 1:
            step_s, once_s = self._least_work_s
            exchanged_s = self._laid_out_statistics_s(ranks)
            laid_out_s[0] = _between(running(step_s / len(ranks) + self.num_full * exchanged_s))
            laid_out_s[1] = _between(running(once_s / len(ranks) + exchanged_s))
            laid_out_s[2:] = 0.0
        shares = group_shares(self.problem, self.evaluator.cost_model, ranks, self.size)
        return GroupTable(ranks, shares, by_samples_s, laid_out_s, (), None, is_rough=len(ranks) > 1)

    @cached_property
    def _least_work_s(self) -> tuple[Array, Array]:
        """By layer, the least device time of a step, and of one micro-batch; where B may be halved of its F alone."""
        step_s = least_work_s(self.evaluator, self.size, self.backward)
        both_s = least_work_s(self.evaluator, self.size, NONE) if self.backward == LEAST else step_s
        return step_s, both_s * (self.size / self.problem.global_batch)

    def _laid_out_statistics_s(self, ranks: RankIds) -> Array:
        """By layer: what a micro-batch exchanges for a normalisation at least, with layouts of their own.

        Ranks with equal channels exchange statistics, copies too (``partial_sums.statistics_s``).  So all ranks do,
        however the layers are laid out, unless channels are cut: then nothing is known.
        """
        prices = self.evaluator.layouts.prices(ranks, self.size)
        least_s = np.zeros(len(prices.layers))
        if CHANNEL_DIMS in self.problem.allow or len(ranks) < 2:
            return least_s
        speeds = prices.speeds()
        for index in range(len(prices.layers)):
            sized = prices.sized(index)
            if sized.relation.REDUCTION == "statistics" and (copies := layout_on(sized, speeds, {REPLICA: len(ranks)})):
                by_option = prices.sums(index, prices.shards(index, (ShardingSpec.of(copies),))).statistics_s
                least_s[index] = by_option[: 1 if self.backward == NONE else 2].sum()
        return least_s

    def least_statistics_s(self, ranks: RankIds) -> float:
        """What the full micro-batches of one stage of all layers on ``ranks`` exchange at least for normalisations."""
        if CHANNEL_DIMS in self.problem.allow or len(ranks) < 2:
            return 0.0
        laid_out_s = float(self._laid_out_statistics_s(ranks).sum())
        by_samples_s = float(np.max(self._exchanged(ranks)[0])) if SAMPLE_DIMS in self.problem.allow else inf
        return self.num_full * min(laid_out_s, by_samples_s)

    def _by_samples_if_allowed(self, ranks: RankIds) -> Array:
        """``GroupTable.by_samples_s``."""
        count = len(self.problem.graph.layers)
        try:
            by_samples_s = self._by_samples(ranks)
        except MissingMeasurementError:
            by_samples_s = np.full((4, count + 1, count + 1), inf)
        return np.where(self._allowed(ranks, CutDegrees(sample=len(ranks))), by_samples_s, inf)

    def _allowed(self, ranks: RankIds, ways: CutDegrees | None) -> Flags:
        """``[first, last]``: the stages on a group like ``ranks`` that side constraints allow.

        Args:
            ways: of all layers of the stage; None: each has its own, of ``options``.
        """
        count = len(self.problem.graph.layers)
        if not self.constraints.rules:
            return np.ones((count + 1, count + 1), dtype=bool)
        return self.constraints.mask(np.arange(count + 1), ranks, None, ways)

    def _graph(self, priced: PricedOptions, options: tuple[LayerOptions, ...]) -> LabelledGraph:
        """A step of all layers: full micro-batches, then the rest of the batch at its own price."""
        prices = priced.prices
        layers = priced.layers
        full = priced.graph(Question(layers, self.num_full, backward=self.backward))
        if not self.rest:
            return full
        smaller = self.evaluator.layouts.prices(prices.ranks, self.rest)
        asked = Question(layers, 1, backward=self.backward, once_a_step=False)
        rest = labelled_graph(smaller, asked, options, self.budget)
        nodes = []
        for index, each in enumerate(options):
            table = smaller.layer(index, each)
            more = 0.0 if self.backward == NONE else table.accumulate_s.max(axis=-1)
            nodes.append(np.where((table.shards.share > 0).all(axis=-1), rest.node_cost[index] + more, inf))
        return LabelledGraph(
            tuple(a + b for a, b in zip(full.node_cost, nodes, strict=True)),
            {edge: cost + rest.edge_cost[edge] for edge, cost in full.edge_cost.items()},
        )

    def _once(self, priced: PricedOptions, backward: str) -> LabelledGraph:
        """One F and what ``backward`` says."""
        return priced.graph(Question(priced.layers, 1, backward=backward, once_a_step=False))

    def _by_samples(self, ranks: RankIds) -> Array:
        """Step, there and back, its parts, of stages cut along samples alone; infinity where there are none."""
        problem = self.problem
        cost_model = self.evaluator.cost_model
        count = len(problem.graph.layers)
        shares = group_shares(problem, cost_model, ranks, self.size)
        batches = micro_batches(problem, self.size)
        if (len(ranks) > 1 and SAMPLE_DIMS not in problem.allow) or not usable(
            problem, cost_model, ranks, shares, batches
        ):
            return np.full((4, count + 1, count + 1), inf)
        exchanged = self._exchanged(ranks)
        least = samples_of(shares, self.rest) if self.rest else (0,) * len(ranks)
        slowest: Array = np.max(
            [
                self._member(cost_model.kind(rank), samples, rest, exchanged, len(ranks) > 1)
                for rank, samples, rest in zip(ranks, shares, least, strict=True)
            ],
            axis=0,
        )
        if len(ranks) > 1:
            if self.backward != NONE:
                slowest[0] += self._reduction_s(ranks, shares, least)
            mixing = cost_model.mixing()
            mixes = _between(running(np.array([layer.name in mixing for layer in problem.graph.layers], float)))
            slowest[:, mixes > 0] = inf
        return slowest

    def _reduction_s(self, ranks: RankIds, shares: Shares, rest: tuple[int, ...]) -> Array:
        """The least that stages cut along samples alone wait for the sum of their gradients."""
        cost_model = self.evaluator.cost_model
        size = np.maximum(_between(cost_model.tables.graph.parameter_bytes), 0.0)
        last = zip(ranks, rest if self.rest else shares, strict=True)
        backs = [_between(cost_model.at(cost_model.kind(rank), samples, True).backward_s) for rank, samples in last]
        exchanged = _between(cost_model.exchanges_s(ranks, self.rest or self.size)[1])
        backward_s = np.max(backs, axis=0) + exchanged
        sums_s = _between(cost_model.least_sums_s(ranks))
        zero = self.problem.zero_over(len(ranks))
        return least_reduction_s(cost_model.network, ranks, size, sums_s, backward_s, zero)

    def _exchanged(self, ranks: RankIds) -> tuple[Array, Array]:
        """Exchanges of statistics of one F and B, and of F alone."""
        if len(ranks) < 2:
            return np.zeros((1, 1)), np.zeros((1, 1))
        recomputes = self.problem.recompute == ALWAYS
        trains = self.backward != NONE
        forward, backward = self.evaluator.cost_model.exchanges_s(ranks, self.rest or self.size, recomputes, trains)
        of_forward = self.evaluator.cost_model.exchanges_s(ranks, self.rest or self.size, False, False)[0]
        return _between(forward) + (_between(backward) if trains else 0.0), _between(of_forward)

    def _member(self, kind: str, samples: int, rest: int, exchanged: tuple[Array, Array], shared: bool) -> Array:
        """Step, there and back, its parts, of a rank with ``samples`` samples, and ``rest`` of the last micro-batch."""
        cost_model = self.evaluator.cost_model
        both, of_forward = exchanged
        trains = self.backward != NONE
        passes, smaller = (
            cost_model.sums(kind, own, shared, self.problem.recompute == ALWAYS).least(trains, self.backward == LEAST)
            if own
            else None
            for own in (samples, rest)
        )
        assert passes is not None, "each rank has a sample"
        _, work_s = passes.works_s(self.num_full, smaller)
        step_s = _between(work_s + trains * cost_model.tables.parameters(kind).update_s)
        once_s = _between(passes.forward_s + passes.back_s)
        forward_s = _between(passes.forward_s)
        num = self.num_full + bool(rest)
        return np.stack(
            [step_s + num * both, once_s + both, forward_s + of_forward, once_s - forward_s + both - of_forward]
        )


def open_options(
    constraints: Constraints, prices: LayoutPrices, question: Question, work_s: float
) -> tuple[tuple[LayerOptions, ...], int]:
    """The options of each layer that side constraints allow, the simplest; and how many of a layer there is time for.

    Args:
        work_s: what pricing the options of all layers may take; where that is too little there are none.
    """
    most = most_options(prices, work_s)
    if not most:
        return (), 0
    options = options_of(prices, question)
    if constraints.rules:
        options = tuple(
            tuple(option for option in each if constraints.allows_layer(index, CutDegrees.of(dict(option.cuts))))
            for index, each in zip(question.layers, options, strict=True)
        )
    return simplest(options, most), most


def _less(graph: LabelledGraph, part: LabelledGraph) -> LabelledGraph:
    """What ``graph`` costs beside ``part`` of it."""

    def rest(whole: Array, of_it: Array) -> Array:
        return np.where(np.isfinite(whole), np.maximum(whole - np.where(np.isfinite(of_it), of_it, 0.0), 0.0), inf)

    return LabelledGraph(
        tuple(map(rest, graph.node_cost, part.node_cost)),
        {edge: rest(cost, part.edge_cost[edge]) for edge, cost in graph.edge_cost.items()},
    )


def _between(sums: Array) -> Array:
    """``[first, last]`` of a running sum."""
    differences: Array = sums[None, :] - sums[:, None]
    return differences
