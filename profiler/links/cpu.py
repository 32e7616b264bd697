"""What messages and sums cost between workers, over gloo, pinned as a run pins them.

    within a host     the first two ranks of the first host that has two
    across hosts      the first ranks of each two hosts: a glance at all of them, and in full the pair in the middle,
                      which stands for the class, and every pair that differs from it by more than a tenth
    sums              over 2 ... n ranks of the host that has most; over one rank each of 2 ... n hosts; and over all
                      ranks, where hosts have several.  Of many, powers of two and n.

:func:`measure_links` spawns the workers of this host; ranks of several hosts that have joined a process group call
:func:`measure_together`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from cuda_ops import core_of
from planner.ir.cluster import ALL_REDUCE, STATISTICS, Collective, Link, PairLink, host_tier
from profiler.links.collectives import gradients, of_statistics
from profiler.links.host_pairs import measure_across, measure_fully, rounded
from profiler.links.messages import FULL, QUICK, Effort, Points
from profiler.measure.child_process import Child, Report

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

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
    store = dist.FileStore(meeting, num_workers)  # type: ignore[attr-defined]  # public, but not by torch's types
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
