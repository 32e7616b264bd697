"""What messages and collectives cost on the cluster's links.

Measured tables are read in log-log (straight-line fits err by 11-43 % between small and large messages): below the
first point its time (latency), beyond the last the last slope.  A link without a table costs latency + bytes /
bandwidth; an all-reduce over ranks that nobody measured is a ring of 2 (n - 1) messages of 1/n of the bytes (Patarasuk
and Yuan, 2009).  Ignored: that several pairs of ranks share a cable, and that compute slows while data moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.costs.evidence import weakest
from planner.ir.cluster import ALL_REDUCE, INTERPOLATED, MEASURED, STATISTICS, Cluster, Collective, Evidence, Link

Points = Sequence[tuple[int, float]]


def transfer_s(link: Link, num_bytes: ArrayLike) -> NDArray[np.float64]:
    """Seconds from the start of a message of ``num_bytes`` to its arrival; elementwise, 0 for nothing."""
    size = np.asarray(num_bytes, dtype=np.float64)
    if link.points:
        seconds = read_points(link.points, size)
    else:
        seconds = link.latency_s + size / link.bandwidth_bytes_per_s
    return np.where(size > 0, seconds, 0.0)


def collective_s(cluster: Cluster, operation: str, ranks: tuple[int, ...], num_bytes: ArrayLike) -> NDArray[np.float64]:
    """Seconds of a collective of ``num_bytes`` a rank once all ``ranks`` have arrived; elementwise, 0 for nothing."""
    size = np.asarray(num_bytes, dtype=np.float64)
    if len(ranks) < 2:
        return np.zeros_like(size)
    table = _table(cluster, operation, ranks)
    if table is not None:
        return np.where(size > 0, read_points(table.points, size), 0.0)
    link = cluster.links[cluster.group_link_class(ranks)]
    return 2 * (len(ranks) - 1) * transfer_s(link, size / len(ranks))


def read_points(points: Points, size: NDArray[np.float64]) -> NDArray[np.float64]:
    """Log-log reading of (bytes, seconds) by growing bytes; clamped below, by the last slope beyond."""
    x = np.log([float(at) for at, _ in points])
    y = np.log([seconds for _, seconds in points])
    at = np.log(np.maximum(size, points[0][0]))
    inside = np.interp(at, x, y)
    slope = max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2])) if len(points) > 1 else 1.0
    return np.asarray(np.exp(inside + np.maximum(at - x[-1], 0.0) * slope))


@dataclass(slots=True, eq=False)
class Network:
    """The cluster's prices, each looked up once, and how well they are known."""

    cluster: Cluster
    _classes: dict[tuple[int, ...], tuple[tuple[str, ...], NDArray[np.int64]]] = field(default_factory=dict, repr=False)
    _transfers: dict[tuple[str, int], float] = field(default_factory=dict, repr=False)
    _collectives: dict[tuple[str, tuple[int, ...], int], float] = field(default_factory=dict, repr=False)

    def transfer_s(self, src: int, dst: int, num_bytes: int) -> float:
        """Seconds of a message between two ranks."""
        name = self.cluster.link_class(src, dst)
        found = self._transfers.get((name, num_bytes))
        if found is None:
            found = self._transfers[name, num_bytes] = float(transfer_s(self.cluster.links[name], num_bytes))
        return found

    def classes(self, ranks: tuple[int, ...]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
        """Names of the links between ``ranks``, and for each pair which of them it is (-1: a rank itself)."""
        found = self._classes.get(ranks)
        if found is None:
            by_pair = [["" if a == b else self.cluster.link_class(a, b) for b in ranks] for a in ranks]
            names = tuple(sorted({name for row in by_pair for name in row if name}))
            numbers = np.array([[names.index(name) if name else -1 for name in row] for row in by_pair])
            found = self._classes[ranks] = (names, numbers)
        return found

    def all_reduce_s(self, ranks: tuple[int, ...], num_bytes: int) -> float:
        """Seconds of an all-reduce of ``num_bytes`` over ``ranks``, once all are there."""
        key = (self.cluster.group_link_class(ranks), ranks, num_bytes)
        found = self._collectives.get(key)
        if found is None:
            found = self._collectives[key] = float(collective_s(self.cluster, ALL_REDUCE, ranks, num_bytes))
        return found

    def duplex(self, src: int, dst: int) -> bool:
        """Whether both directions between two ranks run at once."""
        return self.cluster.link(src, dst).duplex

    def transfer_evidence(self, src: int, dst: int, num_bytes: int) -> Evidence:
        """How well :meth:`transfer_s` knows."""
        link = self.cluster.link(src, dst)
        return _evidence(link.evidence, link.points, num_bytes)

    def all_reduce_evidence(self, ranks: tuple[int, ...], num_bytes: int) -> Evidence:
        """How well :meth:`all_reduce_s` knows."""
        if len(ranks) < 2:
            return MEASURED
        table = _table(self.cluster, ALL_REDUCE, ranks)
        if table is not None:
            return _evidence(MEASURED, table.points, num_bytes)
        return weakest((INTERPOLATED, self.cluster.links[self.cluster.group_link_class(ranks)].evidence))


def _table(cluster: Cluster, operation: str, ranks: tuple[int, ...]) -> Collective | None:
    link = cluster.group_link_class(ranks)
    matching = (
        found
        for found in cluster.collectives
        if (found.operation, found.num_ranks, found.link) == (operation, len(ranks), link) and found.points
    )
    table = next(matching, None)
    if table is None and operation == STATISTICS:
        return _table(cluster, ALL_REDUCE, ranks)
    return table


def _evidence(evidence: Evidence, points: Points, num_bytes: int) -> Evidence:
    """A reading inside a measured table is as good as the table; beyond it, it is not."""
    beyond = bool(points) and num_bytes > points[-1][0]
    return weakest((evidence, INTERPOLATED)) if beyond else evidence
