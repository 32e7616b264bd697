"""What a stage waits for the sums of its gradients, which overlap with the backward that makes them.

    backward of the last micro-batch   | layer 9 ... layer 5 | layer 4 ... layer 1 |
    sums, bucket by bucket                                   [   9 ... 5   ] [ 4 ... 1 ]
                                                                                |------>|  what is waited for

Buckets are the runtime's (``planner.ir.program``).  A bucket's sum starts when its gradients are complete and the one
before it has ended.  What is waited for is the longest, over all buckets, of what they and those after them take, less
the backward that is still to come when the first of these is complete; it begins when the slowest rank is there.  While
sums overlap with a backward, the thread that moves them takes its time from the core that computes.  Where only the
ranks themselves move them (shared memory), nothing overlaps: a sum takes as long, whenever its parts are done.  Putting
the gradients of a bucket together takes the core in any case (``planner.ir.cluster.GRADIENT_SUMS``).  Ignored: that two
sums may share the link, and that gradients of the halves of a backward come later than those of a whole one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.costs.communication.links import NetworkPrices
from planner.costs.communication.tables import Array
from planner.ir.cluster import RankIds
from planner.ir.graph import BYTES_PER_ELEMENT, Graph
from planner.ir.profile import Profile
from planner.ir.program import BUCKET_BYTES, in_buckets
from planner.layers.boxes import BoxArray, equal_ranks, volumes


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are summed together.

    Attributes:
        first_layer: by index, the earliest of the layers that have a part in them: backward comes to it last.
        last_layer: the last layer of the stage that uses a parameter of it.
        copied_bytes: what putting them together takes; nothing for a single one, which is summed where it lies.
        by_layer: of each parameter, its earliest layer and its bytes.
        num_ranks: that sum it; 0: all of the stage.
    """

    num_bytes: int
    first_layer: int
    copied_bytes: int = 0
    last_layer: int = 0
    by_layer: tuple[tuple[int, int], ...] = ()
    num_ranks: int = 0


def buckets(graph: Graph, layers: Sequence[int], apart: frozenset[str] = frozenset()) -> tuple[Bucket, ...]:
    """The buckets of a stage of ``layers`` (by index, ascending), in the order in which they are summed.

    Args:
        apart: parameters that are summed otherwise.
    """
    parts = [
        (name, index, graph.parameters[name].num_bytes)
        for index in layers
        for name in graph.layers[index].parameters
        if name not in apart
    ]
    return tuple(bucket for bucket, _ in _named_buckets(parts))


def buckets_of_parts(
    graph: Graph,
    layers: Sequence[int],
    weights: Sequence[Sequence[BoxArray]],
    member: int,
    apart: frozenset[str] = frozenset(),
) -> tuple[Bucket, ...]:
    """The same on one rank of a stage whose layers have layouts of their own: with those that have equal parts.

    Parts that no other rank has are summed with nobody (:mod:`runtime.optim.sharding`).

    Args:
        weights: by layer, of each of its parameters what every rank has, ``[ranks, dims, 2]``.
        member: number of the rank among those of the stage.
    """
    groups: dict[tuple[int, ...], list[tuple[str, int, int]]] = {}
    place: dict[str, int] = {}
    for index, boxes_of in zip(layers, weights, strict=True):
        for name, boxes in zip(graph.layers[index].parameters, boxes_of, strict=True):
            place.setdefault(name, len(place))
            size = int(volumes(boxes)[member]) * BYTES_PER_ELEMENT[graph.parameters[name].dtype]
            group = next(members for members in equal_ranks(boxes) if member in members)
            if size and len(group) > 1 and name not in apart:
                groups.setdefault(group, []).append((name, index, size))
    buckets = [
        (replace(bucket, num_ranks=len(group)), names)
        for group, parts in groups.items()
        for bucket, names in _named_buckets(parts)
    ]
    buckets.sort(key=lambda each: -min(place[name] for name in each[1]))
    return tuple(bucket for bucket, _ in buckets)


