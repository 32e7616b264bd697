"""The best option of every layer of a stage: a labelled graph made of prices, solved, and priced again.

    nodes     the layers of the stage
    options   grids of the group's ranks over sample, space and channel, margins of halos, recompute    ``device_mesh``
    c_v       M x (slowest rank's F + B + statistics) + (M - 1) x additions + reduction + update        ``_node_cost``
    c_uv      M x (messages forward and backward that are waited for; forward again if the reader is
              recomputed)                                                                               ``_edge_cost``
    m_v       by rank: W x saved + parameters, gradients and optimiser state; a recomputed layer's saved bytes are there
              for one micro-batch at a time                                                             ``_node_memory``
    m_uv      by rank: W x what is received, kept until the backward; an input of a recomputed layer whose maker is
              kept stays as well                                                                        ``_edge_memory``
    w_v       by rank: workspace; the most that any layer needs is there beside the sums          ``workspace_bytes``

``rivals`` has every other option of one layer, all others as they are: what each would cost in a step, by part.

M micro-batches a step, W of them in flight.  Ignored: that an optimiser's time for a step could overlap messages; that
recomputing a few layers at a time needs less than recomputing all recomputed ones at once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from planner.costs.communication.resharding import Resharding
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.costs.stages.layouts import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, LayerTable, LayoutPrices
from planner.costs.stages.stage_cost import StageCost, stage_cost
from planner.costs.stages.stage_sums import least_backward_s
from planner.ir.errors import MissingMeasurementError
from planner.ir.problem import ALWAYS, NEVER
from planner.layers.sized import REPLICA
from planner.solvers.budget import MOST_BYTES, Budget
from planner.solvers.layouts.factor_graph import Array, LabelledGraph, NodePair
from planner.solvers.layouts.solve import CertifiedAssignment, minimise

WHOLE = "whole"
LEAST = "least"
INPUT = "input"
NONE = "none"

LayerOptions = tuple[ShardingSpec, ...]
Flags = NDArray[np.bool_]
IndexArray = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked about a stage.

    Attributes:
        layers: by index in the graph, ascending.
        micro_batches: how often a step runs the stage, M; fractions count a smaller last one.
        in_flight: micro-batches whose activations are held at once, W.
        memory_limit_bytes: by rank of the group, for all that depends on options and workspace; empty: no limit.
        recompute: ``never``, ``auto`` or ``always`` (``Problem.recompute``).
        backward: ``whole``, ``none`` (forward passes alone: no gradients either), or ``least``: the less, layer by
            layer, of a whole one and its two halves, which no schedule beats; ``input``: of a whole one and the half
            for inputs, which the stage before waits for.
        recomputed: of ``layers`` those that are computed again under ``never``.
        once_a_step: whether the sum of gradients, the update and additions of gradients count.
    """

    layers: tuple[int, ...]
    micro_batches: float = 1.0
    in_flight: int = 1
    memory_limit_bytes: tuple[int, ...] = ()
    recompute: str = NEVER
    backward: str = WHOLE
    once_a_step: bool = True
    recomputed: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class StageLayouts:
    """The answer.

    Attributes:
        chosen: the option of each layer by index; empty if nothing fits.
        cost: of ``chosen``; None if nothing fits.
        answer: the search's own words: objective, bound, status.
    """

    chosen: Mapping[int, ShardingSpec]
    cost: StageCost | None
    answer: CertifiedAssignment


def best_layouts(
    prices: LayoutPrices,
    question: Question,
    within: Budget | None = None,
    options: Sequence[LayerOptions] | None = None,
) -> StageLayouts:
    """The options of least ``StageCost.step_s`` within the memory.

    Args:
        within: 60 seconds by default.
        options: of each layer asked about, to choose among fewer (side constraints); at least one each.

    Raises:
        MissingMeasurementError: the profile says nothing about a number of samples that an option uses.
        OutOfTimeError: the budget is over before the prices are known.
    """
    options = options or options_of(prices, question)
    answer = minimise(labelled_graph(prices, question, options, within), within)
    if answer.assignment is None:
        return StageLayouts({}, None, answer)
    picked = zip(question.layers, options, answer.assignment, strict=True)
    chosen = {index: each[k] for index, each, k in picked}
    return StageLayouts(chosen, stage_cost(prices, chosen), answer)


def options_of(prices: LayoutPrices, question: Question) -> tuple[LayerOptions, ...]:
    """The options of each layer asked about, recompute included."""
    options = []
    for index in question.layers:
        plain = prices.options(index)
        repeated = tuple(replace(option, recompute=True) for option in plain)
        by_rule = {NEVER: repeated if index in question.recomputed else plain, ALWAYS: repeated}
        options.append(by_rule.get(question.recompute, (*plain, *repeated)))
    return tuple(options)


