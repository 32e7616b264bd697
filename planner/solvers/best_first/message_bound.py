"""What messages between two groups take at least: for each row of ``Crossings``, in seconds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from math import inf

import numpy as np
from numpy.typing import NDArray

from planner.costs.communication.links import fastest
from planner.costs.communication.stage_transfers import (
    BoundaryMessages,
    TierMessage,
    across_hosts,
    least_link,
    least_links,
    pieces,
    without_time,
)
from planner.costs.communication.tables import transfer_s
from planner.costs.layers.cost_table import Array
from planner.costs.stages.stage_bound import columnwise
from planner.ir.cluster import Link
from planner.ir.lazy import once, once_by
from planner.solvers.best_first.graph_cuts import Handed
from planner.solvers.best_first.priced_groups import GroupPrices, PricedGroup
from planner.solvers.budget import note
from planner.solvers.candidates.feasibility import may_stream

_ORDER_S = 3e-5  # of messages between members in one order
_POOL_S = 2e-6  # for each pool

PiecesOfOne = frozenset[TierMessage]
"""Messages of one member; equal ones once."""

OnCards = frozenset[tuple[float, float]]
"""Of the sides of network cards, equal ones once: samples of a step that pass there, and whose gradients do."""


@dataclass(frozen=True, slots=True, eq=False)
class HandoverBound:
    """Messages between a stage and the next one, by row of ``Crossings``; one way with what its receive costs.

    Loads are all messages of a step one after another, on the channel with the largest pieces, or all their bytes on
    the network card with the most, if that takes longer.
    """

    forward_s: Array  # [crossings] from the end of an F to the start of the next, which waits for all of its rank
    least_forward_s: Array  # [crossings] the same for a given rank of the stage, whose piece may be the smallest
    least_backward_s: Array  # [crossings] from a B to a B before
    backward_s: Array  # [crossings] from the last B of the next stage to a B before that waits for all of its rank
    load_forward_s: Array  # [crossings]
    load_backward_s: Array  # [crossings]
    load_both_s: Array  # [crossings] in both directions, where they share a wire or a card; else 0

    @property
    def one_way_s(self) -> Array:
        """All messages one way, and one the other way."""
        return np.maximum(self.load_forward_s + self.least_backward_s, self.forward_s + self.load_backward_s)


def least_links_of(prices: GroupPrices) -> dict[str, Link]:
    """By tier, a link that is never slower than one between two devices (``least_links``); no time where it streams."""
    cluster = prices.cost_model.cluster
    return least_links(without_time(cluster) if may_stream(prices.freedom.problem) else cluster)


@dataclass(eq=False)
class HandoverBounds:
    """Hand-overs between groups, each worked out once.

    Attributes:
        hosts: a number for the host of each pool.
        has_cards: whether there are several, so that network cards may be short.
    """

    prices: GroupPrices
    hosts: tuple[int, ...] = field(init=False)
    has_cards: bool = field(init=False)
    _links: dict[str, Link] = field(init=False, repr=False)
    _tiers: NDArray[np.object_] = field(init=False, repr=False)
    _card_bytes_per_s: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        cluster = self.prices.cost_model.cluster
        self._links = least_links_of(self.prices)
        *inner, outermost = (tier.name for tier in cluster.nested_tiers)
        groups = np.array([pool.groups for pool in self.prices.pools], dtype=object)
        self._tiers = np.full((len(groups), len(groups)), outermost, dtype=object)
        for level in reversed(range(len(inner))):
            self._tiers[np.equal.outer(groups[:, level], groups[:, level]).astype(bool)] = inner[level]
        hosts = [cluster.devices[pool.ranks[0]].host for pool in self.prices.pools]
        self.hosts = tuple(map(hosts.index, hosts))
        self.has_cards = len(set(self.hosts)) > 1
        streams = may_stream(self.prices.freedom.problem)
        self._card_bytes_per_s = inf if streams else self.prices.cost_model.network.most_card_bytes_per_s

    @once_by(lambda _, source, destination: (source.counts, source.shares, destination.counts, destination.shares))
    def between(self, source: PricedGroup, destination: PricedGroup) -> HandoverBound:
        """Messages from ``source`` to ``destination``, and gradients back."""
        num_orders = len(source.orders) * len(destination.orders)
        note((_ORDER_S + _POOL_S * len(self.hosts)) * num_orders)
        handovers = [self._in_order(source, a, destination, b) for a in source.orders for b in destination.orders]
        if len(handovers) == 1:
            return handovers[0]
        return columnwise(lambda *columns: np.minimum.reduce(columns), *handovers)

    @once_by(
        lambda _, source, destination, handed: (
            *(source.counts, source.shares, destination.counts, destination.shares),
            *(handed.forward_bytes, handed.backward_bytes),
        )
    )
    def handed(self, source: PricedGroup, destination: PricedGroup, handed: Handed) -> tuple[float, float]:
        """As ``forward_s`` and ``backward_s`` of :class:`HandoverBound`, for given bytes and without overhead."""
        patterns = [
            pattern
            for first in source.orders
            for second in destination.orders
            for pattern in self._patterns(source, first, destination, second).values()
        ]
        there = min(self._slowest(rank, handed.forward_bytes) for p in patterns for rank in p.by_receiver)
        return there, min(self._slowest(rank, handed.backward_bytes) for p in patterns for rank in p.by_sender)

    def on_cards(self, source: PricedGroup, destination: PricedGroup, handed: Handed) -> tuple[Array, Array]:
        """How long outputs of a micro-batch, and their gradients, keep network cards busy: of each host out, then in.

        Groups are called by their own pools; of micro-batches the least counts.
        """
        if not (source.samples and destination.samples):  # any shares
            return (np.zeros(2 * len(self.hosts)),) * 2
        seconds = self._passing(source, destination) / self._card_bytes_per_s
        return seconds.ravel() * handed.forward_bytes, seconds[:, ::-1].ravel() * handed.backward_bytes

    def alone_s(self, source: PricedGroup, destination: PricedGroup, handed: Handed) -> Array:
        """As :meth:`handed`, or as long as the fullest network card is busy with it, if that is longer."""
        on_cards_s = [seconds.max() for seconds in self.on_cards(source, destination, handed)]
        return np.maximum(self.handed(source, destination, handed), on_cards_s)

    @once_by(lambda _, source, destination: (source.counts, source.shares, destination.counts, destination.shares))
    def _passing(self, source: PricedGroup, destination: PricedGroup) -> Array:
        """Samples of a micro-batch that leave each host, and that reach it: the least of all micro-batches."""
        hosts = [tuple(self.hosts[number] for number in group.orders[0]) for group in (source, destination)]
        sizes = list(set(self.prices.micro_batches))
        passing = np.zeros((len(sizes), len(self.prices.pools), 2))
        for number, size in enumerate(sizes):
            for host, *both in across_hosts(source.samples[size], destination.samples[size], *hosts):
                passing[number, host] = both
        return np.asarray(passing.min(axis=0))

    def _slowest(self, own: PiecesOfOne, bytes_per_sample: float) -> float:
        return max(float(transfer_s(self._links[link], bytes_per_sample * samples)) for link, samples in own)

    def _patterns(
        self, source: PricedGroup, first: tuple[int, ...], destination: PricedGroup, second: tuple[int, ...]
    ) -> dict[int, BoundaryMessages]:
        """Who hands what to whom, by samples of the micro-batch, if members are in the orders given."""
        mine = list(dict.fromkeys(first))
        theirs = list(dict.fromkeys(second))
        between = tuple(map(tuple, self._tiers[np.ix_(mine, theirs)].tolist()))
        names = sorted(set(chain.from_iterable(between)))
        if len(names) > 1 and not (source.orders_known and destination.orders_known):
            names = [self._any_of(names)]  # any two members might be in one group
        if len(names) == 1:  # whatever pools they are of
            between = ((names[0],),)
            first = (mine[0],) * source.size
            second = (theirs[0],) * destination.size
        sources = tuple(map(mine.index, first))
        destinations = tuple(map(theirs.index, second))
        return {
            size: pieces(source.samples[size], destination.samples[size], sources, destinations, between)
            for size in set(self.prices.micro_batches)
        }

    def least_link(self, source: int, destination: int) -> Link:
        """Between devices of two pools, no slower than any such link."""
        return self._links[self._tiers[source, destination]]

    def _any_of(self, names: list[str]) -> str:
        """A name for links of which none is known to be slower than another."""
        joined = " or ".join(names)
        if joined not in self._links:
            self._links[joined] = least_link(fastest([self._links[name] for name in names if name in self._links]))
        return joined

    def _in_order(
        self, source: PricedGroup, first: tuple[int, ...], destination: PricedGroup, second: tuple[int, ...]
    ) -> HandoverBound:
        batches = self.prices.micro_batches
        overhead_s = min(source.prices.overhead_s, destination.prices.overhead_s)
        by_size = self._patterns(source, first, destination, second)
        receivers = frozenset[PiecesOfOne]().union(*(pieces_of_size.by_receiver for pieces_of_size in by_size.values()))
        senders = frozenset[PiecesOfOne]().union(*(pieces_of_size.by_sender for pieces_of_size in by_size.values()))
        full: PiecesOfOne = frozenset().union(*by_size[batches[0]].by_receiver)
        on_cards = self._on_cards(source, first, destination, second)
        return self._price((receivers, senders, full), on_cards, overhead_s)

    def _on_cards(
        self, source: PricedGroup, first: tuple[int, ...], destination: PricedGroup, second: tuple[int, ...]
    ) -> OnCards:
        """What all micro-batches put on network cards, if members are in the orders given."""
        hosts = [tuple(self.hosts[number] for number in order) for order in (first, second)]
        if len({*chain(*hosts)}) == 1 or np.isinf(self._card_bytes_per_s):
            return frozenset()
        in_order = source.orders_known and destination.orders_known
        passed: dict[int, Array] = {}
        for size, times in Counter(self.prices.micro_batches).items():
            for host, *both in across_hosts(source.samples[size], destination.samples[size], *hosts, in_order):
                passed[host] = passed.get(host, np.zeros(2)) + times * np.array(both)
        ends = (tuple(each.tolist()) for each in passed.values() if each.any())
        return frozenset(side for there, back in ends for side in ((there, back), (back, there)))

    @once
    def _price(
        self,
        pieces_of: tuple[frozenset[PiecesOfOne], frozenset[PiecesOfOne], PiecesOfOne],
        on_cards: OnCards,
        overhead_s: float,
    ) -> HandoverBound:
        """Hand-overs of these pieces: those of each receiver, of each sender, and all of a full micro-batch."""
        receivers, senders, full = pieces_of
        batches = self.prices.micro_batches
        every: PiecesOfOne = frozenset().union(*receivers)
        load_forward_s = self._most(full, forward=True) * batches.count(batches[0])
        load_backward_s = self._most(full, forward=False) * batches.count(batches[0])
        load_both_s = np.zeros_like(load_forward_s)
        if not all(self._links[name].duplex for name, _ in every):
            load_both_s = load_forward_s + load_backward_s
        crossings = self.prices.cuts.crossings
        card_s = [each / self._card_bytes_per_s for each in (crossings.forward_bytes, crossings.backward_bytes)]
        for there, back in on_cards:
            load_forward_s = np.maximum(load_forward_s, there * card_s[0])
            load_backward_s = np.maximum(load_backward_s, back * card_s[1])
            if there and back:
                load_both_s = np.maximum(load_both_s, there * card_s[0] + back * card_s[1])
        return HandoverBound(
            forward_s=self._least_of_most(receivers, forward=True) + overhead_s,
            least_forward_s=self._least(every, forward=True) + overhead_s,
            least_backward_s=self._least(every, forward=False) + overhead_s,
            backward_s=self._least_of_most(senders, forward=False) + overhead_s,
            load_forward_s=load_forward_s,
            load_backward_s=load_backward_s,
            load_both_s=load_both_s,
        )

    def _least_of_most(self, ranks: frozenset[PiecesOfOne], forward: bool) -> Array:
        """The least, over ranks, of the longest of a rank's pieces."""
        return np.asarray(np.minimum.reduce([self._most(own, forward) for own in ranks]))

    def _most(self, own: PiecesOfOne, forward: bool) -> Array:
        return np.asarray(np.maximum.reduce([self._seconds(link, samples, forward) for link, samples in own]))

    def _least(self, own: PiecesOfOne, forward: bool) -> Array:
        return np.asarray(np.minimum.reduce([self._seconds(link, samples, forward) for link, samples in own]))

    @once
    def _seconds(self, link: str, samples: float, forward: bool) -> Array:
        crossings = self.prices.cuts.crossings
        per_sample = crossings.forward_bytes if forward else crossings.backward_bytes
        return transfer_s(self._links[link], per_sample * samples)


@once
def handovers_of(prices: GroupPrices) -> HandoverBounds:
    """Hand-overs between its groups, the same for all who ask."""
    return HandoverBounds(prices)
