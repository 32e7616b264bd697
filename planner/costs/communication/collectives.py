"""What sums over several ranks cost: measured tables, scaled by the theory of rings between and beyond them.

    ring over n ranks      R(n, x) = 2 (n - 1) t(x / n)        t: a message on the slowest link between neighbours
                           (Patarasuk and Yuan, 2009; ranks of a host follow one another, so that each host's card
                           carries one message each way at a time, however many ranks the host has)
    measured over n        read from its table, log-log
    not measured           T(n, x) = e(n, x) R(n, x): e = T / R of the measured world sizes, straight between the next
                           smaller and the next larger one, constant beyond; 1 where nothing was measured

Of tables of one world size those count whose ranks are on as many hosts, else those alike in having one rank a host or
several.  Two ranks exchange small sums in half the time of a ring: an e below 1 is not carried from 2 to more ranks.
Ignored: that other messages share the cables, and that the ranks compute at the same time.

What ranks compute around an exchange inside a stage comes on top, from the table of a group of one (``call_s``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise, permutations, product
from math import inf

import numpy as np
from numpy.typing import ArrayLike

from planner.costs.communication.tables import Array, last_slope, read_points, table_evidence, transfer_s
from planner.costs.layers.confidence import weakest
from planner.ir.cluster import (
    ALL_REDUCE,
    INTERPOLATED,
    MEASURED,
    MEMORY,
    NORMALISATION,
    PARTIAL_SUMS,
    STATISTICS,
    Cluster,
    Collective,
    Evidence,
    Link,
    RankIds,
)


def collective_s(cluster: Cluster, operation: str, ranks: RankIds, num_bytes: ArrayLike) -> Array:
    """Seconds of a collective of ``num_bytes`` a rank once all ``ranks`` have arrived; elementwise, 0 for nothing."""
    return group_collective(cluster, operation, ranks)(np.asarray(num_bytes, dtype=np.float64))


def group_collective(cluster: Cluster, operation: str, ranks: RankIds) -> Callable[[Array], Array]:
    """Seconds of a collective of ``ranks`` by bytes a rank, once all have arrived; elementwise, 0 for nothing."""
    if len(ranks) < 2:
        return np.zeros_like
    tables = _tables(cluster, operation, ranks)
    exact = _exact(cluster, tables, ranks)
    links = ring_links(cluster, ranks)

    def seconds(size: Array) -> Array:
        at = np.where(size > 0, size, 1.0)
        if exact:
            return np.where(size > 0, read_points(exact[0].points, at), 0.0)
        return np.where(size > 0, _ring_s(links, len(ranks), at) * _efficiency(tables, links, len(ranks), at), 0.0)

    return seconds


MANY_DEVICES = 64
"""Groups of more, beyond those that were measured, are looked at in steps of a power of two."""


def least_collective_s(cluster: Cluster, operation: str, num_bytes: ArrayLike) -> Array:
    """``[n, sizes]``: no group of n ranks or more takes less for a collective of that size, wherever they are.

    A group that no island or host can hold uses the links between them.  0 where links are stated pair by pair.
    """
    size = np.asarray(num_bytes, dtype=np.float64)
    most = len(cluster.devices)
    by_count = np.full((most + 2, len(size)), inf)
    if cluster.pairs:
        return np.zeros_like(by_count)
    largest = _largest_groups(cluster)
    for link, is_spread in product(cluster.links, (False, True)):
        tables = _tables_of(cluster, operation, link, is_spread)
        links = (cluster.links[link],)
        looked_at = set(_counts(tables, links[0], most))
        seconds = np.full(len(size), inf)
        for count in range(2, largest.get(link, most) + 1):
            if count in looked_at:
                by_ring = _ring_s(links, count, size) * _efficiency(tables, links, count, size)
                measured = (read_points(table.points, size) for table in tables if table.num_ranks == count)
                seconds = np.minimum.reduce([by_ring, *measured])
            by_count[count] = np.minimum(by_count[count], seconds)
    least: Array = np.minimum.accumulate(by_count[::-1])[::-1]
    return np.where((size > 0) & np.isfinite(least), least, 0.0)


_SIZES = np.geomspace(1.0, 1e13, 4000)


def most_sum_bytes_per_s(cluster: Cluster, tier: str) -> float:
    """No message between two devices whose link is of a tier is faster, and no sum puts more on a network card.

    A ring of n ranks puts x / n bytes in t(x / n) seconds there; a measured sum of e of its time (see above) 1 / e
    times that, where no e is less than at both ends of some stretch of sizes.  Infinity where sums were measured, and
    links are stated pair by pair.
    """
    link = cluster.links[tier]
    tables = [t for t in cluster.collectives if (t.operation, t.link) == (ALL_REDUCE, tier)]
    rates = [most_bytes_per_s(link)]
    for count, points in ((table.num_ranks, table.points) for table in tables if table.points):
        part = 2 * (count - 1) / count
        slope = last_slope(points)
        rates += [part * size / seconds for size, seconds in points]
        rates.append(part / slope if slope > 0 and not cluster.pairs else inf)
        if count > 2:
            ends = [
                *(float(size) for size, _ in points),
                *(n * float(size) for size, _ in link.points for n in (2, count)),
            ]
            sizes = np.unique([*_SIZES, *ends])
            ring_s = _ring_s((link,), count, sizes)
            sum_s = read_points(points, sizes)
            fastest = np.maximum.accumulate(sizes / 2 / transfer_s(link, sizes / 2))  # of a ring of any n
            inverse = np.maximum(ring_s[1:], ring_s[:-1]) / np.minimum(sum_s[1:], sum_s[:-1])
            rates.append(float(np.max(fastest[1:] * inverse)))
            rates.append(rates[0] * part / link.bandwidth_bytes_per_s / slope if slope > 0 else inf)
    return max(rates)


def most_bytes_per_s(link: Link) -> float:
    """No message is faster: in log-log between measured sizes, the fastest is one of them, or an endless one."""
    return max(link.bandwidth_bytes_per_s, *(size / seconds for size, seconds in link.points), 0.0)


def _largest_groups(cluster: Cluster) -> dict[str, int]:
    """By tier, how many ranks the largest of its groups has: islands, hosts, ..., all."""
    paths = [cluster.groups_of(rank) for rank in range(len(cluster.devices))]
    inner = [max(Counter(path[level] for path in paths).values()) for level in range(len(paths[0]))]
    sizes = (*inner, len(paths))
    return {tier.name: size for tier, size in zip(cluster.nested_tiers, sizes, strict=True)}


def _counts(tables: Sequence[Collective], link: Link, most: int) -> Iterator[int]:
    """World sizes such that no other takes less than the next smaller of them.

    Beyond what was measured a ring takes longer the more ranks it has, if no byte of a small message is cheaper than
    one of a large one; where that is not so, all sizes.
    """
    measured_up_to = max([MANY_DEVICES, *(table.num_ranks for table in tables)])
    each = [seconds / num_bytes for num_bytes, seconds in link.points]
    beyond = [*each, *([1 / link.bandwidth_bytes_per_s] if each else [])]
    grows = all(a >= b for a, b in pairwise(beyond))
    for count in range(2, most + 1):
        if count <= measured_up_to or not grows or count & (count - 1) == 0:
            yield count


def norm_s(cluster: Cluster, ranks: RankIds, num_bytes: ArrayLike) -> Array:
    """Seconds in which ``ranks`` share the statistics of a normalisation: their sum, and what each computes around it.

    Beside what the layer takes alone; elementwise, 0 for nothing.
    """
    summed_s = collective_s(cluster, STATISTICS, ranks, num_bytes)
    return summed_s + call_s(cluster, NORMALISATION, num_bytes) if len(ranks) > 1 else summed_s


def partial_sum_s(cluster: Cluster, ranks: RankIds, num_bytes: ArrayLike) -> Array:
    """Seconds in which ``ranks`` sum something small of which each has a part, and what each computes around it."""
    summed_s = collective_s(cluster, STATISTICS, ranks, num_bytes)
    return summed_s + call_s(cluster, PARTIAL_SUMS, num_bytes) if len(ranks) > 1 else summed_s


def call_s(cluster: Cluster, operation: str, num_bytes: ArrayLike) -> Array:
    """Seconds that a rank computes around an exchange of ``num_bytes``, elementwise; 0 for nothing, or if not known."""
    size = np.asarray(num_bytes, dtype=np.float64)
    table = next((t for t in cluster.collectives if t.operation == operation), None)
    return np.zeros_like(size) if table is None else np.where(size > 0, read_points(table.points, size), 0.0)


def memory_factor(cluster: Cluster, ranks: RankIds) -> float:
    """How many times as long a rank's passes over memory take where all of ``ranks`` make theirs at once.

    Such as updates of parameters that all have, or putting gradients together.  Of the host that most of them are on;
    straight between the numbers of ranks that were measured, 1 where none was.
    """
    points = sorted(
        (table.num_ranks, table.points[-1][1]) for table in cluster.collectives if table.operation == MEMORY
    )
    if len(points) < 2 or points[0][0] != 1:
        return 1.0
    most = max(Counter(cluster.devices[rank].host for rank in ranks).values(), default=1)
    seconds = np.interp(most, [number for number, _ in points], [seconds for _, seconds in points])
    return max(1.0, float(seconds) / points[0][1])


def collective_evidence(cluster: Cluster, operation: str, ranks: RankIds, num_bytes: float) -> Evidence:
    """How well :func:`collective_s` knows."""
    if len(ranks) < 2:
        return MEASURED
    exact = _exact(cluster, _tables(cluster, operation, ranks), ranks)
    if exact:
        return weakest(table_evidence(MEASURED, exact[0].points, num_bytes))
    return weakest((INTERPOLATED, *(link.evidence for link in ring_links(cluster, ranks))))


def _exact(cluster: Cluster, tables: Sequence[Collective], ranks: RankIds) -> list[Collective]:
    """Those that were measured on as many ranks and hosts."""
    return [table for table in tables if table.num_ranks == len(ranks) and _fits(cluster, table, ranks)]


def ring_links(cluster: Cluster, ranks: RankIds) -> tuple[Link, ...]:
    """The links that a ring over ``ranks`` waits for: those between hosts if there are several, each once."""
    members = sorted(ranks)  # as torch.distributed puts the ranks of a group
    return _links(cluster, ranks, zip(members, (*members[1:], members[0]), strict=True))


def group_links(cluster: Cluster, ranks: RankIds) -> tuple[Link, ...]:
    """The links between any two of ``ranks``: those between hosts if there are several, each once."""
    return _links(cluster, ranks, permutations(ranks, 2))


def num_hosts(cluster: Cluster, ranks: Sequence[int]) -> int:
    """How many hosts ``ranks`` are on."""
    return len({cluster.devices[rank].host for rank in ranks})


def _links(cluster: Cluster, ranks: RankIds, pairs: Iterable[tuple[int, int]]) -> tuple[Link, ...]:
    name = cluster.group_link_class(ranks)
    if not cluster.pairs:
        return (cluster.links[name],)
    links = [cluster.link(src, dst) for src, dst in pairs if cluster.link_class(src, dst) == name]
    return tuple(link for position, link in enumerate(links) if link not in links[:position])


def _ring_s(links: tuple[Link, ...], count: int, size: Array) -> Array:
    step_s: Array = np.maximum.reduce([transfer_s(link, size / count) for link in links])
    return 2 * (count - 1) * step_s


def _efficiency(tables: Sequence[Collective], links: tuple[Link, ...], count: int, size: Array) -> Array:
    """Measured over theoretical seconds, between the nearest world sizes that were measured."""
    below = max((table for table in tables if table.num_ranks <= count), key=_ranks, default=None)
    above = min((table for table in tables if table.num_ranks >= count), key=_ranks, default=None)
    if below is None and above is None:
        return np.ones_like(size)
    ends = [end for end in (below, above) if end is not None]
    ratios = [_against_ring(end, links, count, size) for end in ends]
    if len(ratios) == 1 or ends[0].num_ranks == ends[1].num_ranks:
        return ratios[0]
    share = (count - ends[0].num_ranks) / (ends[1].num_ranks - ends[0].num_ranks)
    return ratios[0] + (ratios[1] - ratios[0]) * share


def _against_ring(table: Collective, links: tuple[Link, ...], count: int, size: Array) -> Array:
    ratio: Array = read_points(table.points, size) / _ring_s(links, table.num_ranks, size)
    return np.maximum(ratio, 1.0) if table.num_ranks == 2 < count else ratio


def _tables(cluster: Cluster, operation: str, ranks: RankIds) -> list[Collective]:
    """Those of the operation on these links, of ranks spread alike if there are such."""
    return _tables_of(cluster, operation, cluster.group_link_class(ranks), num_hosts(cluster, ranks) == len(ranks))


def _tables_of(cluster: Cluster, operation: str, link: str, is_spread: bool) -> list[Collective]:
    tables = [t for t in cluster.collectives if (t.operation, t.link) == (operation, link) and t.points]
    if not tables and operation == STATISTICS:
        return _tables_of(cluster, ALL_REDUCE, link, is_spread)
    alike = [table for table in tables if (table.num_hosts in (0, table.num_ranks)) == is_spread]
    return alike or tables


def _fits(cluster: Cluster, table: Collective, ranks: RankIds) -> bool:
    return table.num_hosts in (0, num_hosts(cluster, ranks))


def _ranks(table: Collective) -> int:
    return table.num_ranks