def _named_buckets(parts: Iterable[tuple[str, int, int]]) -> list[tuple[Bucket, list[str]]]:
    """Each with its parameters; of uses of these by layers: (name, layer, bytes that a rank has of it)."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    bytes_of: dict[str, int] = {}
    for name, index, num_bytes in parts:
        first.setdefault(name, index)
        last[name] = index
        bytes_of.setdefault(name, num_bytes)
    names = list(first)
    sizes = [bytes_of[name] for name in names]
    buckets = []
    for places in in_buckets(sizes):
        num_bytes = sum(sizes[place] for place in places)
        copied = num_bytes if len(places) > 1 else 0
        own = [names[place] for place in places]
        by_layer = tuple((first[name], bytes_of[name]) for name in own)
        ends = min(first[name] for name in own), max(last[name] for name in own)
        buckets.append((Bucket(num_bytes, ends[0], copied, ends[1], by_layer), own))
    return buckets


def exposed_s(
    buckets: Sequence[Bucket],
    later_s: Callable[[int], float],
    sum_s: Callable[[int], float],
    core_s: Callable[[int], float],
    copied_s: Callable[[int], float],
) -> float:
    """Seconds that ranks wait for the sums of ``buckets`` after their backward.

    Args:
        later_s: of the backward that comes after that of the layer of an index: sums overlap with it.
        sum_s: of a sum, by its bytes.
        core_s: that moving bytes takes from the core that computes.
        copied_s: of hearing of each gradient and putting their bytes together.
    """
    copying_s = sum(copied_s(bucket.copied_bytes) for bucket in buckets)
    if len(buckets) < 2:  # it is complete when backward ends
        return copying_s + sum(sum_s(bucket.num_bytes) for bucket in buckets)
    left_s = waited_s = hidden_s = 0.0
    for bucket in reversed(buckets):
        left_s += sum_s(bucket.num_bytes)
        hidden_s = later_s(bucket.first_layer)
        waited_s = max(waited_s, left_s - hidden_s)
    moved_s = sum(core_s(bucket.num_bytes) for bucket in buckets)
    return copying_s + waited_s + moved_s * min(1.0, hidden_s / left_s if left_s > 0 else 0.0)


def least_sums_s(profile: Profile, sum_s: Callable[[Array], Array]) -> Array:
    """By layer, what summing its parameters' gradients takes at least, whatever buckets they are in: ``[..., layers]``.

    A gradient larger than a bucket is summed alone; others are in buckets, of which no byte takes less than the least.
    Parameters that several layers use are left out.

    Args:
        sum_s: seconds of sums by their bytes, ``[..., sizes]``.
    """
    graph = profile.graph
    tied = graph.tied_layers()
    own = [(number, name) for number, of in enumerate(graph.layers) for name in of.parameters if name not in tied]
    sizes = np.array([float(graph.parameters[name].num_bytes) for _, name in own])
    points = (float(at) for table in profile.cluster.collectives for at, _ in table.points if at <= BUCKET_BYTES)
    some = np.unique([*np.geomspace(1024.0, BUCKET_BYTES, 64), *points])
    per_byte = np.min(sum_s(some) / some, axis=-1, keepdims=True)
    each = np.where(sizes > BUCKET_BYTES, sum_s(np.maximum(sizes, 1.0)), per_byte * sizes)
    by_layer = np.zeros((*each.shape[:-1], len(graph.layers)))
    if own:
        numbers, starts = np.unique([number for number, _ in own], return_index=True)
        by_layer[..., numbers] = np.add.reduceat(each, starts, axis=-1)
    return by_layer


def least_reduction_s(
    network: NetworkPrices, ranks: RankIds, num_bytes: Array, sums_s: Array, backward_s: Array, zero: int
) -> Array:
    """No stage on ``ranks`` takes less for the sum of its gradients' bytes; elementwise.

    Args:
        sums_s: its buckets take no less (:func:`least_sums_s`).
        backward_s: no rank's last backward is longer.
        zero: what ranks divide (``planner.ir.plan.Stage.level``): of the optimiser's state sums wait for the end of the
            backward; of gradients they are in the passes, and of parameters what gathers them is too.
    """
    if zero:
        half_s = network.all_reduces_s(ranks, num_bytes) / 2
        return half_s * (2, 1, 0)[zero - 1]
    largest = float(max(BUCKET_BYTES, np.max(num_bytes, initial=0.0)))
    of_buckets = np.maximum(network.least_s_per_byte(ranks, largest) * num_bytes, sums_s)
    several = np.maximum(of_buckets - backward_s, 0.0)
    return np.where(num_bytes <= BUCKET_BYTES, network.all_reduces_s(ranks, num_bytes), several)


def least_bytes_on_cards(network: NetworkPrices, ranks: RankIds, num_bytes: Array, least_s: Array, zero: int) -> Array:
    """What the sum of a stage's gradients on several hosts puts on the network card of each at least; elementwise.

    It moves its bytes evenly in the time that a sum of all takes alone, as long as its ranks wait for it
    (``costs.simulator.traffic``).

    Args:
        least_s: by :func:`least_reduction_s`, of which updated parameters that are gathered are no part.
    """
    waited_s = least_s / 2 if zero == 1 else least_s * (not zero)
    alone_s = network.all_reduces_s(ranks, num_bytes)
    moved_bytes = 2 * (len(ranks) - 1) / len(ranks) * num_bytes
    return np.asarray(moved_bytes * np.divide(waited_s, alone_s, out=np.zeros_like(alone_s), where=alone_s > 0))
