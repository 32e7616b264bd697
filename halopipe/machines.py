"""Clusters with one thing changed: more devices, more hosts, a faster link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planner.ir.cluster import ACROSS_HOSTS, DATASHEET, WITHIN_HOST, Cluster, Collective, DeviceSpec, Link
from planner.ir.errors import UsageError

Points = tuple[tuple[int, float], ...]


def with_devices(cluster: Cluster, count: int) -> Cluster:
    """The first ``count`` devices; further ones are like the last, and on its host."""
    devices = list(cluster.devices[:count])
    while len(devices) < count:
        devices.append(one_more(devices, devices[-1]))
    return _linked(replace(cluster, devices=tuple(devices)))


def with_hosts(cluster: Cluster, count: int) -> Cluster:
    """The first ``count`` hosts; further ones are like the last.

    Raises:
        UsageError: nothing is known of a link that these machines need.
    """
    hosts = list(dict.fromkeys(device.host for device in cluster.devices))
    devices = [device for device in cluster.devices if device.host in hosts[:count]]
    last = [device for device in cluster.devices if device.host == hosts[-1]]
    while len(hosts) < count:
        name = _next_name(hosts[-1], hosts)
        hosts.append(name)
        devices += [replace(device, name=f"{name}/{device.name.rpartition('/')[2]}", host=name) for device in last]
    return _linked(replace(cluster, devices=tuple(devices)))


def with_one_more(cluster: Cluster, kind: str) -> Cluster:
    """One more device of ``kind``, on the last host that has one, after all others."""
    like = [device for device in cluster.devices if device.kind == kind][-1]
    return _linked(replace(cluster, devices=(*cluster.devices, one_more(cluster.devices, like))))


def one_more(devices: tuple[DeviceSpec, ...] | list[DeviceSpec], like: DeviceSpec) -> DeviceSpec:
    """A device like ``like``, with a name of its own."""
    return replace(like, name=_next_name(like.name, [device.name for device in devices]))


def with_link(
    cluster: Cluster, name: str, *, bandwidth_bytes_per_s: float | None = None, latency_s: float | None = None
) -> Cluster:
    """The cluster with another bandwidth or latency of a link; tables measured on it are changed alike.

    A measured time is split in the latency and the rest, which goes with the bandwidth.  Links that are stated for
    pairs of hosts change with their class, by the same factor and to the same latency.  What the cores do for a message
    stays: it is copied as before.
    """
    old = cluster.links[name]
    least_s = _least_s(old)
    new_s = latency_s if latency_s is not None else least_s
    ratio = old.bandwidth_bytes_per_s / bandwidth_bytes_per_s if bandwidth_bytes_per_s is not None else 1.0

    def scaled(points: Points, messages: int, before_s: float = least_s) -> Points:
        now_s = before_s if latency_s is None else new_s
        return tuple(
            (size, messages * now_s + max(0.0, seconds - messages * before_s) * ratio) for size, seconds in points
        )

    def changed(link: Link) -> Link:
        return replace(
            link,
            latency_s=latency_s if latency_s is not None else link.latency_s,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / ratio,
            points=scaled(link.points, 1, _least_s(link)),
            evidence=DATASHEET,
        )

    collectives = tuple(
        replace(found, points=scaled(found.points, 2 * (found.num_ranks - 1))) if found.link == name else found
        for found in cluster.collectives
    )
    return replace(_with_links(cluster, name, changed), collectives=collectives)


def with_faster_link(cluster: Cluster, name: str, times: float) -> Cluster:
    """The cluster with everything on a link ``times`` as fast; what the cores do for a message stays."""

    def faster(link: Link) -> Link:
        return replace(
            link,
            latency_s=link.latency_s / times,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * times,
            points=tuple((size, seconds / times) for size, seconds in link.points),
            evidence=DATASHEET,
        )

    collectives = tuple(_faster(found, times) if found.link == name else found for found in cluster.collectives)
    return replace(_with_links(cluster, name, faster), collectives=collectives)


def _with_links(cluster: Cluster, name: str, changed: Callable[[Link], Link]) -> Cluster:
    """The cluster with the links of a class changed, also those stated for pairs of hosts."""
    pairs = tuple(
        replace(pair, link=changed(pair.link)) if (pair.src_host == pair.dst_host) == (name == WITHIN_HOST) else pair
        for pair in cluster.pairs
    )
    return replace(cluster, links={**cluster.links, name: changed(cluster.links[name])}, pairs=pairs)


def _least_s(link: Link) -> float:
    return min(link.latency_s, link.points[0][1]) if link.points else link.latency_s


def _faster(collective: Collective, times: float) -> Collective:
    return replace(collective, points=tuple((size, seconds / times) for size, seconds in collective.points))


def _linked(cluster: Cluster) -> Cluster:
    hosts = [device.host for device in cluster.devices]
    needed = {WITHIN_HOST: len(set(hosts)) < len(hosts), ACROSS_HOSTS: len(set(hosts)) > 1}
    missing = [name for name, is_needed in needed.items() if is_needed and name not in cluster.links]
    if missing:
        raise UsageError(
            f"nothing is known of the link {missing[0]}, which these machines need",
            [f"{len(set(hosts))} hosts, {len(hosts)} devices; links: {', '.join(cluster.links) or 'none'}"],
            ["describe the machines in a cluster file: --cluster cluster.yaml"],
        )
    return cluster


def _next_name(name: str, taken: list[str]) -> str:
    """``n0/gpu3`` -> ``n0/gpu4``, or the first that is free after it."""
    stem = name.rstrip("0123456789")
    number = int(name[len(stem) :] or 0)
    while f"{stem}{number}" in taken:
        number += 1
    return f"{stem}{number}"
