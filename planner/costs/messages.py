"""Seconds and bytes of what moves between two layers, for every pair of their options."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.costs.boxes import Boxes, Counts, moved
from planner.costs.network import Network, transfer_s
from planner.costs.shards import Shards
from planner.ir.graph import BYTES_PER_ELEMENT

Array = NDArray[np.float64]

_ROUNDING = 1e-9  # ways that differ by less are equally cheap


@dataclass(frozen=True, slots=True, eq=False)
class Crossing:
    """What moves from a layer to another, ``[options of the maker, options of the reader]``.

    Attributes:
        forward_s, backward_s: messages one way and their adjoint.
        received_bytes: ``[..., ranks]``: what each rank gets and keeps until the backward.
        moved_bytes: in all, forward, partial sums included.
        is_halo: whether both layers are cut alike, so that what moves is a rim of each part (or nothing).
        ways: ranks that share the input channels in the cheapest contraction (``costs.contraction``).
    """

    forward_s: Array
    backward_s: Array
    received_bytes: Array
    moved_bytes: Array
    is_halo: NDArray[np.bool_]
    ways: NDArray[np.int64]


def crossing(
    maker: Shards, reader: Shards, values: tuple[tuple[int, int], ...], ranks: tuple[int, ...], network: Network
) -> Crossing:
    """What moves for ``values``: pairs (output of the maker, input of the reader)."""
    shape = (len(maker.options), len(reader.options))
    total = _Total(shape, len(ranks))
    for output, position in values:
        spec = maker.sized.layer.outputs[output]
        element = BYTES_PER_ELEMENT[spec.dtype]
        passes = 2 if spec.is_float else 1
        owned, held = maker.owned[output], maker.held[output]
        ways = _contractions(reader) if position == 0 else None
        if ways is None:
            part = moved(owned, held, reader.needed[position]) * element
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
    grids = [[option.grid for option in layer.options] for layer in (maker, reader)]
    alike = np.array([[a == b for b in grids[1]] for a in grids[0]]).reshape(shape)
    return Crossing(
        total.seconds[0], total.seconds[1], total.received, total.moved, alike & (total.ways == 1), total.ways
    )


def exchange_s(part: Counts, ranks: tuple[int, ...], network: Network) -> Array:
    """Seconds until all messages have arrived, ``[...]``.

    A rank's messages follow one another; it receives while it sends where the link is duplex.

    Args:
        part: ``[..., source, destination]`` bytes.
    """
    seconds = np.zeros_like(part)
    cluster = network.cluster
    classes = np.array([[cluster.link_class(a, b) for b in ranks] for a in ranks])
    duplex = True
    for name in sorted({str(c) for c in classes[~np.eye(len(ranks), dtype=bool)]}):
        link = cluster.links[name]
        chosen = (part > 0) & (classes == name)
        duplex = duplex and link.duplex
        if chosen.any():
            seconds[chosen] = transfer_s(link, part[chosen])
    sent, received = seconds.sum(axis=-1), seconds.sum(axis=-2)
    busy = np.maximum(sent, received) if duplex else sent + received
    found: Array = busy.max(axis=-1)
    return found


class _Total:
    """Sums over the values that pass between two layers."""

    def __init__(self, shape: tuple[int, int], num_ranks: int) -> None:
        self.seconds = np.zeros((2, *shape))
        self.received = np.zeros((*shape, num_ranks))
        self.moved = np.zeros(shape)
        self.ways = np.ones(shape, dtype=np.int64)

    def add(self, seconds: Array, part: Counts, passes: int) -> None:
        """One more value; its gradient returns if it has two passes."""
        self.seconds[:passes] += seconds
        self.received += part.sum(axis=-2)
        self.moved += part.sum(axis=(-1, -2))


def _contractions(reader: Shards) -> tuple[NDArray[np.int64], Boxes, Counts, NDArray[np.int64]] | None:
    """Every way of every option: (option, needed, scattered, c); None if each option has one way."""
    if all(len(ways) < 2 for ways in reader.contractions):
        return None
    flat = [
        (k, way.needed, way.scattered, way.ways) if way else (k, reader.needed[0][k], None, 1)
        for k, ways in enumerate(reader.contractions)
        for way in (ways or (None,))
    ]
    ranks = reader.needed[0].shape[1]
    nothing = np.zeros((ranks, ranks))
    return (
        np.array([row[0] for row in flat]),
        np.array([row[1] for row in flat]),
        np.array([nothing if row[2] is None else row[2] for row in flat]),
        np.array([row[3] for row in flat]),
    )


def _cheapest(seconds: Array, number: NDArray[np.int64], shape: tuple[int, int]) -> NDArray[np.intp]:
    """The cheapest way (by position in the flat list) for each pair of options; of equal ones the first."""
    found = np.zeros(shape, dtype=np.intp)
    for k in range(shape[1]):
        rows = np.flatnonzero(number == k)
        least = seconds[:, rows].min(axis=1, keepdims=True)
        found[:, k] = rows[np.argmax(seconds[:, rows] <= least * (1 + _ROUNDING), axis=1)]
    return found
