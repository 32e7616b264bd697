"""Every way to divide one layer of a stage, all others as they are: what each would cost in a step, by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from planner.costs.shards.option import Option
from planner.costs.stages.layouts import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, LayerTable, LayoutPrices
from planner.ir.errors import MissingMeasurementError
from planner.solvers.layouts.factor_graph import Array
from planner.solvers.layouts.stage import NONE, WHOLE, Options, Question, labelled_graph


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

    option: Option
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


def rivals(prices: LayoutPrices, chosen: Mapping[int, Option], index: int, question: Question) -> tuple[Rival, ...]:
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
    messages, memory = np.zeros(len(options)), graph.node_memory[node].copy()
    for other in range(graph.num_nodes):
        memory += 0.0 if other == node else graph.node_memory[other][0]
    for (u, v), cost in graph.edge_cost.items():
        messages += cost.reshape(-1) if node in (u, v) else 0.0
        taken = graph.edge_memory[u, v]
        memory += taken.reshape(-1, taken.shape[-1])
    memory += _workspace(prices, chosen, index, table)
    compute, sums, reduction, update = _parts(prices, question, index, table, own.recompute)
    limit = np.array(question.memory_limit_bytes)
    ways = _ways(prices, chosen, index, options)
    found = [
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
    return tuple(sorted(found, key=lambda rival: (rival.total_s, not rival.is_chosen)))


def _candidates(prices: LayoutPrices, index: int, own: Option) -> Options:
    """The chosen option, then all others that the profile knows enough about."""
    found = [own]
    for option in prices.options(index):
        again = replace(option, recompute=own.recompute)
        if (again.cuts, again.margin) == (own.cuts, own.margin):
            continue
        try:
            prices.layer(index, (option,))
        except MissingMeasurementError:
            continue
        found.append(again)
    return tuple(found)


def _parts(
    prices: LayoutPrices, question: Question, index: int, table: LayerTable, again: bool
) -> tuple[Array, Array, Array, Array]:
    """(compute, sums within the layer, sum of gradients, update and additions) of a step, by option."""
    slowest, apart = table.seconds.max(axis=-1), prices.apart_s(index, table.shards, question.layers)
    compute, sums = slowest[FORWARD], table.statistics_s[0] + apart
    if question.backward == NONE:
        nothing = np.zeros_like(compute)
        return question.micro_batches * compute, question.micro_batches * sums, nothing, nothing
    halves, whole = slowest[BACKWARD_INPUT] + slowest[BACKWARD_WEIGHT], slowest[BACKWARD]
    backward = whole if question.backward == WHOLE else np.minimum(whole, halves)
    compute = question.micro_batches * ((1 + again) * compute + backward)
    sums = question.micro_batches * ((1 + again) * sums + table.statistics_s[1] + apart)
    more = max(0.0, question.micro_batches - 1)
    update = table.update_s.max(axis=-1) + more * table.accumulate_s.max(axis=-1)
    return compute, sums, table.reduction_s, update


def _workspace(prices: LayoutPrices, chosen: Mapping[int, Option], index: int, table: LayerTable) -> Array:
    """``[options, ranks]``: what the hungriest layer needs while it runs."""
    most = table.workspace_bytes
    for other, option in chosen.items():
        if other != index:
            needs = prices.layer(other, (replace(option, recompute=False),)).workspace_bytes
            most = np.maximum(most, needs)
    return most


def _ways(prices: LayoutPrices, chosen: Mapping[int, Option], index: int, options: Options) -> list[int]:
    """How many ranks share the input channels under each option."""
    found = [option.ways or 1 for option in options]
    for maker, reader in prices.edges(tuple(sorted(chosen))):
        if reader == index:
            plain = tuple(replace(option, recompute=False) for option in options)
            ways = prices.crossing(maker, index, (replace(chosen[maker], recompute=False),), plain).ways[0]
            found = [max(before, int(now)) for before, now in zip(found, ways, strict=True)]
    return found
