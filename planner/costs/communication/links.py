"""What messages cost on the cluster's links, and how well that is known.

    a message of x bytes      inside its table: straight in log-log between neighbours (one straight line over all sizes
                              errs by 11-43 %); below the first point its seconds (latency); beyond the last, y seconds
                              at z bytes:  y + (x - z) / bandwidth
                              without a table: latency + x / bandwidth
    its call, and its cores   (``sending``, ``sender_core``, ``receiver_core``) straight between neighbours, below the
                              first point its seconds, beyond the last in proportion to the bytes; 0 without a table

Tables, and sums over several ranks: :mod:`planner.costs.communication.collectives`.

What a transport is like shows in its tables.  Over gloo the call starts a message, which a thread of either core moves,
one after another each way.  In shared memory the call is the sender's copy, the message is there when it ends but for
the receiver's call and first reading, and no core is disturbed.  Ignored here: that several messages share a cable or
the memory's bandwidth, that in shared memory a message need not wait for the arrival of the one before it (but for its
call, which keeps the rank), and that a message after silence may find a bucket of ``burst_bytes`` that a stream has
emptied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

from planner.costs.communication.collectives import (
    Points,
    call_s,
    collective_evidence,
    collective_s,
    group_collective,
    least_collective_s,
    most_bytes_per_s,
    most_sum_bytes_per_s,
    read_delays,
    read_points,
    ring_links,
    table_evidence,
    transfer_s,
)
from planner.costs.layers.confidence import weakest
from planner.ir.cluster import ALL_REDUCE, SHARED_MEMORY, Cluster, Evidence, Link, transport_text

__all__ = [
    "NetworkPrices",
    "Points",
    "collective_s",
    "fastest",
    "read_points",
    "transfer_s",
    "transport_of",
    "without_pairs",
]


@dataclass(slots=True, eq=False)
class NetworkPrices:
    """The cluster's prices, each looked up once, and how well they are known."""

    cluster: Cluster
    _classes: dict[tuple[int, ...], tuple[tuple[Link, ...], NDArray[np.int64]]] = field(
        default_factory=dict, repr=False
    )
    _transfers: dict[tuple[str, int], float] = field(default_factory=dict, repr=False)
    _delays: dict[tuple[str, int], tuple[float, float, float]] = field(default_factory=dict, repr=False)
    _collectives: dict[tuple[str, tuple[int, ...], int], float] = field(default_factory=dict, repr=False)
    _least: dict[tuple[float, ...], NDArray[np.float64]] = field(default_factory=dict, repr=False)
    _rings: dict[tuple[int, ...], Sequence[tuple[int, int, int]]] = field(default_factory=dict, repr=False)
    _cards: list[float] = field(default_factory=list, repr=False)
    _most_on_card: list[float] = field(default_factory=list, repr=False)
    _pairs: frozenset[tuple[str, str]] = field(init=False, repr=False)
    _names: dict[tuple[int, int], str] = field(default_factory=dict, repr=False)
    _groups: dict[tuple[int, ...], Callable[[NDArray[np.float64]], NDArray[np.float64]]] = field(
        default_factory=dict, repr=False
    )
    _least_s_per_byte: dict[tuple[tuple[int, ...], float], float] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._pairs = frozenset((pair.src_host, pair.dst_host) for pair in self.cluster.pairs)

    @property
    def card_bytes_per_s(self) -> tuple[float, ...]:
        """What each host's network card carries at most, out and in, host after host as their devices come."""
        if not self._cards:
            hosts = dict.fromkeys(device.host for device in self.cluster.devices)
            capacities = map(self.cluster.nic_bytes_per_s, hosts)
            self._cards += [capacity for each in capacities for capacity in (inf if each is None else each,) * 2]
        return tuple(self._cards)

    @property
    def most_card_bytes_per_s(self) -> float:
        """No card ever carries more: what cards can, or the fastest message or sum of gradients, if that is more."""
        if not self._most_on_card:
            tiers = [tier.name for tier in self.cluster.nested_tiers]
            across = [name for name in tiers[tiers.index(self.cluster.host_tier) + 1 :] if name in self.cluster.links]
            rates = [most_sum_bytes_per_s(self.cluster, name) for name in across]
            rates += [most_bytes_per_s(pair.link) for pair in self.cluster.pairs if pair.src_host != pair.dst_host]
            self._most_on_card.append(max([*rates, *self.card_bytes_per_s]))
        return self._most_on_card[0]

    def transfer_s(self, src: int, dst: int, num_bytes: int) -> float:
        """Seconds of a message between two ranks."""
        name = self._name(src, dst)
        seconds = self._transfers.get((name, num_bytes))
        if seconds is None:
            seconds = self._transfers[name, num_bytes] = float(transfer_s(self.cluster.link(src, dst), num_bytes))
        return seconds

    def sending_s(self, src: int, dst: int, num_bytes: int) -> float:
        """How long the call that sends a message keeps its rank; part of :meth:`transfer_s`, not beside it."""
        return self._delays_s(src, dst, num_bytes)[0]

    def core_s(self, src: int, dst: int, num_bytes: int) -> tuple[float, float]:
        """By how much a message delays computation on the sender's core (beyond its call) and on the receiver's."""
        _, sender_s, receiver_s = self._delays_s(src, dst, num_bytes)
        return sender_s, receiver_s

    def classes(self, ranks: tuple[int, ...]) -> tuple[tuple[Link, ...], NDArray[np.int64]]:
        """The links between ``ranks``, each once, and for each pair which of them it is (-1: a rank itself)."""
        indexed = self._classes.get(ranks)
        if indexed is None:
            by_name = {self._name(a, b): self.cluster.link(a, b) for a in ranks for b in ranks if a != b}
            names = sorted(by_name)
            numbers = np.array([[-1 if a == b else names.index(self._name(a, b)) for b in ranks] for a in ranks])
            indexed = self._classes[ranks] = (tuple(by_name[name] for name in names), numbers)
        return indexed

    def all_reduce_s(self, ranks: tuple[int, ...], num_bytes: int) -> float:
        """Seconds of an all-reduce of ``num_bytes`` over ``ranks``, once all are there."""
        key = (self.cluster.group_link_class(ranks), ranks, num_bytes)
        seconds = self._collectives.get(key)
        if seconds is None:
            seconds = self._collectives[key] = float(collective_s(self.cluster, ALL_REDUCE, ranks, num_bytes))
        return seconds

    def all_reduces_s(self, ranks: tuple[int, ...], num_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """The same of many sizes, elementwise."""
        seconds = self._groups.get(ranks)
        if seconds is None:
            seconds = self._groups[ranks] = group_collective(self.cluster, ALL_REDUCE, ranks)
        return seconds(num_bytes)

    def least_s_per_byte(self, ranks: tuple[int, ...], largest: float) -> float:
        """The least that an all-reduce over ``ranks`` takes for a byte, of sizes from 1 KiB to ``largest``."""
        least_s = self._least_s_per_byte.get((ranks, largest))
        if least_s is None:
            tables = [float(size) for table in self.cluster.collectives for size, _ in table.points if size <= largest]
            sizes = np.unique(np.concatenate((np.geomspace(1024.0, largest, 64), np.array(tables))))
            least_s = self._least_s_per_byte[ranks, largest] = float(np.min(self.all_reduces_s(ranks, sizes) / sizes))
        return least_s

    def least_sums_s(self, sizes: tuple[float, ...]) -> NDArray[np.float64]:
        """``[n, sizes]``: what an all-reduce takes at least over n ranks or more (:func:`least_collective_s`)."""
        bounds_s = self._least.get(sizes)
        if bounds_s is None:
            bounds_s = self._least[sizes] = least_collective_s(self.cluster, ALL_REDUCE, sizes)
        return bounds_s

    def around_s(self, operation: str, num_bytes: float) -> float:
        """What a rank computes around an exchange of ``num_bytes``, as of :func:`call_s`."""
        return float(call_s(self.cluster, operation, num_bytes))

    def moving_s(self, ranks: tuple[int, ...], num_bytes: int) -> float:
        """What an all-reduce takes from the core of the rank that loses most, as a ring's messages do."""
        key = ("moving", ranks, num_bytes)
        seconds = self._collectives.get(key)
        if seconds is None:
            moved = round(2 * (len(ranks) - 1) / len(ranks) * num_bytes)
            seconds = max(
                self.cluster.devices[rank].core_share
                * (self.core_s(rank, after, moved)[0] + self.core_s(ahead, rank, moved)[1])
                for ahead, rank, after in self._ring(ranks)
            )
            self._collectives[key] = seconds
        return seconds

    def _ring(self, ranks: tuple[int, ...]) -> Sequence[tuple[int, int, int]]:
        """(rank before, rank, rank after) in a ring, one of each that lose the same of their cores."""
        ring = self._rings.get(ranks)
        if ring is None:
            members, devices = sorted(ranks), self.cluster.devices
            places = zip((members[-1], *members), members, (*members[1:], members[0]), strict=False)
            alike = {(devices[b].core_share, self._name(a, b), self._name(b, c)): (a, b, c) for a, b, c in places}
            ring = self._rings[ranks] = tuple(alike.values())
        return ring

    def duplex(self, src: int, dst: int) -> bool:
        """Whether both directions between two ranks run at once."""
        return self.cluster.link(src, dst).duplex

    def in_background(self, ranks: tuple[int, ...]) -> bool:
        """Whether what ``ranks`` do together goes on while they compute."""
        return all(link.in_background for link in ring_links(self.cluster, ranks))

    def transfer_evidence(self, src: int, dst: int, num_bytes: int) -> Evidence:
        """How well :meth:`transfer_s` knows."""
        link = self.cluster.link(src, dst)
        return weakest(table_evidence(link.evidence, link.points, num_bytes))

    def all_reduce_evidence(self, ranks: tuple[int, ...], num_bytes: int) -> Evidence:
        """How well :meth:`all_reduce_s` knows."""
        return collective_evidence(self.cluster, ALL_REDUCE, ranks, num_bytes)

    def _delays_s(self, src: int, dst: int, num_bytes: int) -> tuple[float, float, float]:
        """(sending, sender's core, receiver's core)."""
        name = self._name(src, dst)
        delays_s = self._delays.get((name, num_bytes))
        if delays_s is None:
            link = self.cluster.link(src, dst)
            tables = (link.sending, link.sender_core, link.receiver_core)
            sending_s, sender_s, receiver_s = (float(read_delays(table, num_bytes)) for table in tables)
            delays_s = self._delays[name, num_bytes] = (sending_s, sender_s, receiver_s)
        return delays_s

    def _name(self, src: int, dst: int) -> str:
        """One name for all pairs of ranks that cost the same."""
        name = self._names.get((src, dst))
        if name is None:
            ends = self.cluster.devices[src].host, self.cluster.devices[dst].host
            is_stated = ends in self._pairs and self.cluster.pair(src, dst) is not None
            name = self._names[src, dst] = "\0".join(ends) if is_stated else self.cluster.link_class(src, dst)
        return name


def shares_memory(cluster: Cluster, ranks: Sequence[int]) -> bool:
    """Whether messages between any two of ``ranks`` go through memory that they share."""
    pairs = ((a, b) for a in ranks for b in ranks if a != b)
    return all(cluster.link(*pair).transport == SHARED_MEMORY for pair in pairs)


def transport_of(cluster: Cluster, ranks: Sequence[int]) -> str:
    """What the links between ``ranks`` were measured with; empty where they do not say, or there are none."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(cluster.devices[rank].host, []).append(rank)
    within = [ends for members in by_host.values() for ends in pairwise(members)]
    between = list(pairwise(members[0] for members in by_host.values()))
    names = [{cluster.link(*ends).transport for ends in each} for each in (within, between)]
    if any(len(each) > 1 or "" in each for each in names):
        return ""
    return transport_text(*("".join(each) for each in names))


def without_pairs(cluster: Cluster) -> Cluster:
    """The cluster with one link a class, on which no message takes longer than between any two hosts: for bounds."""
    if not cluster.pairs:
        return cluster
    by_class: dict[str, list[Link]] = {name: [link] for name, link in cluster.links.items()}
    for pair in cluster.pairs:
        by_class.setdefault(cluster.pair_tier(pair), []).append(pair.link)
    return replace(cluster, links={name: fastest(links) for name, links in by_class.items()}, pairs=())


def fastest(links: Sequence[Link]) -> Link:
    """A link that takes, at every size, at most what any of ``links`` takes."""
    if all(link == links[0] for link in links):
        return links[0]
    bandwidth = max(link.bandwidth_bytes_per_s for link in links)
    latency_s = min(link.latency_s for link in links)
    sizes = sorted({size for link in links for size, _ in link.points})
    points: tuple[tuple[int, float], ...] = ()
    if len({link.points[-1][0] if link.points else 0 for link in links}) == 1:
        points = tuple((size, min(float(transfer_s(link, size)) for link in links)) for size in sizes)
    else:  # tables of different lengths: a straight line below all of them
        latency_s, bandwidth = 0.0, max(bandwidth, *(n / s for link in links for n, s in link.points))
    duplex = any(link.duplex for link in links)
    return replace(links[0], latency_s=latency_s, bandwidth_bytes_per_s=bandwidth, points=points, duplex=duplex)