_GRID_S = 3e-6
_OPTION_S = 3e-5
_PAIR_S = 5e-8
"""Work for each rank: of a grid that a layer may be cut along, of an option's prices, and for each pair of ranks of a
pair of options."""

_COPIES = 8
_KEPT = 4
"""Of what moves between ranks: numbers that exist while an edge is priced for each one; and numbers a rank, kept."""


def most_options(prices: LayoutPrices, work_s: float) -> int:
    """How many options of each layer can be priced with so much work, and within ``MOST_BYTES``; 0: not even two.

    An edge has a number for each pair of options and pair of ranks: 4 thousand million of them on 64 ranks with all
    462 ways to cut a three-dimensional layer.
    """
    graph = range(len(prices.layers))
    ranks = len(prices.ranks)
    layers = {prices.sized(index).signature: index for index in graph}
    if _GRID_S * ranks * prices.num_grids * len(layers) > work_s:
        return 0
    counts = {signature: len(prices.options(index)) for signature, index in layers.items()}
    edges = {(prices.sized(u).signature, prices.sized(v).signature) for u, v in prices.edges(tuple(graph))}

    def fits(most: int) -> bool:
        few = {signature: min(most, count) for signature, count in counts.items()}
        pairs = [few[u] * few[v] for u, v in edges]
        takes_s = ranks * _OPTION_S * sum(few.values()) + ranks**2 * _PAIR_S * sum(pairs)
        largest = 8 * max(ranks**2 * _COPIES * max(pairs, default=0), (_KEPT * ranks + 8) * sum(pairs))
        return takes_s <= work_s and largest <= MOST_BYTES

    low = 1
    high = max(counts.values())
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low if low > 1 else 0


def simplest(options: Sequence[LayerOptions], most: int) -> tuple[LayerOptions, ...]:
    """Of each layer the ``most`` options in which fewest ranks hold the same, then of fewest axes, in their order."""
    return tuple(_simplest(each, most) for each in options)


def _simplest(options: LayerOptions, most: int) -> LayerOptions:
    plain = _distinct(options)
    if len(plain) <= most:
        return options
    kept = frozenset(sorted(plain, key=_complexity)[:most])
    return tuple(option for option in options if replace(option, recompute=False) in kept)


def _complexity(option: ShardingSpec) -> tuple[int, int, int]:
    """(ranks that hold the same, axes, rows that are computed twice)."""
    parts = [(dim.startswith(REPLICA), count) for dim, count in option.grid if count > 1]
    return prod(count for alike, count in parts if alike), sum(not alike for alike, _ in parts), option.margin


@dataclass(frozen=True, slots=True)
class Rival:
    """A way to divide the layer; seconds are those of a step, on the slowest rank.

    Attributes:
        messages_s: halos and redistributions, to the layer and from it to the others of its stage, as far as they are
            waited for; ``statistics_s``: sums within the layer; ``reduction_s``: the sum of its gradients.
        update_s: its update, and additions of gradients.
        memory_bytes: of the fullest rank, all of the stage included.
        fits: whether each rank stays within its limit.
        is_chosen: whether the plan divides it so.
    """

    option: ShardingSpec
    compute_s: float
    messages_s: float
    statistics_s: float
    reduction_s: float
    update_s: float
    memory_bytes: int
    fits: bool
    is_chosen: bool

    @property
    def total_s(self) -> float:
        """What depends on how the layer is divided."""
        return self.compute_s + self.messages_s + self.statistics_s + self.reduction_s + self.update_s


def rivals(
    prices: LayoutPrices, chosen: Mapping[int, ShardingSpec], index: int, question: Question
) -> tuple[Rival, ...]:
    """All options of layer ``index`` that can be priced, the least ``total_s`` first; the chosen one is among them.

    Args:
        chosen: the option of each layer of the stage.
        question: about these layers, with a limit of memory.

    Raises:
        MissingMeasurementError: the profile does not say what the chosen option costs.
    """
    own = chosen[index]
    options = _candidates(prices, index, own)
    layers = question.layers
    node = layers.index(index)
    graph = labelled_graph(prices, question, [options if other == index else (chosen[other],) for other in layers])
    table = prices.layer(index, tuple(replace(option, recompute=False) for option in options))
    messages = np.zeros(len(options))
    # of layer ``index`` [options, ranks], of all others [1, ranks]
    memory: Array = sum(graph.node_memory) + functools.reduce(np.maximum, graph.workspace)
    for (u, v), cost in graph.edge_cost.items():
        messages += cost.reshape(-1) if node in (u, v) else 0.0
        memory = memory + graph.edge_memory[u, v].reshape(-1, memory.shape[-1])
    compute, sums, reduction, update = _parts(
        question, table, prices.apart_s(index, table.shards, layers), own.recompute
    )
    limit = np.array(question.memory_limit_bytes)
    ways = _ways(prices, chosen, index, options)
    priced = [
        Rival(
            option=replace(option, ways=ways[k]),
            compute_s=float(compute[k]),
            messages_s=float(messages[k]),
            statistics_s=float(sums[k]),
            reduction_s=float(reduction[k]),
            update_s=float(update[k]),
            memory_bytes=round(float(memory[k].max())),
            fits=bool(np.all(memory[k] <= limit + 0.5)),
            is_chosen=k == 0,
        )
        for k, option in enumerate(options)
    ]
    return tuple(sorted(priced, key=lambda rival: (rival.total_s, not rival.is_chosen)))


