"""Clusters by name, with the links that tables measured: ``h100-dgx``, ``gb200-nvl72``, ...; any number of hosts.

Within a host messages and sums take what the tables say.  Across hosts each GPU has a network card: of its data sheet's
rate a message reaches as much as between DGX H100 (:data:`planner.extras.kernels.links.EFFICIENCY`).  A plan's
simulator gives a host one card, shared by what its ranks send at once: too slow where all eight send.  Hosts
that NVLink joins are one host to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.extras.catalogue.listing import device, link
from planner.extras.kernels.links import ALPHA_ACROSS_S, EFFICIENCY, SEND, Points, links
from planner.ir.cluster import (
    ACROSS_HOSTS,
    ALL_REDUCE,
    KERNELS,
    NCCL,
    WITHIN_HOST,
    Cluster,
    Collective,
    DeviceSpec,
    Link,
)
from planner.ir.errors import UnknownNameError, UsageError
from planner.ir.validation import MOST_DEVICES


@dataclass(frozen=True, slots=True)
class System:
    """Hosts of one make.

    Attributes:
        device: of the catalogue; ``per_host`` of them are on a host.
        tables: the system of :func:`planner.extras.kernels.links.links` that was measured.
        network: a link of the catalogue, one a device.
        domain: devices that NVLink joins, of several hosts; 0: those of one host.
    """

    device: str
    per_host: int
    tables: str
    network: str
    domain: int = 0


SYSTEMS: Mapping[str, System] = {
    "a100-dgx": System("A100-80GB", 8, "a100_dgx", "InfiniBand-HDR"),
    "h100-dgx": System("H100-SXM", 8, "h100_dgx", "InfiniBand-NDR"),
    "b200-dgx": System("B200", 8, "b200_dgx", "InfiniBand-NDR"),
    "b300-dgx": System("B300", 8, "b300_dgx", "InfiniBand-XDR"),
    "gb200-nvl72": System("GB200", 4, "gb200_nvl72", "InfiniBand-NDR", domain=72),
    "gb300-nvl72": System("GB300", 4, "gb300_nvl72", "InfiniBand-XDR", domain=72),
}


def cluster_of(name: str, num_devices: int = 0) -> Cluster:
    """Hosts of a system, with ``num_devices`` devices in all; 0: one host.

    Raises:
        UnknownNameError: there is no such system.
        UsageError: the devices fill no whole number of hosts, nor are they a part of one.
    """
    if name not in SYSTEMS:
        raise UnknownNameError(
            f"no system {name!r} is known",
            [f"known: {', '.join(SYSTEMS)}"],
            ["a cluster file of your own: docs/catalogue.md"],
        )
    system = SYSTEMS[name]
    joined = system.domain or system.per_host
    count = num_devices or system.per_host
    if (count > joined and count % joined) or not 0 < count <= MOST_DEVICES:
        size = f"{joined}: those that NVLink joins are one" if system.domain else f"{joined}"
        raise UsageError(
            f"{count} devices are no whole number of hosts of {name}",
            [f"a host has {size}"],
            [f"--workers {max(1, count // joined) * joined}"],
        )
    entry = device(system.device)
    peaks = {dtype: figure.value for dtype, figure in entry.peak_flop_per_s.items()}
    memory = entry.memory_bytes
    rate = entry.memory_bytes_per_s
    devices = tuple(
        DeviceSpec(
            f"n{rank // joined}/{entry.family}{rank % joined}",
            entry.name,
            f"n{rank // joined}",
            int(memory.value) if memory is not None else 0,
            peaks,
            rate.value if rate is not None else None,
            core_share=0.0,
        )
        for rank in range(count)
    )
    tables = links(system.tables).tables
    within = tables.get((SEND, 2, 2), tables[ALL_REDUCE, 2, 2])
    tier_links = {WITHIN_HOST: Link(within[0][1], _rate(within), _points(within), evidence=KERNELS, transport=NCCL)}
    if count > joined:
        tier_links[ACROSS_HOSTS] = Link(
            ALPHA_ACROSS_S, EFFICIENCY * link(system.network).bandwidth_bytes_per_s.value, transport=NCCL
        )
    sums = tuple(
        Collective(ALL_REDUCE, members, WITHIN_HOST, _points(points))
        for (what, members, per_host), points in sorted(tables.items())
        if what == ALL_REDUCE and members == per_host <= count
    )
    return Cluster(devices, tier_links, sums)


def _points(points: Points) -> tuple[tuple[int, float], ...]:
    return tuple((int(size), seconds) for size, seconds in points)


def _rate(points: Points) -> float:
    """Bytes a second of a long stream, by the last two sizes."""
    (size, seconds), (larger, longer) = points[-2:]
    return (larger - size) / (longer - seconds)
