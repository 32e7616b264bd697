"""What collectives and messages between GPUs take: by tables of systems that were measured, else by alpha and beta.

    table       log-log between the two sizes around it; beyond the largest by the slope of the last two
    ring        t = alpha + f(collective, members) bytes / bus bandwidth       (NCCL's "bus bandwidth")
                all_reduce 2 (p - 1) / p; reduce_scatter, all_gather, all_to_all (p - 1) / p; broadcast, send 1

Bytes are those of the whole tensor: what all_reduce is given, what all_gather gives, what reduce_scatter is given.
Where no table has reduce_scatter or all_gather, they take half of the all_reduce of as many bytes, which moves twice as
much; the evidence says so.  A number of members that no table has is read off the nearest one of the same tier, by the
ring's factor.

Across hosts, the ranks of a host in a group share its network cards: ``per_host`` of the members are on each.  With a
stated network (``network_bytes_per_s``, one card a GPU as in a DGX), a ring uses the cards of its members alone.

Ignored: trees (latencies grow with the logarithm there), and what else the same cards carry at once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp, log

from planner.extras.kernels.estimates import DATASHEET, NOTHING, TABLE, Estimate
from planner.extras.kernels.tables import DATA, read_csv
from planner.ir.cluster import Cluster
from planner.ir.errors import CorruptFileError, UnknownNameError

ALL_REDUCE = "all_reduce"
ALL_TO_ALL = "all_to_all"
SEND = "send"
COLLECTIVES = (ALL_REDUCE, "reduce_scatter", "all_gather", ALL_TO_ALL, "broadcast", SEND)
_TABLE_NAMES = {"send_recv": SEND}
EFFICIENCY = 0.72
_DATASHEET_LOW = 0.75
_DATASHEET_HIGH = 1.6
"""Of a card's rate that a message of 64 MiB reached between DGX H100 (1.87 ms at 50 GB/s)."""
ALPHA_ACROSS_S = 20e-6
"""Least time of a message across hosts: 17 to 24 us in the tables."""
_TABLE_LOW = 0.92
_TABLE_HIGH = 1.1
_DERIVED_LOW = 0.75
_DERIVED_HIGH = 1.35

Points = tuple[tuple[float, float], ...]
TableKey = tuple[str, int, int]


def bus_factor(name: str, members: int) -> float:
    """Bytes that a member sends in a ring, by the byte of the whole tensor."""
    if name in (SEND, "broadcast"):
        return 1.0
    return (2 if name == ALL_REDUCE else 1) * (members - 1) / members


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """A tier by alpha and beta: seconds of the least message, bytes a second of one member in one direction."""

    alpha_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class SystemLinks:
    """A system's links.

    Attributes:
        tables: (bytes, seconds) by growing size, by (collective, members, members a host).
        within, across: tiers by alpha and beta, where there is no table, or where the user states one.
    """

    system: str
    tables: Mapping[TableKey, Points]
    within: AlphaBeta | None = None
    across: AlphaBeta | None = None

    def collective(self, name: str, num_bytes: float, members: int, per_host: int) -> Estimate:
        """One exchange on idle links.

        Args:
            name: one of :data:`COLLECTIVES`; a ``send`` has two members.
            num_bytes: of the whole tensor.
            members: ranks that take part.
            per_host: how many of them are on each host.

        Raises:
            UnknownNameError: there is no such collective.
            ValueError: the members are on no whole number of hosts.
        """
        if name not in COLLECTIVES:
            raise UnknownNameError(f"no collective {name!r}", [f"known: {', '.join(COLLECTIVES)}"])
        if members < 1 or per_host < 1 or members % per_host:
            raise ValueError(f"{members} members are not {per_host} on each of some hosts")
        if members == 1 or num_bytes <= 0:
            return NOTHING
        wire = self.within if members == per_host else self.across
        if wire is not None:
            return _by_wire(wire, name, num_bytes, members, per_host, self.within)
        points = self.tables.get((name, members, per_host))
        if points is not None:
            return _ranged(_at(points, num_bytes), TABLE, _TABLE_LOW, _TABLE_HIGH)
        return self._derived(name, num_bytes, members, per_host)

    def _derived(self, name: str, num_bytes: float, members: int, per_host: int) -> Estimate:
        """From the table of another number of members, or of another collective."""
        inside = members == per_host
        for other in (name, ALL_REDUCE, SEND):
            keys = [key for key in self.tables if key[0] == other and (key[1] == key[2]) == inside]
            if keys:
                key = min(keys, key=lambda key: (abs(log(key[2] / per_host)), abs(log(key[1] / members)), key))
                ratio = bus_factor(name, members) / bus_factor(other, key[1])
                seconds = _scaled(self.tables[key], num_bytes, ratio)
                what = "" if key[1:] == (members, per_host) and other == name else f", from {other} of {key[1]}"
                evidence = f"fitted{what}, of {self.system}"
                return _ranged(seconds, evidence, _DERIVED_LOW, _DERIVED_HIGH)
        tier = "within a host" if inside else "across hosts"
        raise UnknownNameError(
            f"no table of {self.system} says what {name} takes {tier}",
            [f"it has {', '.join(sorted({key[0] for key in self.tables})) or 'nothing'}"],
            ["give the network's rate: links(system, network_bytes_per_s=...), or a cluster file"],
        )


