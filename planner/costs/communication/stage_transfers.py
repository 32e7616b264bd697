"""What a stage hands to the next one at least, before a plan says more: bytes of layers, pieces between members.

For lower bounds; the messages of a plan are those of :mod:`planner.layers.boundary`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import inf

import numpy as np

from planner.costs.communication.links import without_pairs
from planner.costs.communication.tables import Array
from planner.ir.box import inside, volume, whole
from planner.ir.cluster import Cluster, Link
from planner.ir.graph import BYTES_PER_ELEMENT, Layer, TensorSpec
from planner.layers import kind as kind_named

TierMessage = tuple[str, float]
"""A message by tier of its link and samples."""


def bytes_read(layer: Layer, values: Mapping[str, TensorSpec], samples: int) -> Iterator[tuple[str, float]]:
    """The bytes per sample that ``layer`` reads of each of its inputs; 0 for what has no sample dim.

    Args:
        samples: that the graph was captured with.
    """
    inputs = tuple(values[name] for name in layer.inputs)
    relation = kind_named(layer.kind)
    work = whole(relation.work(layer, inputs).shape)
    for name, spec, box in zip(layer.inputs, inputs, relation.input_boxes(layer, inputs, work), strict=True):
        size = volume(inside(box, spec.shape)) * BYTES_PER_ELEMENT[spec.dtype]
        yield name, size / samples if spec.has_samples else 0.0


@dataclass(frozen=True, slots=True)
class BoundaryMessages:
    """The messages of one micro-batch: those of each receiver, and of each sender, equal ones once."""

    by_receiver: frozenset[frozenset[TierMessage]]
    by_sender: frozenset[frozenset[TierMessage]]


@functools.lru_cache(maxsize=65536)
def pieces(
    source: tuple[float, ...],
    destination: tuple[float, ...],
    sources: tuple[int, ...],
    destinations: tuple[int, ...],
    between: tuple[tuple[str, ...], ...],
) -> BoundaryMessages:
    """The messages, given the samples of each member before and after, their pools, and the tiers between these."""
    starts, ends = (np.round(np.cumsum([0, *shares]), 9) for shares in (source, destination))  # of whole samples exact
    borders = np.union1d(starts, ends)
    first = np.searchsorted(starts, borders[:-1], side="right") - 1
    second = np.searchsorted(ends, borders[:-1], side="right") - 1
    by_receiver: list[set[TierMessage]] = [set() for _ in destination]
    by_sender: list[set[TierMessage]] = [set() for _ in source]
    for i, j, size in zip(first.tolist(), second.tolist(), np.diff(borders).tolist(), strict=True):
        piece = (between[sources[i]][destinations[j]], size)
        by_receiver[j].add(piece)
        by_sender[i].add(piece)
    return BoundaryMessages(frozenset(map(frozenset, by_receiver)), frozenset(map(frozenset, by_sender)))


Crossing = tuple[int, float, float]
"""A host, and of one micro-batch the samples that leave it for others and those that reach it from others."""


@functools.lru_cache(maxsize=65536)
def across_hosts(
    source: tuple[float, ...],
    destination: tuple[float, ...],
    sources: tuple[int, ...],
    destinations: tuple[int, ...],
    in_order: bool = True,
) -> tuple[Crossing, ...]:
    """What passes network cards, given the samples of each member before and after, and their hosts.

    Args:
        in_order: whether members share samples in this order; else what is certain of any order.
    """
    before = _by_host(source, sources)
    after = _by_host(destination, destinations)
    stays = dict.fromkeys(sources, 0.0)
    if in_order:
        for (host, begin, end), (other, first, last) in product(before, after):
            if host == other:
                stays[host] += max(0.0, min(end, last) - max(begin, first))
    else:
        most = max(source)
        largest = max(destination)
        stays = {host: min(most * sources.count(host), largest * destinations.count(host)) for host in stays}
    crossings = []
    for host in dict.fromkeys((*sources, *destinations)):
        if in_order:
            all_out, all_in = (sum(end - at for of, at, end in runs if of == host) for runs in (before, after))
        else:
            all_out = min(source) * sources.count(host)
            all_in = min(destination) * destinations.count(host)
        stay = stays.get(host, 0.0)
        crossings.append((host, max(0.0, all_out - stay), max(0.0, all_in - stay)))
    return tuple(crossings)


def _by_host(samples: tuple[float, ...], hosts: tuple[int, ...]) -> list[Crossing]:
    """(host, begin, end) of samples, of members of one host that follow one another."""
    runs: list[Crossing] = []
    end = 0.0
    for host, own in zip(hosts, samples, strict=True):
        begin = runs.pop()[1] if runs and runs[-1][0] == host else end
        end += own
        runs.append((host, begin, end))
    return runs


def least_links(cluster: Cluster) -> dict[str, Link]:
    """By tier, a link on which no message takes longer than between any two devices, or than a larger one."""
    return {name: least_link(link) for name, link in without_pairs(cluster).links.items()}


def without_time(cluster: Cluster) -> Cluster:
    """The cluster with links on which nothing takes time: the least that messages take which may stream."""
    links = {name: Link(0.0, inf, duplex=link.duplex) for name, link in cluster.links.items()}
    return replace(cluster, links=links, pairs=())


def least_link(link: Link) -> Link:
    """The link with a table that never falls, below the measured one: what as many bytes or more take."""
    if not link.points:
        return link
    seconds: Array = np.minimum.accumulate([s for _, s in link.points][::-1])[::-1]
    points = tuple((size, float(s)) for (size, _), s in zip(link.points, seconds, strict=True))
    return Link(link.latency_s, link.bandwidth_bytes_per_s, points, link.duplex, link.evidence)