def labelled_graph(
    prices: LayoutPrices, question: Question, options: Sequence[LayerOptions], within: Budget | None = None
) -> LabelledGraph:
    """The question as a labelled graph; node k is layer ``question.layers[k]``.

    Raises:
        OutOfTimeError: the budget is over before all prices are known.
    """
    return PricedOptions.of(prices, question.layers, options, within).graph(question)


@dataclass(frozen=True, slots=True, eq=False)
class PricedOptions:
    """Layers with options, each priced once, whatever is asked about them.

    Attributes:
        tables: by layer, of its options without recompute, each once.
        apart_s: by layer, partial sums (``LayoutPrices.apart_s``).
        places: by layer, which of those each option is.
        recomputed: by layer, which options are.
        crossings: by edge between nodes, what moves.
        exposed_s: by edge, what of it is waited for, forward and backward.
    """

    prices: LayoutPrices
    layers: tuple[int, ...]
    tables: tuple[LayerTable, ...]
    apart_s: tuple[Array, ...]
    places: tuple[IndexArray, ...]
    recomputed: tuple[Flags, ...]
    crossings: Mapping[NodePair, Resharding]
    exposed_s: Mapping[NodePair, tuple[Array, Array]]

    @classmethod
    def of(
        cls,
        prices: LayoutPrices,
        layers: tuple[int, ...],
        options: Sequence[LayerOptions],
        within: Budget | None = None,
    ) -> PricedOptions:
        """All that the options of ``layers`` cost.

        Raises:
            OutOfTimeError: the budget is over before all prices are known.
        """
        ranks = len(prices.ranks)
        plain = [_distinct(each) for each in options]
        signatures = [prices.sized(index).signature for index in layers]
        tables = []
        crossings = {}
        exposed_s = {}
        priced = set[object]()
        for index, each, signature in zip(layers, plain, signatures, strict=True):
            if within is not None:
                within.require(_OPTION_S * ranks * len(each) * (signature not in priced))
            priced.add(signature)
            tables.append(prices.layer(index, each))
        number = {index: node for node, index in enumerate(layers)}
        for maker, reader in prices.edges(layers):
            u = number[maker]
            v = number[reader]
            pair = signatures[u], signatures[v]
            if within is not None:
                within.require(_PAIR_S * ranks**2 * len(plain[u]) * len(plain[v]) * (pair not in priced))
            priced.add(pair)
            crossings[u, v] = prices.crossing(maker, reader, plain[u], plain[v])
            exposed_s[u, v] = prices.exposed_s(reader, crossings[u, v], tables[v])
        return cls(
            prices,
            layers,
            tuple(tables),
            tuple(prices.apart_s(index, table.shards, layers) for index, table in zip(layers, tables, strict=True)),
            tuple(itertools.starmap(_places, zip(options, plain, strict=True))),
            tuple(np.array([option.recompute for option in each]) for each in options),
            crossings,
            exposed_s,
        )

    def graph(self, question: Question) -> LabelledGraph:
        """The question about these layers as a labelled graph."""
        repeats = 0.0 if question.backward == NONE else question.micro_batches
        edge_cost = {}
        for (u, v), (forward, backward) in self.exposed_s.items():
            pairs = np.ix_(self.places[u], self.places[v])
            edge_cost[u, v] = _edge_cost(question, forward, backward)[pairs]
            edge_cost[u, v] += repeats * self.recomputed[v] * forward[pairs]
        by_layer = zip(self.tables, self.apart_s, self.places, self.recomputed, strict=True)
        nodes = tuple(_node_cost(question, *each) for each in by_layer)
        if not question.memory_limit_bytes:
            return LabelledGraph(nodes, edge_cost)
        held = zip(self.tables, self.places, self.recomputed, strict=True)
        return LabelledGraph(
            nodes,
            edge_cost,
            tuple(_node_memory(self.prices, question, *each) for each in held),
            {edge: self._edge_memory(question, edge) for edge in self.crossings},
            np.array(question.memory_limit_bytes, dtype=np.float64),
            tuple(table.workspace_bytes[at] for table, at in zip(self.tables, self.places, strict=True)),
        )

    def _edge_memory(self, question: Question, edge: NodePair) -> Array:
        """``[options of the maker, options of the reader, ranks]``."""
        u, v = edge
        outputs = self.prices.output_bytes(self.layers[u], self.tables[u].shards)[self.places[u]]
        received = self.crossings[edge].received_bytes[np.ix_(self.places[u], self.places[v])]
        return _edge_memory(question, received, outputs, self.recomputed[u], self.recomputed[v])


