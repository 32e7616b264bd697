"""Sums over several ranks, for the checker: a table, or a ring as much slower than theory as measured rings are."""

from __future__ import annotations

from collections.abc import Sequence

from planner.check.reading import delay_s, from_points, message_s
from planner.ir.cluster import ALL_REDUCE, Cluster, Collective


def sum_s(cluster: Cluster, operation: str, group: tuple[int, ...], size: float) -> float:
    """Seconds of a sum of ``size`` bytes a rank over ``group``, all of whose ranks are there."""
    if size <= 0 or len(group) < 2:
        return 0.0
    count, hosts = len(group), len({cluster.devices[rank].host for rank in group})
    tables = _tables(cluster, operation, group)
    for table in tables:
        if table.num_ranks == count and table.num_hosts in (0, hosts):
            return from_points(table.points, size)
    smaller = [table for table in tables if table.num_ranks <= count]
    larger = [table for table in tables if table.num_ranks >= count]
    ratio = 1.0
    if smaller:
        low = max(smaller, key=lambda table: table.num_ranks)
        ratio = _slowness(cluster, group, low, size)
    if larger:
        high = min(larger, key=lambda table: table.num_ranks)
        above = _slowness(cluster, group, high, size)
        if not smaller:
            ratio = above
        elif high.num_ranks > low.num_ranks:
            ratio += (above - ratio) * (count - low.num_ranks) / (high.num_ranks - low.num_ranks)
    return ratio * _ring_s(cluster, group, count, size)


def moving_s(cluster: Cluster, group: tuple[int, ...], size: int) -> float:
    """What the rank that loses most loses of its core by a sum: as much as by the messages of a ring."""
    around, moved = sorted(group), round(2 * (len(group) - 1) / len(group) * size)
    lost = [0.0] * len(around)
    for position, rank in enumerate(around):
        following = (position + 1) % len(around)
        link = cluster.link(rank, around[following])
        lost[position] += delay_s(link.sender_core, moved)
        lost[following] += delay_s(link.receiver_core, moved)
    return max(s * cluster.devices[rank].core_share for s, rank in zip(lost, around, strict=True))


def _slowness(cluster: Cluster, group: tuple[int, ...], table: Collective, size: float) -> float:
    found = from_points(table.points, size) / _ring_s(cluster, group, table.num_ranks, size)
    return max(1.0, found) if table.num_ranks == 2 and len(group) > 2 else found


def _ring_s(cluster: Cluster, group: tuple[int, ...], count: int, size: float) -> float:
    """Each rank hands on a part of ``size`` 2 (n - 1) times, to the next rank by number."""
    around = sorted(group)
    is_split = len({cluster.devices[rank].host for rank in group}) > 1
    slowest = 0.0
    for position, rank in enumerate(around):
        following = around[(position + 1) % len(around)]
        if not is_split or cluster.devices[rank].host != cluster.devices[following].host:
            slowest = max(slowest, message_s(cluster.link(rank, following), size / count))
    return 2 * (count - 1) * slowest


def _tables(cluster: Cluster, operation: str, group: tuple[int, ...]) -> Sequence[Collective]:
    hosts, link = {cluster.devices[rank].host for rank in group}, cluster.group_link_class(group)
    found = [each for each in cluster.collectives if each.operation == operation and each.link == link and each.points]
    if not found and operation != ALL_REDUCE:
        return _tables(cluster, ALL_REDUCE, group)
    one_a_host = len(hosts) == len(group)
    alike = [each for each in found if one_a_host == (each.num_hosts == 0 or each.num_hosts == each.num_ranks)]
    return alike if alike else found
