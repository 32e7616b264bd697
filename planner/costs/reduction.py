"""Sums over ranks that boxes do not show: of gradients over equal weights, of statistics over cut samples and space."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.costs.book import PriceBook
from planner.costs.boxes import Boxes, volumes
from planner.costs.network import collective_s
from planner.costs.shards import Shards
from planner.ir.cluster import STATISTICS, Cluster
from planner.ir.graph import BYTES_PER_ELEMENT

_STATISTIC_BYTES = 8

Array = NDArray[np.float64]
Members = tuple[int, ...]
"""Positions of ranks in their group."""


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """What a layer holds of parameters and sums over ranks, by option (and rank).

    Attributes:
        held_bytes: ``[options, ranks]`` of the parameters that are its own (a tied one is its first user's).
        reduction_s: ``[options]``.
        statistics_s: ``[2, options]``, forward and backward.
    """

    held_bytes: Array
    reduction_s: Array
    statistics_s: Array


def sums_of(
    shards: Shards,
    own: tuple[bool, ...],
    ranks: tuple[int, ...],
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
    return Sums(held_bytes, reduction_s, statistics_s(shards, ranks, cluster))


def equal_ranks(boxes: Boxes) -> tuple[Members, ...]:
    """The ranks by equal boxes (``[ranks, dims, 2]``), in order of their first."""
    found: dict[bytes, list[int]] = {}
    for member, box in enumerate(boxes):
        found.setdefault(box.tobytes(), []).append(member)
    return tuple(tuple(members) for members in found.values())


def reduction_rate(book: PriceBook, ranks: tuple[int, ...]) -> float:
    """Seconds a byte of a sum over ``ranks`` as large as all parameters of the graph."""
    total = int(book.tables.graph.parameter_bytes[-1])
    return book.network.all_reduce_s(ranks, total) / total if total and len(ranks) > 1 else 0.0


def statistics_s(shards: Shards, ranks: tuple[int, ...], cluster: Cluster) -> Array:
    """``[2, options]``: what a normalisation exchanges, forward and backward; zeros for other layers.

    As ``runtime.stages.normalisation``: one all-reduce of 1 + 2 channels numbers a rank forward, one of 2 channels
    backward.  Ranks with equal channels take part, unless each of them holds all samples and space.
    """
    found = np.zeros((2, len(shards.options)))
    sized = shards.sized
    if sized.relation.REDUCTION != "statistics":
        return found
    spec = sized.layer.outputs[0]
    channel = spec.dims.index("channel") if "channel" in spec.dims else 1
    others = [dim for dim in range(len(spec.shape)) if dim != channel]
    extents = np.array(spec.shape)[others]
    for k, own in enumerate(shards.owned[0]):
        for members in equal_ranks(own[:, channel : channel + 1]):
            lengths = (own[..., 1] - own[..., 0])[list(members)]
            if len(members) < 2 or (lengths[:, others] == extents).all():
                continue
            channels = int(lengths[0, channel])
            group = tuple(ranks[member] for member in members)
            sizes = (
                len(group) * (1 + 2 * channels) * _STATISTIC_BYTES,
                2 * channels * BYTES_PER_ELEMENT[spec.dtype],
            )
            for way, size in enumerate(sizes):
                found[way, k] = max(found[way, k], float(collective_s(cluster, STATISTICS, group, size)))
    return found