def _node_cost(question: Question, table: LayerTable, apart_s: Array, at: IndexArray, recompute: Flags) -> Array:
    """Of options that stand ``at`` a place among those of ``table``, recomputed or not."""
    kept, repeated = (np.sum(_parts(question, table, apart_s, times), axis=0) for times in (False, True))
    cost: Array = np.where(recompute, repeated[at], kept[at])
    return cost


def _parts(question: Question, table: LayerTable, apart_s: Array, recompute: bool) -> tuple[Array, Array, Array, Array]:
    """(compute, sums within the layer, sum of gradients, update and additions) of a step, by option."""
    slowest = table.seconds.max(axis=-1)
    sums_s = table.statistics_s[0] + apart_s
    nothing = np.zeros_like(sums_s)
    if question.backward == NONE:
        return question.micro_batches * slowest[FORWARD], question.micro_batches * sums_s, nothing, nothing
    halves = slowest[BACKWARD_INPUT], slowest[BACKWARD_WEIGHT]
    splits = question.backward != WHOLE
    backward_s = least_backward_s(slowest[BACKWARD], halves[0], (question.backward != INPUT) * halves[1], splits)
    compute_s = question.micro_batches * ((1 + recompute) * slowest[FORWARD] + backward_s)
    sums_s = question.micro_batches * ((1 + recompute) * sums_s + table.statistics_s[1] + apart_s)
    if not question.once_a_step:
        return compute_s, sums_s, nothing, nothing
    more = max(0.0, question.micro_batches - 1)
    return compute_s, sums_s, table.reduction_s, table.update_s.max(axis=-1) + more * table.accumulate_s.max(axis=-1)


def _edge_cost(question: Question, forward: Array, backward: Array) -> Array:
    cost: Array = question.micro_batches * (forward if question.backward == NONE else forward + backward)
    return cost


def _node_memory(
    prices: LayoutPrices, question: Question, table: LayerTable, at: IndexArray, recompute: Flags
) -> Array:
    """``[options, ranks]``."""
    resident = table.parameter_bytes * (2.0 + _state(prices))
    held = np.where(recompute, 1.0, float(question.in_flight))[:, None] * table.saved_bytes[at]
    total: Array = resident[at] + held
    return total


def _edge_memory(question: Question, received: Array, outputs: Array, maker: Flags, reader: Flags) -> Array:
    """``[options of the maker, options of the reader, ranks]``."""
    held = np.where(reader, 1.0, float(question.in_flight))[None, :, None] * received
    boundary = (~maker[:, None] & reader[None, :])[..., None] * outputs[:, None, :]
    total: Array = held + question.in_flight * boundary
    return total


def _state(prices: LayoutPrices) -> float:
    return prices.cost_model.profile.optimizer.state_bytes_per_parameter_byte


def _distinct(options: LayerOptions) -> LayerOptions:
    """The options without recompute, each once, in order."""
    return tuple(dict.fromkeys(replace(option, recompute=False) for option in options))


def _places(options: LayerOptions, plain: LayerOptions) -> IndexArray:
    number = {option: k for k, option in enumerate(plain)}
    return np.array([number[replace(option, recompute=False)] for option in options])


def _candidates(prices: LayoutPrices, index: int, own: ShardingSpec) -> LayerOptions:
    """The chosen option, then all others that the profile knows enough about."""
    candidates = [own]
    for option in prices.options(index):
        other = replace(option, recompute=own.recompute)
        if (other.cuts, other.margin) == (own.cuts, own.margin):
            continue
        try:
            prices.layer(index, (option,))
        except MissingMeasurementError:
            continue
        candidates.append(other)
    return tuple(candidates)


def _ways(prices: LayoutPrices, chosen: Mapping[int, ShardingSpec], index: int, options: LayerOptions) -> list[int]:
    """How many ranks share the input channels under each option."""
    degrees = [option.ways or 1 for option in options]
    for maker, reader in prices.edges(tuple(sorted(chosen))):
        if reader == index:
            plain = tuple(replace(option, recompute=False) for option in options)
            ways = prices.crossing(maker, index, (replace(chosen[maker], recompute=False),), plain).ways[0]
            degrees = [max(before, int(now)) for before, now in zip(degrees, ways, strict=True)]
    return degrees
