"""Clusters by a few numbers, to plan published profiles on: like machines, hosts, mixed types.

Links are given by bandwidth alone, full duplex; an all-reduce is what the planner's ring makes of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from planner.ir.cluster import ACROSS_HOSTS, WITHIN_HOST, Cluster, DeviceSpec, Link

KIND = "gpu"
"""The kind of like machines."""

GIB = 2**30


def flat(
    machines: int, bandwidth_bytes_per_s: float, memory_bytes: int = 16 * GIB, latency_s: float = 0.0, kind: str = KIND
) -> Cluster:
    """Like machines, any two of them joined alike."""
    return mixed({kind: machines}, bandwidth_bytes_per_s, memory_bytes, latency_s)


def mixed(
    counts: Mapping[str, int], bandwidth_bytes_per_s: float, memory_bytes: int = 16 * GIB, latency_s: float = 0.0
) -> Cluster:
    """Machines of several kinds, any two of them joined alike; kinds in the order given."""
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    devices = tuple(
        DeviceSpec(f"n0/{kind}{kinds[:rank].count(kind)}", kind, "n0", memory_bytes) for rank, kind in enumerate(kinds)
    )
    return Cluster(devices, {WITHIN_HOST: Link(latency_s, bandwidth_bytes_per_s)})


def hosts(
    num_hosts: int,
    devices_per_host: int,
    within_bytes_per_s: float,
    across_bytes_per_s: float,
    memory_bytes: int = 16 * GIB,
    latency_s: float = 0.0,
    kind: str = KIND,
) -> Cluster:
    """Like hosts of like devices, with one link class inside a host and one across."""
    devices = tuple(
        DeviceSpec(f"n{host}/{kind}{device}", kind, f"n{host}", memory_bytes)
        for host in range(num_hosts)
        for device in range(devices_per_host)
    )
    links = {WITHIN_HOST: Link(latency_s, within_bytes_per_s), ACROSS_HOSTS: Link(latency_s, across_bytes_per_s)}
    return Cluster(devices, links)
