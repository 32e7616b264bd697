"""Seconds and bytes of what moves between two layers, for every pair of their options.

Which messages hide behind compute: a convolution's halo travels while its local part is computed.

The runtime starts the exchange, convolves what is there, and adds what the halo contributes; backward it computes the
rim first, sends it, and computes the rest meanwhile.  So a halo costs what exceeds the layer's own compute on its
slowest rank.  Everything else is waited for: other layers' halos, values that change their layout, partial sums.
What the ranks compute to exchange a tensor (``collectives.call_s``) hides behind nothing.  Ignored: of partial sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.costs.communication.collectives import Array, call_s, transfer_s
from planner.costs.communication.links import NetworkPrices
from planner.ir.cluster import PIECES, STANDING_BYTES, Cluster
from planner.ir.graph import BYTES_PER_ELEMENT
from planner.layers import is_convolution
from planner.layers.backward_halo import halo_of_dy
from planner.layers.boxes import Boxes, Counts, moved
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
        ways: ranks that share the input channels in the cheapest contraction (``costs.shards.contraction``).
    """

    forward_s: Array
    backward_s: Array
    received_bytes: Array
    standing_bytes: Array
    moved_bytes: Array
    is_halo: NDArray[np.bool_]
    ways: NDArray[np.int64]


def resharding_of(
    maker: Shards, reader: Shards, values: tuple[tuple[int, int], ...], ranks: tuple[int, ...], network: NetworkPrices
) -> Resharding:
    """What moves for ``values``: pairs (output of the maker, input of the reader)."""
    shape = (len(maker.options), len(reader.options))
    total = _Total(shape, len(ranks))
    in_space = np.ones(shape, dtype=bool)
    for output, position in values:
        spec = maker.sized.layer.outputs[output]
        element = BYTES_PER_ELEMENT[spec.dtype]
        passes = 2 if spec.is_float else 1
        owned = maker.owned[output]
        held = maker.held[output]
        in_space &= _lacks_space_alone(spec.dims, held, reader.wanted[position])
        ways = _contractions(reader) if position == 0 else None
        if ways is None:
            part = moved(owned, held, reader.wanted[position]) * element
            total.add(exchange_s(part, ranks, network), part, passes)
            continue
        number, needed, scattered, count = ways
        sums = scattered * BYTES_PER_ELEMENT[reader.sized.layer.outputs[0].dtype]
        part = moved(owned, held, needed) * element
        seconds = exchange_s(part, ranks, network) + exchange_s(sums, ranks, network)
        best = _cheapest(seconds, number, shape)
        rows = np.arange(shape[0])[:, None]
        total.add(seconds[rows, best], part[rows, best], passes)
        total.moved += sums.sum(axis=(-1, -2))[best]
        total.ways = count[best]
    grids = [
        [[(dim, len(points)) for dim, points in option.layout.cuts.items()] for option in layer.options]
        for layer in (maker, reader)
    ]
    alike = np.array([[a == b for b in grids[1]] for a in grids[0]]).reshape(shape)
    is_halo = alike & in_space & (total.ways == 1)
    if len(values) == 1 and values[0][1] == 0:
        element = BYTES_PER_ELEMENT[maker.sized.layer.outputs[values[0][0]].dtype]
        of_dy = BYTES_PER_ELEMENT[reader.sized.layer.outputs[0].dtype]
        for k, l in np.argwhere(is_halo & (total.moved > 0)):
            boxes = maker.held[values[0][0]][k], reader.wanted[0][l], reader.done[l]
            halo = halo_of_dy(reader.sized.layer, reader.sized.inputs[0], *boxes)
            if halo is not None and halo[1].sum() < total.moved[k, l] / element:
                total.seconds[1, k, l] = exchange_s(halo[1] * of_dy, ranks, network)
                total.standing[1, k, l] = _standing(halo[1] * of_dy)
    seconds = total.seconds
    standing = total.standing.sum(axis=0)
    return Resharding(seconds[0], seconds[1], total.received, standing, total.moved, is_halo, total.ways)


def scattered_s(shards: Shards, ranks: tuple[int, ...], network: NetworkPrices) -> Array:
    """``[options]``: partial sums of a contraction whose input no layer of the group makes; 0 where none is shared."""
    nothing = np.zeros((len(ranks), len(ranks)))
    pairs = zip(shards.options, shards.contractions, strict=True)
    scattered = [ways[0].scattered if ways and option.ways > 1 else nothing for option, ways in pairs]
    return exchange_s(np.array(scattered) * BYTES_PER_ELEMENT[shards.sized.layer.outputs[0].dtype], ranks, network)


def exchange_s(part: Counts, ranks: tuple[int, ...], network: NetworkPrices) -> Array:
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
    """Sums over the values that pass between two layers."""

    def __init__(self, shape: tuple[int, int], num_ranks: int) -> None:
        self.seconds = np.zeros((2, *shape))
        self.received = np.zeros((*shape, num_ranks))
        self.standing = np.zeros((2, *shape, num_ranks))
        self.moved = np.zeros(shape)
        self.ways = np.ones(shape, dtype=np.int64)

    def add(self, seconds: Array, part: Counts, passes: int) -> None:
        """One more value; its gradient returns if it has two passes."""
        self.seconds[:passes] += seconds
        self.received += part.sum(axis=-2)
        self.standing[:passes] += _standing(part)
        self.moved += part.sum(axis=(-1, -2))


def _standing(part: Counts) -> Array:
    """By rank: it keeps room for what comes, and what it sent, until the next exchange of these values."""
    small = np.where(part <= STANDING_BYTES, part, 0.0)
    return np.asarray(small.sum(axis=-2) + small.sum(axis=-1))


def _lacks_space_alone(dims: tuple[str, ...], held: Boxes, needed: Boxes) -> NDArray[np.bool_]:
    """``[options of the maker, options of the reader]``: whether every rank has all that it needs but for space."""
    others = [position for position, dim in enumerate(dims) if dim not in SPACE]
    there = held[:, None, :, others]
    wanted = needed[None, :, :, others]
    inside = (there[..., 0] <= wanted[..., 0]) & (wanted[..., 1] <= there[..., 1])
    empty = np.asarray(needed[..., 1] <= needed[..., 0]).any(axis=-1)
    return np.asarray((inside.all(axis=-1) | empty).all(axis=-1))


def _contractions(reader: Shards) -> tuple[NDArray[np.int64], Boxes, Counts, NDArray[np.int64]] | None:
    """Every way of every option: (option, needed, scattered, c); None if no option shares its input channels."""
    if not any(reader.contractions):
        return None
    wanted = reader.wanted[0]
    ranks = len(reader.own[0])
    rows = []
    for k, (option, ways) in enumerate(zip(reader.options, reader.contractions, strict=True)):
        if option.ways < 2 or not ways:
            rows.append((k, wanted[k], np.zeros((ranks, ranks)), 1))
        rows += [(k, way.needed, way.scattered, way.ways) for way in ways]
    number, needed, scattered, count = (np.array(column) for column in zip(*rows, strict=True))
    return number, needed, scattered, count


def _cheapest(seconds: Array, number: NDArray[np.int64], shape: tuple[int, int]) -> NDArray[np.intp]:
    """The cheapest way (by position in the flat list) for each pair of options; of equal ones the first."""
    cheapest = np.zeros(shape, dtype=np.intp)
    for k in range(shape[1]):
        rows = np.flatnonzero(number == k)
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
