"""What messages cost on the cluster's links, and how well that is known.

    a message of x bytes      inside its table: straight in log-log between neighbours (one straight line over all sizes
                              errs by 11-43 %); below the first point its seconds (latency); beyond the last, y seconds
                              at z bytes:  y + (x - z) / bandwidth
                              without a table: latency + x / bandwidth
    its call, and its cores   (``sending``, ``sender_core``, ``receiver_core``) straight between neighbours, below the
                              first point its seconds, beyond the last in proportion to the bytes; 0 without a table

Tables: ``tables``; sums over several ranks: ``collectives``.

What a transport is like shows in its tables.  Over gloo the call starts a message, which a thread of either core moves,
one after another each way.  In shared memory the call is the sender's copy, the message is there when it ends but for
the receiver's call and first reading, and no core is disturbed.  Ignored here: that several messages share a cable or
the memory's bandwidth, that in shared memory a message need not wait for the arrival of the one before it (but for its
call, which keeps the rank), and that a message after silence may find a bucket of ``burst_bytes`` that a stream has
emptied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

from planner.costs.communication.collectives import (
    call_s,
    collective_evidence,
    collective_s,
    group_collective,
    least_collective_s,
    most_bytes_per_s,
    most_sum_bytes_per_s,
    ring_links,
)
from planner.costs.communication.tables import Array, read_delays, table_evidence, transfer_s
from planner.costs.layers.confidence import weakest
from planner.ir.cluster import ALL_REDUCE, SHARED_MEMORY, Cluster, Evidence, Link, RankIds, transport_text
from planner.ir.lazy import once, once_by


@dataclass(eq=False)
class NetworkPrices:
    """The cluster's prices, each looked up once, and how well they are known."""

    cluster: Cluster

    @cached_property
    def card_bytes_per_s(self) -> tuple[float, ...]:
        """What each host's network card carries at most, out and in, host after host as their devices come."""
        hosts = dict.fromkeys(device.host for device in self.cluster.devices)
        capacities = map(self.cluster.nic_bytes_per_s, hosts)
        return tuple(capacity for each in capacities for capacity in (inf if each is None else each,) * 2)

    @cached_property
    def most_card_bytes_per_s(self) -> float:
        """No card ever carries more: what cards can, or the fastest message or sum of gradients, if that is more."""
        tiers = [tier.name for tier in self.cluster.nested_tiers]
        across = [name for name in tiers[tiers.index(self.cluster.host_tier) + 1 :] if name in self.cluster.links]
        rates = [most_sum_bytes_per_s(self.cluster, name) for name in across]
        rates += [most_bytes_per_s(pair.link) for pair in self.cluster.pairs if pair.src_host != pair.dst_host]
        return max([*rates, *self.card_bytes_per_s])

    @once_by(lambda self, src, dst, num_bytes: (self._name(src, dst), num_bytes))
    def transfer_s(self, src: int, dst: int, num_bytes: int) -> float:
        """Seconds of a message between two ranks."""
        return float(transfer_s(self.cluster.link(src, dst), num_bytes))

    def sending_s(self, src: int, dst: int, num_bytes: int) -> float:
        """How long the call that sends a message keeps its rank; part of :meth:`transfer_s`, not beside it."""
        return self._delays_s(src, dst, num_bytes)[0]

    def core_s(self, src: int, dst: int, num_bytes: int) -> tuple[float, float]:
        """By how much a message delays computation on the sender's core (beyond its call) and on the receiver's."""
        _, sender_s, receiver_s = self._delays_s(src, dst, num_bytes)
        return sender_s, receiver_s

    @once
    def classes(self, ranks: RankIds) -> tuple[tuple[Link, ...], NDArray[np.int64]]:
        """The links between ``ranks``, each once, and for each pair which of them it is (-1: a rank itself)."""
        by_name = {self._name(a, b): self.cluster.link(a, b) for a in ranks for b in ranks if a != b}
        names = sorted(by_name)
        numbers = np.array([[-1 if a == b else names.index(self._name(a, b)) for b in ranks] for a in ranks])
        return tuple(by_name[name] for name in names), numbers

    @once
    def all_reduce_s(self, ranks: RankIds, num_bytes: int) -> float:
        """Seconds of an all-reduce of ``num_bytes`` over ``ranks``, once all are there."""
        return float(collective_s(self.cluster, ALL_REDUCE, ranks, num_bytes))

    def all_reduces_s(self, ranks: RankIds, num_bytes: Array) -> Array:
        """The same of many sizes, elementwise."""
        return self._all_reduce_of(ranks)(num_bytes)

    @once
    def _all_reduce_of(self, ranks: RankIds) -> Callable[[Array], Array]:
        return group_collective(self.cluster, ALL_REDUCE, ranks)

    @once
    def least_s_per_byte(self, ranks: RankIds, largest: float) -> float:
        """The least that an all-reduce over ``ranks`` takes for a byte, of sizes from 1 KiB to ``largest``."""
        tables = [float(size) for table in self.cluster.collectives for size, _ in table.points if size <= largest]
        sizes = np.unique(np.concatenate((np.geomspace(1024.0, largest, 64), np.array(tables))))
        return float(np.min(self.all_reduces_s(ranks, sizes) / sizes))

    @once
    def least_sums_s(self, sizes: tuple[float, ...]) -> Array:
        """``[n, sizes]``: what an all-reduce takes at least over n ranks or more (:func:`least_collective_s`)."""
        return least_collective_s(self.cluster, ALL_REDUCE, sizes)

    def around_s(self, operation: str, num_bytes: float) -> float:
        """What a rank computes around an exchange of ``num_bytes``, as of :func:`call_s`."""
        return float(call_s(self.cluster, operation, num_bytes))

    @once
    def moving_s(self, ranks: RankIds, num_bytes: int) -> float:
        """What an all-reduce takes from the core of the rank that loses most, as a ring's messages do."""
        moved = round(2 * (len(ranks) - 1) / len(ranks) * num_bytes)
        return max(
            self.cluster.devices[rank].core_share
            * (self.core_s(rank, after, moved)[0] + self.core_s(ahead, rank, moved)[1])
            for ahead, rank, after in self._ring(ranks)
        )

    @once
    def _ring(self, ranks: RankIds) -> Sequence[tuple[int, int, int]]:
        """(rank before, rank, rank after) in a ring, one of each that lose the same of their cores."""
        members = sorted(ranks)
        devices = self.cluster.devices
        places = zip((members[-1], *members), members, (*members[1:], members[0]), strict=False)
        alike = {(devices[b].core_share, self._name(a, b), self._name(b, c)): (a, b, c) for a, b, c in places}
        return tuple(alike.values())

    def duplex(self, src: int, dst: int) -> bool:
        """Whether both directions between two ranks run at once."""
        return self.cluster.link(src, dst).duplex

    def in_background(self, ranks: RankIds) -> bool:
        """Whether what ``ranks`` do together goes on while they compute."""
        return all(link.in_background for link in ring_links(self.cluster, ranks))

    def transfer_evidence(self, src: int, dst: int, num_bytes: int) -> Evidence:
        """How well :meth:`transfer_s` knows."""
        link = self.cluster.link(src, dst)
        return weakest(table_evidence(link.evidence, link.points, num_bytes))

    def all_reduce_evidence(self, ranks: RankIds, num_bytes: int) -> Evidence:
        """How well :meth:`all_reduce_s` knows."""
        return collective_evidence(self.cluster, ALL_REDUCE, ranks, num_bytes)

    @once_by(lambda self, src, dst, num_bytes: (self._name(src, dst), num_bytes))
    def _delays_s(self, src: int, dst: int, num_bytes: int) -> tuple[float, float, float]:
        """(sending, sender's core, receiver's core)."""
        link = self.cluster.link(src, dst)
        sending_s, sender_s, receiver_s = (
            float(read_delays(table, num_bytes)) for table in (link.sending, link.sender_core, link.receiver_core)
        )
        return sending_s, sender_s, receiver_s

    @once
    def _name(self, src: int, dst: int) -> str:
        """One name for all pairs of ranks that cost the same."""
        if self.cluster.pair(src, dst) is None:
            return self.cluster.link_class(src, dst)
        return "\0".join((self.cluster.devices[src].host, self.cluster.devices[dst].host))


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
        latency_s = 0.0
        bandwidth = max(bandwidth, *(n / s for link in links for n, s in link.points))
    duplex = any(link.duplex for link in links)
    return replace(links[0], latency_s=latency_s, bandwidth_bytes_per_s=bandwidth, points=points, duplex=duplex)


def joined_price(price: Callable[[int], float], size: int, ahead: int | None) -> float:
    """The price of a message of ``size`` bytes; of what joins one of ``ahead`` bytes, how much dearer it makes that."""
    return price(size) if ahead is None else max(0.0, price(ahead + size) - price(ahead))
