"""What messages and sums cost between workers, over the transport of a run, pinned as a run pins them.

    within a host     the first two ranks of the first host that has two
    across hosts      the first ranks of each two hosts: a glance at all of them, and in full the pair in the middle,
                      which stands for the class, and every pair that differs from it by more than a tenth
    calls             what a rank computes around exchanges, without a peer (:mod:`profiler.links.calls`)
    sums              over 2 ... n ranks of the host that has most; over one rank each of 2 ... n hosts; and over all
                      ranks, where hosts have several.  Of many, powers of two and n.

:func:`profiler.links.processes.measure_links` spawns the workers of this host; ranks that have opened a transport call
:func:`measure_together`.

What sums over groups of ranks cost: of gradients, and of statistics between two operators.

Both are those of a run: sums of gradients are started and waited for, statistics are rows that ranks tell each other
(:mod:`runtime.transport.small_allgather`).

Sums of statistics happen between two operators.  Then ranks do not arrive together, and over gloo a thread that slept
must be woken on a core that computes: on a virtual machine such a sum took 2.5 ms where the same sum alone took 0.2.
Hence they are measured amid computation, and their mean counts, not the median: waits come in two sizes, and a step has
both.  What is computed is a fixed number of convolutions over more data than a core's own caches hold
(:class:`profiler.links.calls.Burst`): so ranks are as late as layers scatter, and the exchange finds the caches as it
does in a step.  Behind products of one small matrix, for so long by the clock, a sum in shared memory took 55 us,
behind such convolutions 75-110, in a step of ResNet-50 about as long (the same sum again and again: 30).
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from cuda_ops._torch import FileStore
from planner.ir.cluster import ALL_REDUCE, MEMORY, STATISTICS, Collective, Link, PairLink, host_tier
from profiler.links.calls import Burst, exchange_calls
from profiler.links.host_pairs import measure_across, measure_fully, rounded
from profiler.links.messages import FULL, LEAST_LAST_BYTES, QUICK, LinkEffort, LinkPoints, medians
from profiler.links.processes import SILENCE_S, LinkCosts, groups_of
from profiler.measure.child_process import Report
from runtime.transport import Transport, open_named
from runtime.transport.small_allgather import RowGather, Tell

if TYPE_CHECKING:
    from cuda_ops._torch import Store


SIZES = tuple(1024 * 4**power for power in range(9))  # 1 KiB ... 64 MiB
STATISTICS_SIZES = tuple(1024 * 4**power for power in range(5))  # 1 KiB ... 256 KiB
_ELEMENT_BYTES = 4
_MEMORY_BYTES = 64 << 20
_MEMORY_RUNS = 3


def gradients(transport: Transport, ranks: tuple[int, ...], effort: LinkEffort) -> LinkPoints:
    """(bytes, seconds) of sums that nothing else runs beside; least of the medians of some rounds."""
    times: dict[int, float] = {}
    for size in SIZES:
        times[size] = _median_s(transport, ranks, size, effort)
        if _agreed(transport, ranks, times[size]) > effort.longest_s and size >= LEAST_LAST_BYTES:
            break
    for _ in range(1, effort.rounds):
        for size in times:
            times[size] = min(times[size], _median_s(transport, ranks, size, effort))
    return tuple(times.items())


def of_statistics(transport: Transport, ranks: tuple[int, ...], effort: LinkEffort) -> LinkPoints:
    """(bytes, mean seconds) of sums that follow computation, the waits for late ranks included."""
    times: dict[int, float] = {}
    burst = Burst()
    burst.number = round(_agreed(transport, ranks, float(burst.number)))
    for _ in range(effort.rounds):
        for number, size in enumerate(STATISTICS_SIZES):
            rows = RowGather(transport, ranks, 2 * number)
            found_s = _amid_computation_s(transport, ranks, rows, size, burst, effort)
            times[size] = min(times.get(size, math.inf), found_s)
    transport.flush()
    return tuple(times.items())


def _median_s(transport: Transport, ranks: tuple[int, ...], num_bytes: int, effort: LinkEffort) -> float:
    tensor = torch.zeros(num_bytes // _ELEMENT_BYTES)

    def once_s() -> tuple[float]:
        _agreed(transport, ranks, 0.0)  # all are here
        start_s = time.perf_counter()
        transport.start_sum(tensor, ranks).wait()
        return (time.perf_counter() - start_s,)

    return medians(once_s, partial(_agreed, transport, ranks), effort)[0]


def _amid_computation_s(
    transport: Transport, ranks: tuple[int, ...], rows: Tell, num_bytes: int, burst: Burst, effort: LinkEffort
) -> float:
    tensor = torch.zeros(num_bytes // _ELEMENT_BYTES)

    def once_s() -> float:
        start_s = time.perf_counter()
        rows([tensor], tensor.dtype).wait().sum(0)
        return time.perf_counter() - start_s

    first_s = [burst() + once_s() for _ in range(2)][1]
    most = max(3.0, min(2.0 * effort.most, 2 * effort.each_s / first_s))
    repeats = round(_agreed(transport, ranks, most))
    total_s = 0.0
    for _ in range(repeats):
        burst()
        total_s += once_s()
    return total_s / repeats


def _agreed(transport: Transport, ranks: tuple[int, ...], value: float) -> float:
    """The first rank's value, on all, when all are here."""
    word = torch.tensor([value if transport.rank == ranks[0] else 0.0], dtype=torch.float64)
    transport.all_reduce(word, ranks)
    return float(word)


