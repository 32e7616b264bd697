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
    w_v       by rank: workspace; the most that any layer needs is there beside the sums              ``layouts.solve``

M micro-batches a step, W of them in flight.  Ignored: that an optimiser's time for a step could overlap messages; that
recomputing a few layers at a time needs less than recomputing all recomputed ones at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.costs.shards.option import Option
from planner.costs.stages.layouts import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, LayerTable, LayoutPrices
from planner.costs.stages.stage_cost import StageCost, stage_cost
from planner.ir.problem import ALWAYS, NEVER
from planner.solvers.layouts.factor_graph import Array, LabelledGraph
from planner.solvers.layouts.solve import Answer, minimise_with_workspace

WHOLE, LEAST, NONE = "whole", "least", "none"

Options = tuple[Option, ...]
Flags = NDArray[np.bool_]
Places = NDArray[np.intp]


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
            layer, of a whole one and its two halves, which no schedule beats.
        once_a_step: whether the sum of gradients, the update and additions of gradients count.
    """

    layers: tuple[int, ...]
    micro_batches: float = 1.0
    in_flight: int = 1
    memory_limit_bytes: tuple[int, ...] = ()
    recompute: str = NEVER
    backward: str = WHOLE
    once_a_step: bool = True


@dataclass(frozen=True, slots=True)
class StageLayouts:
    """The answer.

    Attributes:
        chosen: the option of each layer by index; empty if nothing fits.
        cost: of ``chosen``; None if nothing fits.
        answer: the search's own words: objective, bound, status.
        needs_bytes: if nothing fits, what the leanest choice needs, by rank.
    """

    chosen: Mapping[int, Option]
    cost: StageCost | None
    answer: Answer
    needs_bytes: tuple[int, ...] = ()


def best_layouts(
    prices: LayoutPrices,
    question: Question,
    time_limit_s: float = 60.0,
    gap: float = 0.0,
    options: Sequence[Options] | None = None,
) -> StageLayouts:
    """The options of least ``StageCost.step_s`` within the memory.

    Args:
        options: of each layer asked about, to choose among fewer (side constraints); at least one each.

    Raises:
        MissingMeasurementError: the profile says nothing about a number of samples that an option uses.
    """
    options = options or options_of(prices, question)
    graph = labelled_graph(prices, question, options)
    workspace = _workspace(prices, question, options) if graph.is_limited else ()
    answer = minimise_with_workspace(graph, workspace, time_limit_s, gap)
    picked = answer.assignment or answer.leanest
    if picked is None:
        return StageLayouts({}, None, answer)
    chosen = {index: each[k] for index, each, k in zip(question.layers, options, picked, strict=True)}
    cost = stage_cost(prices, chosen)
    if answer.assignment is None:
        needs = cost.memory_bytes(question.in_flight, _state(prices))
        return StageLayouts({}, None, answer, tuple(int(size) for size in needs))
    return StageLayouts(chosen, cost, answer)


def options_of(prices: LayoutPrices, question: Question) -> tuple[Options, ...]:
    """The options of each layer asked about, recompute included."""
    found = []
    for index in question.layers:
        plain = prices.options(index)
        again = tuple(replace(option, recompute=True) for option in plain)
        found.append({NEVER: plain, ALWAYS: again}.get(question.recompute, (*plain, *again)))
    return tuple(found)


def _workspace(prices: LayoutPrices, question: Question, options: Sequence[Options]) -> tuple[Array, ...]:
    """By layer asked about: ``[options, ranks]``."""
    found = []
    for index, each in zip(question.layers, options, strict=True):
        plain = _distinct(each)
        found.append(prices.layer(index, plain).workspace_bytes[_places(each, plain)])
    return tuple(found)


def labelled_graph(prices: LayoutPrices, question: Question, options: Sequence[Options]) -> LabelledGraph:
    """The question as a labelled graph; node k is layer ``question.layers[k]``."""
    is_limited = bool(question.memory_limit_bytes)
    plain = [_distinct(each) for each in options]
    tables = [prices.layer(index, each) for index, each in zip(question.layers, plain, strict=True)]
    place = [_places(each, base) for each, base in zip(options, plain, strict=True)]
    again = [np.array([option.recompute for option in each]) for each in options]
    repeats = 0.0 if question.backward == NONE else question.micro_batches
    number = {index: node for node, index in enumerate(question.layers)}
    crossings = {
        (number[u], number[v]): prices.crossing(u, v, plain[number[u]], plain[number[v]])
        for u, v in prices.edges(question.layers)
    }
    edge_cost, edge_memory = {}, {}
    for (u, v), crossing in crossings.items():
        pairs = np.ix_(place[u], place[v])
        forward, backward = prices.exposed_s(question.layers[v], crossing, tables[v])
        edge_cost[u, v] = _edge_cost(question, forward, backward)[pairs]
        edge_cost[u, v] += repeats * again[v] * forward[pairs]
        if is_limited:
            outputs = prices.output_bytes(question.layers[u], tables[u].shards)[place[u]]
            received = crossing.received_bytes[pairs]
            edge_memory[u, v] = _edge_memory(question, received, outputs, again[u], again[v])
    apart = [
        prices.apart_s(index, table.shards, question.layers)
        for index, table in zip(question.layers, tables, strict=True)
    ]
    nodes = tuple(_node_cost(question, table, sums)[at] for table, sums, at in zip(tables, apart, place, strict=True))
    repeated = (
        repeats * flag * (table.seconds[FORWARD].max(axis=-1) + table.statistics_s[0] + sums)[at]
        for table, sums, at, flag in zip(tables, apart, place, again, strict=True)
    )
    memory = tuple(
        _node_memory(prices, question, table, at, flag) for table, at, flag in zip(tables, place, again, strict=True)
    )
    limit = np.array(question.memory_limit_bytes, dtype=np.float64)
    return LabelledGraph(
        tuple(cost + more for cost, more in zip(nodes, repeated, strict=True)),
        edge_cost,
        memory if is_limited else (),
        edge_memory,
        limit if is_limited else np.zeros(0),
    )


def _node_cost(question: Question, table: LayerTable, apart_s: Array) -> Array:
    slowest = table.seconds.max(axis=-1)
    found: Array = question.micro_batches * (slowest[FORWARD] + table.statistics_s[0] + apart_s)
    if question.backward == NONE:
        return found
    halves = slowest[BACKWARD_INPUT] + slowest[BACKWARD_WEIGHT]
    backward = slowest[BACKWARD] if question.backward == WHOLE else np.minimum(slowest[BACKWARD], halves)
    found = found + question.micro_batches * (backward + table.statistics_s[1] + apart_s)
    if not question.once_a_step:
        return found
    more = max(0.0, question.micro_batches - 1) * table.accumulate_s.max(axis=-1)
    found = found + more + table.reduction_s + table.update_s.max(axis=-1)
    return found


def _edge_cost(question: Question, forward: Array, backward: Array) -> Array:
    found: Array = question.micro_batches * (forward if question.backward == NONE else forward + backward)
    return found


def _node_memory(prices: LayoutPrices, question: Question, table: LayerTable, at: Places, again: Flags) -> Array:
    """``[options, ranks]``."""
    resident = table.parameter_bytes * (2.0 + _state(prices))
    held = np.where(again, 1.0, float(question.in_flight))[:, None] * table.saved_bytes[at]
    found: Array = resident[at] + held
    return found


def _edge_memory(question: Question, received: Array, outputs: Array, maker: Flags, reader: Flags) -> Array:
    """``[options of the maker, options of the reader, ranks]``."""
    held = np.where(reader, 1.0, float(question.in_flight))[None, :, None] * received
    boundary = (~maker[:, None] & reader[None, :])[..., None] * outputs[:, None, :]
    found: Array = held + question.in_flight * boundary
    return found


def _state(prices: LayoutPrices) -> float:
    return prices.book.profile.optimizer.state_bytes_per_parameter_byte


def _distinct(options: Options) -> Options:
    """The options without recompute, each once, in order."""
    return tuple(dict.fromkeys(replace(option, recompute=False) for option in options))


def _places(options: Options, plain: Options) -> Places:
    number = {option: k for k, option in enumerate(plain)}
    return np.array([number[replace(option, recompute=False)] for option in options])