def links(
    system: str | Cluster, network_bytes_per_s: float | None = None, alpha_s: float = ALPHA_ACROSS_S
) -> SystemLinks:
    """The links of ``system``.

    Args:
        system: one of :func:`systems`; or a cluster, whose tiers within and across hosts count by their figures.
        network_bytes_per_s: of the network card of each GPU, which then counts across hosts in place of tables; of a
            card that several share, its share.
        alpha_s: of the least message across hosts, beside it.

    Raises:
        UnknownNameError: no table is of that system.
    """
    if isinstance(system, Cluster):
        return _of_cluster(system)
    tables = _tables()
    if system not in tables:
        raise UnknownNameError(f"no system {system!r} was measured", [f"known: {', '.join(tables)}"])
    measured_links = SystemLinks(system, tables[system])
    if network_bytes_per_s is None:
        return measured_links
    return replace(measured_links, across=AlphaBeta(alpha_s, network_bytes_per_s * EFFICIENCY))


def systems() -> tuple[str, ...]:
    """Those that were measured."""
    return tuple(_tables())


@functools.cache
def _tables() -> Mapping[str, Mapping[TableKey, Points]]:
    header, lines = read_csv(DATA / "collectives.csv.xz")
    wanted = {"system", "collective", "workers", "workers_per_host", "bytes", "median_ms"}
    if not wanted <= set(header):
        raise CorruptFileError("collectives.csv.xz is no table of collectives", [f"its columns: {', '.join(header)}"])
    tables: dict[str, dict[TableKey, list[tuple[float, float]]]] = {}
    for _, line in lines:
        name = _TABLE_NAMES.get(line["collective"], line["collective"])
        members = int(line["workers"])
        per_host = int(line["workers_per_host"])
        key = name, members, min(members, per_host)
        tables.setdefault(line["system"], {}).setdefault(key, []).append(
            (float(line["bytes"]), 1e-3 * float(line["median_ms"]))
        )
    return {system: {key: tuple(sorted(points)) for key, points in of.items()} for system, of in tables.items()}


def _of_cluster(cluster: Cluster) -> SystemLinks:
    """By the tiers of a cluster: that within a host, and the outermost one."""
    tiers = [tier.name for tier in cluster.nested_tiers if tier.name in cluster.links]
    within = cluster.links.get(cluster.host_tier)
    across = cluster.links.get(tiers[-1]) if tiers and tiers[-1] != cluster.host_tier else None
    wires = [
        AlphaBeta(link.latency_s, link.bandwidth_bytes_per_s * EFFICIENCY) if link is not None else None
        for link in (within, across)
    ]
    return SystemLinks("the cluster file", {}, *wires)


def _by_wire(
    wire: AlphaBeta, name: str, num_bytes: float, members: int, per_host: int, within: AlphaBeta | None
) -> Estimate:
    """A ring whose slowest part is ``wire``: the cards of ``per_host`` members a host carry it together."""
    cards = per_host if members > per_host and name != SEND else 1
    rate = wire.bytes_per_s * cards
    if within is not None and members > per_host > 1:
        rate = min(rate, within.bytes_per_s)
    steps = 1 if name == SEND else log(members, 2)
    seconds = wire.alpha_s * max(1.0, steps) + bus_factor(name, members) * num_bytes / rate
    return _ranged(seconds, DATASHEET, _DATASHEET_LOW, _DATASHEET_HIGH)


def _ranged(seconds: float, evidence: str, low: float, high: float) -> Estimate:
    return Estimate(seconds, seconds * low, seconds * high, evidence)


def _at(points: Points, num_bytes: float) -> float:
    """Read in log-log; below the least size its time, beyond the largest by the slope of the last two."""
    if num_bytes <= points[0][0]:
        return points[0][1]
    for (size, seconds), (larger, longer) in pairwise(points):
        if num_bytes <= larger:
            share = log(num_bytes / size) / log(larger / size)
            return exp(log(seconds) + share * log(longer / seconds))
    (size, seconds), (larger, longer) = points[-2:]
    slope = max((longer - seconds) / (larger - size), 0.5 * longer / larger)
    return longer + slope * (num_bytes - larger)


def _scaled(points: Points, num_bytes: float, ratio: float) -> float:
    """The time of a ring that moves ``ratio`` times as much, of which the least message's is not scaled."""
    least = points[0][1]
    return least + ratio * max(_at(points, num_bytes) - least, 0.0)