MeasureGroup = Callable[[Transport, tuple[int, ...], LinkEffort], LinkPoints]


def measure_rank(
    report: Report,
    rank: int,
    num_workers: int,
    meeting: str,
    quick: bool,
    transport: str = "",
    sites: bool = False,
) -> LinkCosts:
    """One rank's part, in its own process; all ranks call it together, rank 0's answer counts."""
    store = FileStore(meeting, num_workers)
    hosts = ("",) * num_workers
    joined = opened(transport, rank, store, hosts)
    try:
        return measure_together(joined, store, hosts, QUICK if quick else FULL, report, sites=sites)
    finally:
        joined.close()


def opened(name: str, rank: int, store: Store, hosts: Sequence[str]) -> Transport:
    """The transport of a run between ranks on ``hosts``, for :func:`measure_together`.

    Args:
        name: as of :func:`runtime.transport.open_named`.

    Raises:
        TransportError: the ranks did not find each other, or cannot exchange by it.
    """
    return open_named(name, rank, store, SILENCE_S, groups_of(hosts), hosts)


def measure_together(
    transport: Transport,
    store: Store,
    hosts: Sequence[str],
    effort: LinkEffort,
    report: Report,
    *,
    sites: bool = False,
) -> LinkCosts:
    """One rank's part; all ranks of the transport call it together, rank 0's answer counts.

    Args:
        transport: with the groups of :func:`groups_of`.
        store: that the ranks share.
        hosts: by rank.
        report: called with what has been measured and the seconds of it.
        sites: as of :func:`profiler.links.calls.exchange_calls`.
    """
    links: dict[str, Link] = {}
    pairs: tuple[PairLink, ...] = ()
    neighbours = _neighbours(hosts)
    if neighbours is not None:
        within_host = measure_fully(transport, store, [neighbours], effort, one_host=True)
        links[host_tier(hosts[:1])] = link = replace(within_host[neighbours], burst_bytes=0)  # no bucket is in a host
        report(("messages within a host", link.points[0][1]))
    if len(set(hosts)) > 1:
        link, pairs = measure_across(transport, store, hosts, effort)
        links[host_tier(hosts)] = link
        report(("messages across hosts", link.points[0][1]))

    def over(operation: str, ranks: tuple[int, ...], measure: MeasureGroup) -> Collective:
        """What ``ranks`` find together; on all ranks."""
        transport.barrier()
        points = measure(transport, ranks, effort) if transport.rank in ranks else ()
        points = _agreed_points(store, f"{operation} {ranks}", points, transport.rank == ranks[0])
        on = {hosts[rank] for rank in ranks}
        return Collective(operation, len(ranks), host_tier(on), points, len(on))

    sums = []
    groups = groups_of(hosts)
    for ranks in groups:
        for operation, measure in ((ALL_REDUCE, gradients), (STATISTICS, of_statistics)):
            sums.append(over(operation, ranks, measure))
            report((f"{operation} over {len(ranks)}", sums[-1].points[0][1]))
    inside = [ranks for ranks in groups if len({hosts[rank] for rank in ranks}) == 1]
    for ranks in [*(ranks[:1] for ranks in inside[:1]), *inside]:  # one rank of a host alone, then all of a group
        sums.append(replace(over(MEMORY, ranks, passes_over_memory), num_hosts=0))
    if transport.rank == 0:
        sums += exchange_calls(next(iter(links)), sites, effort.calls)
    return LinkCosts(links, tuple(sums), pairs)


def passes_over_memory(transport: Transport, ranks: tuple[int, ...], effort: LinkEffort) -> LinkPoints:
    """(bytes, processor seconds) of a pass over memory by all of ``ranks`` at once."""
    total, more = (torch.ones(_MEMORY_BYTES // (2 * _ELEMENT_BYTES)) for _ in range(2))
    times = []
    for _ in range(effort.rounds * _MEMORY_RUNS + 1):
        if len(ranks) > 1:
            _agreed(transport, ranks, 0.0)
        start_s = time.thread_time()
        total.add_(more)
        times.append(time.thread_time() - start_s)
    return ((_MEMORY_BYTES, statistics.median(times[1:])),)


def _neighbours(hosts: Sequence[str]) -> tuple[int, int] | None:
    for rank, host in enumerate(hosts):
        if host in hosts[rank + 1 :]:
            return rank, hosts.index(host, rank + 1)
    return None


def _agreed_points(store: Store, what: str, points: LinkPoints, tells: bool) -> LinkPoints:
    """The points of the one rank that tells them, on all."""
    if tells:
        store.set(f"halopipe/{what}", json.dumps(points))
    return rounded(json.loads(store.get(f"halopipe/{what}").decode()))
