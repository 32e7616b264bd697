"""What a stage costs whose layers each have an option: the sums that the inner search minimises, by part.

    F = sum over layers of (slowest rank's forward + statistics) + messages between layers that are waited for
    B = the same of the backward, and the forward once more where it is recomputed
    a step of M micro-batches:  M (F + B) + (M - 1) additions + reduction + update

A layer's slowest rank counts, as ranks that exchange halos layer by layer go at one pace.  Where every layer is cut
alike and nothing moves between layers, ranks only meet at the end: then the slowest rank's sum is the stage's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.costs.communication.resharding import Resharding
from planner.costs.layers.confidence import weakest
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.costs.stages.layouts import FORWARD, LayerTable, LayoutPrices
from planner.costs.stages.stage_sums import PassTimes, with_recompute
from planner.ir.cluster import INTERPOLATED, Evidence
from planner.layers import is_convolution
from planner.layers.boxes import BoxArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class LayerBytes:
    """What each layer of a stage keeps and reads, ``[layers, ranks]``, layers in the order of the graph.

    Attributes:
        layers: by index in the graph.
        saved, workspace, parameters: bytes of the rank's part.
        received: what it gets of other ranks.
        copied: of that, what is put together with what is there in a copy; a halo that a convolution adds up is not.
        samples, share: of the part, and what it is of the work of as many whole samples.
        read_share: what it reads of the inputs of as many whole samples.
        weights: of each of the layer's parameters what every rank has, ``[ranks, dims, 2]``; empty of parts of one.
        puts_off: whether the runtime makes its weight gradients where ranks of the stage next wait for statistics
            (:mod:`runtime.spatial.deferred`); empty: of no layer.
        meets: ``[layers, ranks]``, where that is: norms whose statistics are those of several ranks.
    """

    layers: tuple[int, ...]
    saved: Array
    workspace: Array
    received: Array
    copied: Array
    parameters: Array
    samples: NDArray[np.int64]
    share: Array
    read_share: Array
    weights: tuple[tuple[BoxArray, ...], ...] = ()
    puts_off: tuple[bool, ...] = ()
    meets: NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StageCost(PassTimes):
    """A stage under given options, for one micro-batch on its group; its ranks go at one pace.

    Exchanges are statistics, and messages between layers as far as nothing is computed meanwhile
    (``costs.communication.resharding``), all ranks busy.

    Attributes:
        update_s: once a step, the sum over layers of the slowest rank's.
        reduction_s: once a step; gradients over ranks with equal weights.
        saved_bytes: by rank, kept for each micro-batch between forward and backward, what was received included.
        transient_bytes: by rank, of recomputed layers, there for one micro-batch at a time.
        workspace_bytes, parameter_bytes: by rank.
        by_layer: bytes of each layer.
        standing_bytes: by rank, of its exchanges (``costs.communication.resharding``).
        unrecorded_bytes: by rank, the most in a forward that keeps nothing; None: it follows from ``by_layer``.
    """

    update_s: float
    reduction_s: float
    saved_bytes: Array
    transient_bytes: Array
    workspace_bytes: Array
    parameter_bytes: Array
    by_layer: LayerBytes
    standing_bytes: Array
    evidence: Evidence
    unrecorded_bytes: Array | None = None

    def step_s(self, micro_batches: float) -> float:
        """A step of the stage alone: the objective of the inner search (layer by layer, the slowest rank)."""
        (forward_s,), (backward_s,), *_ = self.compute_s
        once = forward_s + backward_s + self.exchange_forward_s + self.exchange_backward_s
        more = max(0.0, micro_batches - 1) * self.accumulate_s[0]
        return micro_batches * once + more + self.reduction_s + self.update_s


def stage_cost(
    prices: LayoutPrices, chosen: Mapping[int, ShardingSpec], counted: Collection[int] | None = None
) -> StageCost:
    """What the layers ``chosen`` (by index in the graph) cost under their options.

    Args:
        counted: those that count, but for parameters, which are all there; None: all of them.

    Raises:
        MissingMeasurementError: the profile says nothing about a number of samples that an option uses.
    """
    layers = tuple(sorted(chosen))
    every = {index: prices.layer(index, (_plain(chosen[index]),)) for index in layers}
    tables = {index: table for index, table in every.items() if counted is None or index in counted}
    crossings = {
        (u, v): prices.crossing(u, v, (_plain(chosen[u]),), (_plain(chosen[v]),))
        for u, v in prices.edges(layers)
        if v in tables
    }
    recompute = {index: float(chosen[index].recompute) for index in layers}
    ranks = len(prices.ranks)
    forward, backward, of_input, of_weight = (
        sum(float(table.seconds[way, 0].max()) for table in tables.values()) for way in range(4)
    )
    repeated = sum(recompute[index] * float(table.seconds[FORWARD, 0].max()) for index, table in tables.items())
    backward, of_input = with_recompute(backward, of_input, repeated)
    exchange_forward_s, exchange_backward_s = _exchanged(prices, tables, crossings, recompute, layers)
    saved, transient = _kept(prices, every, crossings, recompute)
    return StageCost(
        compute_s=((forward,), (backward,), (of_input,), (of_weight,)),
        accumulate_s=(sum(float(table.accumulate_s[0].max()) for table in tables.values()),),
        exchange_forward_s=exchange_forward_s,
        exchange_backward_s=exchange_backward_s,
        update_s=sum(float(table.update_s[0].max()) for table in tables.values()),
        reduction_s=sum(float(table.reduction_s[0]) for table in tables.values()),
        saved_bytes=saved,
        transient_bytes=transient,
        workspace_bytes=np.max([np.zeros(ranks), *(table.workspace_bytes[0] for table in tables.values())], axis=0),
        parameter_bytes=sum((table.parameter_bytes[0] for table in every.values()), np.zeros(ranks)),
        by_layer=_by_layer(prices, tables, crossings),
        standing_bytes=sum(
            (
                *(crossing.standing_bytes[0, 0] for crossing in crossings.values()),
                *(prices.sums(index, table.shards).standing_bytes[0] for index, table in tables.items()),
            ),
            np.zeros(ranks),
        ),
        evidence=_evidence(prices, every),
    )


def with_ways(prices: LayoutPrices, chosen: Mapping[int, ShardingSpec]) -> dict[int, ShardingSpec]:
    """``chosen`` with the number of ranks that share the input channels of each layer where it is left open.

    It is the one that moves the layer's first input in least time from the layer that makes it; 1 where that is none
    of ``chosen``.
    """
    settled = dict(chosen)
    for maker, reader in prices.edges(tuple(sorted(chosen))):
        if not chosen[reader].ways:
            options = ((_plain(chosen[maker]),), (_plain(chosen[reader]),))
            ways = int(prices.crossing(maker, reader, *options).ways[0, 0])
            settled[reader] = replace(chosen[reader], ways=max(settled[reader].ways, ways))
    return {index: option if option.ways else replace(option, ways=1) for index, option in settled.items()}


def _exchanged(
    prices: LayoutPrices,
    tables: Mapping[int, LayerTable],
    crossings: Mapping[tuple[int, int], Resharding],
    recompute: Mapping[int, float],
    layers: Collection[int],
) -> tuple[float, float]:
    forward = backward = 0.0
    for index, table in tables.items():
        apart = float(prices.apart_s(index, table.shards, layers)[0])
        once = apart + float(table.statistics_s[0, 0])
        forward += once
        backward += apart + float(table.statistics_s[1, 0]) + recompute[index] * once
    for (_, reader), crossing in crossings.items():
        there, back = prices.exposed_s(reader, crossing, tables[reader])
        forward += float(there[0, 0])
        backward += float(back[0, 0]) + recompute[reader] * float(there[0, 0])
    return forward, backward


def _kept(
    prices: LayoutPrices,
    tables: Mapping[int, LayerTable],
    crossings: Mapping[tuple[int, int], Resharding],
    recompute: Mapping[int, float],
) -> tuple[Array, Array]:
    """(kept for each micro-batch in flight, there while one is recomputed), by rank."""
    saved = np.zeros(len(prices.ranks))
    transient = np.zeros(len(prices.ranks))
    for index, table in tables.items():
        saved += (1 - recompute[index]) * table.saved_bytes[0]
        transient += recompute[index] * table.saved_bytes[0]
    for (maker, reader), crossing in crossings.items():
        saved += (1 - recompute[reader]) * crossing.received_bytes[0, 0]
        transient += recompute[reader] * crossing.received_bytes[0, 0]
        if recompute[reader] and not recompute[maker]:
            saved += prices.output_bytes(maker, tables[maker].shards)[0]
    return saved, transient


def _by_layer(
    prices: LayoutPrices, tables: Mapping[int, LayerTable], crossings: Mapping[tuple[int, int], Resharding]
) -> LayerBytes:
    place = {index: number for number, index in enumerate(tables)}
    received, copied = np.zeros((2, len(tables), len(prices.ranks)))
    for (_, reader), crossing in crossings.items():
        received[place[reader]] += crossing.received_bytes[0, 0]
        if not (crossing.is_halo[0, 0] and is_convolution(prices.layers[reader].kind)):
            copied[place[reader]] += crossing.received_bytes[0, 0]
    every = tables.values()
    return LayerBytes(
        tuple(tables),
        np.array([table.saved_bytes[0] for table in every]),
        np.array([table.workspace_bytes[0] for table in every]),
        received,
        copied,
        np.array([table.parameter_bytes[0] for table in every]),
        np.array([table.shards.samples[0] for table in every]),
        np.array([table.shards.share[0] for table in every]),
        np.array([table.shards.read_share(0) for table in every]),
        tuple(tuple(boxes[0] for boxes in table.shards.weights) for table in every),
        *_put_off(prices, tables),
    )


def _put_off(prices: LayoutPrices, tables: Mapping[int, LayerTable]) -> tuple[tuple[bool, ...], NDArray[np.bool_]]:
    """Whose weight gradients wait for the next meeting of ranks over statistics, and where these meet."""
    norms = {index for index, table in tables.items() if table.shards.sized.relation.REDUCTION == "statistics"}
    users = Counter(name for index in tables for name in prices.layers[index].parameters)
    puts_off = tuple(
        is_convolution(prices.layers[index].kind)
        and table.shards.options[0].ways < 2
        and bool(norms - {index})
        and all(users[name] == 1 for name in prices.layers[index].parameters)
        for index, table in tables.items()
    )
    nobody = np.zeros(len(prices.ranks))
    rows = [prices.sums(i, t.shards).standing_bytes[0] if i in norms else nobody for i, t in tables.items()]
    return puts_off, np.array(rows).reshape(len(tables), len(prices.ranks)) > 0


def _evidence(prices: LayoutPrices, tables: Mapping[int, LayerTable]) -> Evidence:
    """The weakest; a share of the whole is no better than interpolated."""
    evidences: set[Evidence] = set()
    for index, table in tables.items():
        for member, rank in enumerate(prices.ranks):
            samples = int(table.shards.samples[0, member])
            kind = prices.cost_model.main_kind(rank)
            own = prices.parts.evidence(prices.layers[index].name, kind, table.shards, 0, member)
            is_part = abs(float(table.shards.share[0, member]) - 1.0) > 1e-12
            evidences.update(own or (prices.cost_model.tables.at(kind, samples).evidence[index],))
            if is_part and not own:
                evidences.add(INTERPOLATED)
    return weakest(evidences)


def _plain(option: ShardingSpec) -> ShardingSpec:
    return replace(option, recompute=False)
