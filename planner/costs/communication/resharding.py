"""Seconds and bytes of what moves between two layers, for every pair of their options.

A convolution overlaps its halo with computing: the runtime starts the exchange, convolves what is there, and adds what
the halo contributes; backward it computes the rim first, sends it, and computes the rest meanwhile.  So a halo costs
what exceeds the layer's own compute on its slowest rank.  Everything else is waited for: other layers' halos, values
that change their layout, partial sums.  What the ranks compute to exchange a tensor (``collectives.call_s``) overlaps
with nothing.  Ignored: that of partial sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.communication.collectives import call_s
from planner.costs.communication.links import NetworkPrices
from planner.costs.communication.tables import Array, transfer_s
from planner.ir.cluster import PIECES, STANDING_BYTES, Cluster, RankIds
from planner.ir.graph import BYTES_PER_ELEMENT
from planner.layers import is_convolution
from planner.layers.backward_halo import halo_of_dy
from planner.layers.boxes import BoxArray, Flags, moved
from planner.layers.shards import Shards
from planner.layers.sized import SPACE

_ROUNDING = 1e-9  # ways that differ by less are equally cheap


@dataclass(frozen=True, slots=True, eq=False)
class Resharding:
    """What moves from a layer to another, ``[options of the maker, options of the reader]``.

    Attributes:
        forward_s, backward_s: messages one way and their adjoint; of a convolution's halo backward that of dx or of
            dy, whichever is smaller (``layers.backward_halo``).
        received_bytes: ``[..., ranks]``: what each rank gets and keeps until the backward.
        standing_bytes: ``[..., ranks]``: what comes and what leaves, both ways, where receives stand ready for it.
        moved_bytes: in all, forward, partial sums included.
        is_halo: whether both layers are cut alike and ranks lack rows of space alone, so that what moves is a rim of
            each part (or nothing).
        ways: ranks that share the input channels in the cheapest contraction (:mod:`planner.layers.contraction`).
    """

    forward_s: Array
    backward_s: Array
    received_bytes: Array
    standing_bytes: Array
    moved_bytes: Array
    is_halo: Flags
    ways: NDArray[np.int64]


def resharding_of(
    maker: Shards, reader: Shards, values: tuple[tuple[int, int], ...], ranks: RankIds, network: NetworkPrices
) -> Resharding:
    """What moves for ``values``: pairs (output of the maker, input of the reader)."""
    total = _Total(maker, reader, ranks, network)
    for output, position in values:
        total.add(output, position)
    is_halo = _cut_alike(maker, reader) & total.in_space & (total.ways == 1)
    if len(values) == 1 and values[0][1] == 0:
        total.take_halo_of_dy(values[0][0], is_halo)
    forward_s, backward_s = total.seconds
    standing = total.standing.sum(axis=0)
    return Resharding(forward_s, backward_s, total.received, standing, total.moved, is_halo, total.ways)


def scattered_s(shards: Shards, ranks: RankIds, network: NetworkPrices) -> Array:
    """``[options]``: partial sums of a contraction whose input no layer of the group makes; 0 where none is shared."""
    nothing = np.zeros((len(ranks), len(ranks)))
    pairs = zip(shards.options, shards.contractions, strict=True)
    scattered = [ways[0].scattered if ways and option.ways > 1 else nothing for option, ways in pairs]
    return exchange_s(np.array(scattered) * BYTES_PER_ELEMENT[shards.sized.layer.outputs[0].dtype], ranks, network)


def exchange_s(part: Array, ranks: RankIds, network: NetworkPrices) -> Array:
    """Seconds until all messages have arrived, ``[...]``.

    A rank's messages follow one another; it receives while it sends where the link is duplex.

    Args:
        part: ``[..., source, destination]`` bytes.
    """
    num_ranks = len(ranks)
    shape = part.shape[:-2]
    flat = np.ascontiguousarray(part).ravel()
    at = np.flatnonzero(flat > 0)
    choice, pair = np.divmod(at, num_ranks**2)
    src, dst = np.divmod(pair, num_ranks)
    links, classes = network.classes(ranks)
    seconds = np.zeros(len(at))
    of_class = classes[src, dst]
    duplex = True
    for number, link in enumerate(links):
        duplex = duplex and link.duplex
        chosen = of_class == number
        seconds[chosen] = transfer_s(link, flat[at[chosen]])
    count = int(np.prod(shape, dtype=np.int64)) * num_ranks
    sent, received = (
        np.bincount(choice * num_ranks + rank, seconds, count).reshape(*shape, num_ranks) for rank in (src, dst)
    )
    busy = np.maximum(sent, received) if duplex else sent + received
    slowest: Array = busy.max(axis=-1)
    return slowest


class _Total:
    """Sums over the values that pass from a layer to another, as of :class:`Resharding`.

    Attributes:
        seconds, standing: forward, then backward.
        in_space: whether ranks lack rows of space alone.
    """

    def __init__(self, maker: Shards, reader: Shards, ranks: RankIds, network: NetworkPrices) -> None:
        shape = (len(maker.options), len(reader.options))
        self.maker = maker
        self.reader = reader
        self.ranks = ranks
        self.network = network
        self.seconds = np.zeros((2, *shape))
        self.received = np.zeros((*shape, len(ranks)))
        self.standing = np.zeros((2, *shape, len(ranks)))
        self.moved = np.zeros(shape)
        self.ways = np.ones(shape, dtype=np.int64)
        self.in_space = np.ones(shape, dtype=bool)

    def add(self, output: int, position: int) -> None:
        """One more value; an option that shares its channels takes the cheapest way to do so."""
        spec = self.maker.sized.layer.outputs[output]
        passes = 2 if spec.is_float else 1  # its gradient returns
        wanted = self.reader.wanted[position]
        self.in_space &= _lacks_space_alone(spec.dims, self.maker.held[output], wanted)
        ways = _contractions(self.reader) if position == 0 else None
        part = self._bytes_moved(output, wanted if ways is None else ways.needed)
        seconds = self._exchange_s(part)
        if ways is None:
            self._add(seconds, part, passes)
            return
        sums = ways.scattered * BYTES_PER_ELEMENT[self.reader.sized.layer.outputs[0].dtype]
        seconds = seconds + self._exchange_s(sums)
        best = _cheapest(seconds, ways.options, self.moved.shape)
        rows = np.arange(len(best))[:, None]
        self._add(seconds[rows, best], part[rows, best], passes)
        self.moved += sums.sum(axis=(-1, -2))[best]
        self.ways = ways.counts[best]

    def take_halo_of_dy(self, output: int, is_halo: Flags) -> None:
        """That of dy backward, where it is smaller than that of dx; ``output`` is all that moves."""
        element = BYTES_PER_ELEMENT[self.maker.sized.layer.outputs[output].dtype]
        layer = self.reader.sized.layer
        for k, l in np.argwhere(is_halo & (self.moved > 0)):
            boxes = self.maker.held[output][k], self.reader.wanted[0][l], self.reader.done[l]
            halo = halo_of_dy(layer, self.reader.sized.inputs[0], *boxes)
            if halo is not None and halo[1].sum() < self.moved[k, l] / element:
                part = halo[1] * BYTES_PER_ELEMENT[layer.outputs[0].dtype]
                self.seconds[1, k, l] = self._exchange_s(part)
                self.standing[1, k, l] = _standing(part)

    def _bytes_moved(self, output: int, needed: BoxArray) -> Array:
        spec = self.maker.sized.layer.outputs[output]
        return moved(self.maker.owned[output], self.maker.held[output], needed) * BYTES_PER_ELEMENT[spec.dtype]

    def _exchange_s(self, part: Array) -> Array:
        return exchange_s(part, self.ranks, self.network)

    def _add(self, seconds: Array, part: Array, passes: int) -> None:
        self.seconds[:passes] += seconds
        self.received += part.sum(axis=-2)
        self.standing[:passes] += _standing(part)
        self.moved += part.sum(axis=(-1, -2))


def _standing(part: Array) -> Array:
    """By rank: it keeps room for what comes, and what it sent, until the next exchange of these values."""
    small = np.where(part <= STANDING_BYTES, part, 0.0)
    return np.asarray(small.sum(axis=-2) + small.sum(axis=-1))


def _lacks_space_alone(dims: tuple[str, ...], held: BoxArray, needed: BoxArray) -> Flags:
    """``[options of the maker, options of the reader]``: whether every rank has all that it needs but for space."""
    others = [position for position, dim in enumerate(dims) if dim not in SPACE]
    there = held[:, None, :, others]
    wanted = needed[None, :, :, others]
    inside = (there[..., 0] <= wanted[..., 0]) & (wanted[..., 1] <= there[..., 1])
    empty = np.asarray(needed[..., 1] <= needed[..., 0]).any(axis=-1)
    return np.asarray((inside.all(axis=-1) | empty).all(axis=-1))


def _cut_alike(maker: Shards, reader: Shards) -> Flags:
    """``[options of the maker, options of the reader]``: whether both cut the same dims into as many parts."""
    makers, readers = (
        [[(dim, len(points)) for dim, points in option.layout.cuts.items()] for option in layer.options]
        for layer in (maker, reader)
    )
    return np.array([[a == b for b in readers] for a in makers])


class _Contracted(NamedTuple):
    """All ways to contract an input, of all options of its reader one after another; ``counts``: ranks that share it.

    Attributes:
        options: ``[ways]``, by number.
        needed: ``[ways, ranks, dims, 2]``.
        scattered: ``[ways, source, destination]`` elements of partial sums.
    """

    options: NDArray[np.int64]
    needed: BoxArray
    scattered: Array
    counts: NDArray[np.int64]


def _contractions(reader: Shards) -> _Contracted | None:
    """Those of its first input; None if no option shares its input channels."""
    if not any(reader.contractions):
        return None
    wanted = reader.wanted[0]
    ranks = len(reader.own[0])
    rows = []
    for k, (option, ways) in enumerate(zip(reader.options, reader.contractions, strict=True)):
        if option.ways < 2 or not ways:
            rows.append((k, wanted[k], np.zeros((ranks, ranks)), 1))
        rows += [(k, way.needed, way.scattered, way.ways) for way in ways]
    return _Contracted(*(np.array(column) for column in zip(*rows, strict=True)))


def _cheapest(seconds: Array, options: NDArray[np.int64], shape: tuple[int, ...]) -> NDArray[np.intp]:
    """The cheapest way (by position in the flat list) for each pair of options; of equal ones the first."""
    cheapest = np.zeros(shape, dtype=np.intp)
    for k in range(shape[1]):
        rows = np.flatnonzero(options == k)
        least = seconds[:, rows].min(axis=1, keepdims=True)
        cheapest[:, k] = rows[np.argmax(seconds[:, rows] <= least * (1 + _ROUNDING), axis=1)]
    return cheapest


def exposed(
    resharding: Resharding, kind: str, forward_s: Array, backward_s: Array, cluster: Cluster
) -> tuple[Array, Array]:
    """Seconds that ranks wait for it, forward and backward, ``[options of the maker, options of the reader]``.

    Args:
        kind: of the reader.
        forward_s, backward_s: the reader's compute, ``[options, ranks]``.
    """
    calls_s = call_s(cluster, PIECES, resharding.received_bytes.max(axis=-1))
    hides = resharding.is_halo & is_convolution(kind)  # which computes while its halo travels
    pairs = ((resharding.forward_s, forward_s), (resharding.backward_s, backward_s))
    forward, backward = (
        np.where(hides, np.maximum(0.0, moved - computing.max(axis=-1)[None, :]), moved)
        + np.where(moved > 0, calls_s, 0.0)
        for moved, computing in pairs
    )
    return forward, backward
