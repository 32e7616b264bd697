"""What messages and sums cost between workers, over gloo, pinned as a run pins them.

    within a host     the first two ranks of the first host that has two
    across hosts      the first ranks of each two hosts: a glance at all of them, and in full the pair in the middle,
                      which stands for the class, and every pair that differs from it by more than a tenth
    sums              over 2 ... n ranks of the host that has most; over one rank each of 2 ... n hosts; and over all
                      ranks, where hosts have several.  Of many, powers of two and n.

:func:`measure_links` spawns the workers of this host; ranks of several hosts that have joined a process group call
:func:`measure_together`.

What sums over groups of ranks cost: of gradients, and of statistics between two operators.

Two ranks exchange small terms and add, as a run does; larger sums, and those of more ranks, are gloo's rings.

Sums of statistics happen between two operators.  Then ranks do not arrive together, and a thread that slept must be
woken on a core that computes: on a virtual machine such a sum took 2.5 ms where the same sum alone took 0.2.  Hence
they are measured amid computation, and their mean counts, not the median: waits come in two sizes, and a step has both.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from cuda_ops import core_of
from cuda_ops._torch import FileStore
from planner.ir.cluster import ALL_REDUCE, STATISTICS, Collective, Link, PairLink, host_tier
from profiler.links.host_pairs import measure_across, measure_fully, rounded
from profiler.links.messages import FULL, LEAST_LAST_BYTES, QUICK, Effort, Points, wait
from profiler.measure.child_process import Child, Report

if TYPE_CHECKING:
    from cuda_ops._torch import Store


SIZES = tuple(1024 * 4**power for power in range(9))  # 1 KiB ... 64 MiB
STATISTICS_SIZES = tuple(1024 * 4**power for power in range(5))  # 1 KiB ... 256 KiB
PAIR_BYTES = 256 * 1024
"""Up to here two ranks exchange, as in ``runtime.transport``."""

_COMPUTE_S = 0.0015  # between two sums of statistics, about what a layer takes
_ELEMENT_BYTES = 4
_TAG = 3


def gradients(group: dist.ProcessGroup, effort: Effort) -> Points:
    """(bytes, seconds) of sums that nothing else runs beside; least of the medians of some rounds."""
    times: dict[int, float] = {}
    for size in SIZES:
        times[size] = _median_s(group, size, effort)
        if _agreed(group, times[size]) > effort.longest_s and size >= LEAST_LAST_BYTES:
            break
    for _ in range(1, effort.rounds):
        for size in times:
            times[size] = min(times[size], _median_s(group, size, effort))
    return tuple(times.items())


def of_statistics(group: dist.ProcessGroup, effort: Effort) -> Points:
    """(bytes, mean seconds) of sums that follow computation, the waits for late ranks included."""
    times: dict[int, float] = {}
    for _ in range(effort.rounds):
        for size in STATISTICS_SIZES:
            times[size] = min(times.get(size, float("inf")), _amid_computation_s(group, size, effort))
    return tuple(times.items())


def _median_s(group: dist.ProcessGroup, num_bytes: int, effort: Effort) -> float:
    tensor = torch.zeros(num_bytes // _ELEMENT_BYTES)
    first_s = [_timed(group, lambda: _sum(group, tensor)) for _ in range(2)][1]
    repeats = round(_agreed(group, max(1.0, min(effort.most, effort.each_s / max(first_s, 1e-6)))))
    found = [_timed(group, lambda: _sum(group, tensor)) for _ in range(repeats)]
    return statistics.median(found if repeats > 2 else [first_s, *found])


def _amid_computation_s(group: dist.ProcessGroup, num_bytes: int, effort: Effort) -> float:
    tensor, factor = torch.zeros(num_bytes // _ELEMENT_BYTES), torch.zeros(128, 128)
    first_s = _timed(group, lambda: _sum(group, tensor))
    most = max(3.0, min(2.0 * effort.most, 2 * effort.each_s / (first_s + _COMPUTE_S)))
    repeats, total_s = round(_agreed(group, most)), 0.0
    for _ in range(repeats):
        stop_s = time.thread_time() + _COMPUTE_S
        while time.thread_time() < stop_s:
            torch.mm(factor, factor)
        start_s = time.perf_counter()
        _sum(group, tensor)
        total_s += time.perf_counter() - start_s
    return total_s / repeats


def _timed(group: dist.ProcessGroup, action: Callable[[], None]) -> float:
    """Seconds of ``action``, which starts when all ranks of the group are ready."""
    dist.barrier(group)
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s


def _sum(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    if group.size() > 2 or tensor.nbytes > PAIR_BYTES:
        dist.all_reduce(tensor, group=group)
        return
    other, peer = torch.empty_like(tensor), 1 - group.rank()
    works = [group.recv([other], peer, _TAG), group.send([tensor], peer, _TAG)]
    wait(works)
    tensor += other


def _agreed(group: dist.ProcessGroup, value: float) -> float:
    """The first rank's value, on all."""
    word = torch.tensor([value], dtype=torch.float64)
    group.broadcast([word], dist.BroadcastOptions()).wait()
    return float(word)


