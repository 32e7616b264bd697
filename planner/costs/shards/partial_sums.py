"""Sums over ranks that boxes do not show.

gradients     over ranks with equal parts of a weight                                        ``Sums.reduction_s``
statistics    of a normalisation, over cut samples and space                                 ``statistics_s``
classes       of a cross-entropy, over parts of the classes of a place                       ``classes_s``
pending       parts of a sum, such as a global pool's over space, whose result is on every rank that holds a part;
              backward, the gradients that these ranks have of it are summed                 ``pending_s``
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from planner.costs.communication.collectives import norm_s, partial_sum_s
from planner.costs.communication.tables import Array
from planner.costs.cost_model import CostModel
from planner.ir.cluster import GRADIENT_SUMS, STANDING_BYTES, Cluster, RankIds
from planner.ir.graph import BYTES_PER_ELEMENT
from planner.layers.boxes import equal_ranks, volumes
from planner.layers.elementwise import CLASS, has_classes_apart
from planner.layers.shards import Shards, channel_dim, summing_ranks

LOSS = "loss"
_STATISTIC_BYTES = 8
_LEAST_BYTES = 4  # sums are not kept in half precision


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """What a layer holds of parameters and sums over ranks, by option (and rank).

    Attributes:
        held_bytes: ``[options, ranks]`` of the parameters that are its own (a tied one is its first user's).
        reduction_s: ``[options]``.
        statistics_s: ``[2, options]``, forward and backward; statistics, classes and pending sums.
        standing_bytes: ``[options, ranks]``, of the receives of statistics that stand ready, and what was sent.
    """

    held_bytes: Array
    reduction_s: Array
    statistics_s: Array
    standing_bytes: Array


def sums_of(
    shards: Shards,
    own: tuple[bool, ...],
    ranks: RankIds,
    rate: Callable[[tuple[int, ...]], float],
    cluster: Cluster,
) -> Sums:
    """The sums of a layer.

    Args:
        own: which parameters count here.
        rate: seconds a byte of a sum over ranks.
    """
    held_bytes = np.zeros(shards.share.shape)
    reduction_s = np.zeros(len(shards.options))
    for boxes, spec, counts in zip(shards.weights, shards.sized.parameters, own, strict=True):
        if not counts:
            continue
        num_bytes = volumes(boxes) * BYTES_PER_ELEMENT[spec.dtype]
        held_bytes += num_bytes
        for k, groups in enumerate(map(equal_ranks, boxes)):
            seconds = (rate(tuple(ranks[at] for at in group)) * float(num_bytes[k, group[0]]) for group in groups)
            reduction_s[k] += max(seconds)
    args = shards, ranks, cluster
    exchanged_s = statistics_s(*args) + classes_s(*args) + pending_s(*args)
    return Sums(held_bytes, reduction_s, exchanged_s, statistics_standing(shards))


def reduction_rate(cost_model: CostModel, ranks: RankIds) -> float:
    """Seconds a byte of a sum over ``ranks`` as large as all parameters of the graph, and of putting them together."""
    total = int(cost_model.tables.graph.parameter_bytes[-1])
    if not total or len(ranks) < 2:
        return 0.0
    return (cost_model.network.all_reduce_s(ranks, total) + cost_model.network.around_s(GRADIENT_SUMS, total)) / total


def statistics_s(shards: Shards, ranks: RankIds, cluster: Cluster) -> Array:
    """``[2, options]``: what a normalisation exchanges, forward and backward; zeros for other layers."""
    seconds = np.zeros((2, len(shards.options)))
    for k, members, forward, backward in _statistics(shards):
        group = tuple(ranks[member] for member in members)
        for way, size in enumerate((len(group) * forward, backward)):
            seconds[way, k] = max(seconds[way, k], float(norm_s(cluster, group, size)))
    return seconds


def statistics_standing(shards: Shards) -> Array:
    """``[options, ranks]``: what a rank tells each of the others, and is told, of statistics.

    These come again with every micro-batch (``planner.ir.cluster.STANDING_BYTES``).
    """
    standing_bytes = np.zeros(shards.share.shape)
    for k, members, *rows in _statistics(shards):
        standing_bytes[k, members] = 2 * (len(members) - 1) * sum(row for row in rows if row <= STANDING_BYTES)
    return standing_bytes


def _statistics(shards: Shards) -> Iterator[tuple[int, list[int], int, int]]:
    """By option: ranks whose norms meet, and the bytes of a row that each tells the others forward, and backward.

    As ``runtime.stage.batch_norm``: a row of 1 + 2 channels numbers from each rank to each forward, one of 2 channels
    backward.  Ranks with equal channels take part, copies too.
    """
    sized = shards.sized
    if sized.relation.REDUCTION != "statistics":
        return
    spec = sized.layer.outputs[0]
    channel = channel_dim(sized.layer)
    for k, own in enumerate(shards.own):
        for members in summing_ranks(sized.layer, own, own):
            if len(members) > 1:
                channels = int(own[members[0], channel, 1] - own[members[0], channel, 0])
                yield (
                    k,
                    list(members),
                    (1 + 2 * channels) * _STATISTIC_BYTES,
                    2 * channels * BYTES_PER_ELEMENT[spec.dtype],
                )


def classes_s(shards: Shards, ranks: RankIds, cluster: Cluster) -> Array:
    """``[2, options]``: what ranks with parts of the classes of a place tell each other; zeros for other layers.

    As ``runtime.spatial.op_rules.elementwise``: forward four numbers a place from each rank to each, backward nothing.
    """
    seconds = np.zeros((2, len(shards.options)))
    sized = shards.sized
    if sized.layer.kind != LOSS or not has_classes_apart(sized.layer, sized.inputs):
        return seconds
    width = max(BYTES_PER_ELEMENT[sized.work.dtype], _LEAST_BYTES)
    for k, own in enumerate(shards.own):
        is_whole = own[:, CLASS, 1] - own[:, CLASS, 0] == sized.work.shape[CLASS]
        places = np.delete(own, CLASS, axis=1)
        for members in equal_ranks(places):
            group = tuple(ranks[member] for member in members)
            if len(group) < 2 or is_whole[list(members)].all():
                continue
            size = len(group) * 4 * float(volumes(places[members[0]])) * width
            seconds[0, k] = max(seconds[0, k], float(norm_s(cluster, group, size)))
    return seconds


def pending_s(shards: Shards, ranks: RankIds, cluster: Cluster) -> Array:
    """``[2, options]``: sums over the ranks that share one output, copies included, forward and backward.

    Zeros for other layers, and for the loss: its parts are summed with the gradients.  Sums are of 4 bytes at least.
    """
    seconds = np.zeros((2, len(shards.options)))
    sized = shards.sized
    if sized.relation.REDUCTION != "sum" or sized.layer.kind == LOSS:
        return seconds
    for owned, spec in zip(shards.owned, sized.layer.outputs, strict=True):
        num_bytes = volumes(owned) * max(BYTES_PER_ELEMENT[spec.dtype], _LEAST_BYTES)
        passes = 2 if spec.is_float else 1
        for k, groups in enumerate(map(equal_ranks, owned)):
            for members in groups:
                group = tuple(ranks[member] for member in members)
                sum_s = float(partial_sum_s(cluster, group, num_bytes[k, members[0]]))
                seconds[:passes, k] = np.maximum(seconds[:passes, k], sum_s)
    return seconds