SILENCE_S = 300.0
_EVERY_SIZE = 4  # all world sizes up to here are measured


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """The links by class, those of pairs of hosts that differ, and sums over groups of ranks."""

    links: Mapping[str, Link]
    collectives: tuple[Collective, ...] = ()
    pairs: tuple[PairLink, ...] = ()


def measure_links(num_workers: int, quick: bool, progress: Callable[[str, float], None] | None = None) -> LinkCosts:
    """Measures in ``num_workers`` (at least 2) processes of this host.

    Args:
        progress: called with what has been measured and its seconds, ``num_measurements`` times.

    Raises:
        WorkerError: a process died or waited too long.
    """
    cores = [core_of(rank) for rank in range(num_workers)]
    return in_processes("profiler.links.cpu:measure_rank", cores, quick, progress)


def in_processes(
    function: str,
    cores: Sequence[int | Collection[int] | None],
    quick: bool,
    progress: Callable[[str, float], None] | None = None,
) -> LinkCosts:
    """What ``function(report, rank, number of ranks, meeting place, quick)`` finds as rank 0 of as many as ``cores``.

    Raises:
        WorkerError: a process died or waited too long.
    """
    with tempfile.TemporaryDirectory(prefix="halopipe-") as folder, ExitStack() as stack:
        meeting = str(Path(folder) / "store")
        children = [
            stack.enter_context(Child(function, rank, len(cores), meeting, quick, core=core))
            for rank, core in enumerate(cores)
        ]
        first = children[0].reports(SILENCE_S)
        while True:
            try:
                what, seconds = next(first)
            except StopIteration as stop:
                found: LinkCosts = stop.value
                return found
            if progress is not None:
                progress(what, seconds)


def num_measurements(num_workers: int) -> int:
    """How often ``measure_links`` reports progress."""
    return 1 + 2 * len(groups_of(("",) * num_workers))


def measure_rank(report: Report, rank: int, num_workers: int, meeting: str, quick: bool) -> LinkCosts:
    """One rank's part, in its own process; all ranks call it together, rank 0's answer counts."""
    store = FileStore(meeting, num_workers)
    timeout = timedelta(seconds=SILENCE_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_workers, timeout=timeout)
    try:
        return measure_together(store, ("",) * num_workers, QUICK if quick else FULL, report)
    finally:
        dist.destroy_process_group()


def measure_together(store: Store, hosts: Sequence[str], effort: Effort, report: Report) -> LinkCosts:
    """One rank's part in the default process group; all ranks call it together, rank 0's answer counts.

    Args:
        store: of the process group.
        hosts: by rank.
        report: called with what has been measured and the seconds of it.
    """
    links: dict[str, Link] = {}
    pairs: tuple[PairLink, ...] = ()
    neighbours = _neighbours(hosts)
    if neighbours is not None:
        found = measure_fully(store, [neighbours], effort)
        links[host_tier(hosts[:1])] = link = found[neighbours]
        report(("messages within a host", link.points[0][1]))
    if len(set(hosts)) > 1:
        link, pairs = measure_across(store, hosts, effort)
        links[host_tier(hosts)] = link
        report(("messages across hosts", link.points[0][1]))
    sums = []
    for ranks in groups_of(hosts):
        group, on = dist.new_group(list(ranks)), {hosts[rank] for rank in ranks}
        for operation, measure in ((ALL_REDUCE, gradients), (STATISTICS, of_statistics)):
            dist.barrier()
            points = measure(group, effort) if dist.get_rank() in ranks else ()
            points = _told(store, f"{operation} {ranks}", points, ranks[0])
            sums.append(Collective(operation, len(ranks), host_tier(on), points, len(on)))
            report((f"{operation} over {len(ranks)}", points[0][1]))
    return LinkCosts(links, tuple(sums), pairs)


def groups_of(hosts: Sequence[str]) -> list[tuple[int, ...]]:
    """The groups of ranks whose sums are measured."""
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    most = max(by_host.values(), key=len)
    firsts = [ranks[0] for ranks in by_host.values()]
    found = [tuple(ranks[:count]) for ranks in (most, firsts) for count in _world_sizes(len(ranks))]
    if 1 < len(by_host) < len(hosts):
        found.append(tuple(range(len(hosts))))
    return found


def _world_sizes(most: int) -> list[int]:
    return [n for n in range(2, most + 1) if n <= _EVERY_SIZE or n == most or n & (n - 1) == 0]


def _neighbours(hosts: Sequence[str]) -> tuple[int, int] | None:
    for rank, host in enumerate(hosts):
        if host in hosts[rank + 1 :]:
            return rank, hosts.index(host, rank + 1)
    return None


def _told(store: Store, what: str, points: Points, teller: int) -> Points:
    """The points of one rank, on all."""
    if dist.get_rank() == teller:
        store.set(f"halopipe/{what}", json.dumps(points))
    return rounded(json.loads(store.get(f"halopipe/{what}").decode()))
