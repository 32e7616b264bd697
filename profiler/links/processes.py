"""Processes that measure the links of this host: the side that starts them and waits, which loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from cuda_ops import core_of
from planner.ir.cluster import Collective, Link, PairLink
from planner.ir.scratch import scratch_folder
from profiler.measure.child_process import Child

SILENCE_S = 300.0
"""So long the others may take to measure something."""

_EVERY_SIZE = 4  # all world sizes up to here are measured


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """The links by class, those of pairs of hosts that differ, and sums over groups of ranks."""

    links: Mapping[str, Link]
    collectives: tuple[Collective, ...] = ()
    pairs: tuple[PairLink, ...] = ()


def measure_links(
    num_workers: int,
    quick: bool,
    progress: Callable[[str, float], None] | None = None,
    transport: str = "",
    *,
    sites: bool = False,
) -> LinkCosts:
    """Measures in ``num_workers`` (at least 2) processes of this host.

    Args:
        progress: called with what has been measured and its seconds, ``num_measurements`` times.
        transport: as of :func:`opened`.
        sites: as of :func:`profiler.links.calls.exchange_calls`.

    Raises:
        TransportError: the workers cannot exchange by it.
        WorkerError: a process died or waited too long.
    """
    cores = [core_of(rank) for rank in range(num_workers)]
    return in_processes("profiler.links.cpu:measure_rank", cores, quick, progress, transport, sites)


def in_processes(
    function: str,
    cores: Sequence[int | Collection[int] | None],
    quick: bool,
    progress: Callable[[str, float], None] | None = None,
    *more: object,
) -> LinkCosts:
    """What ``function(report, rank, number of ranks, meeting place, quick, *more)`` finds as the first of its ranks.

    Args:
        cores: of each rank.

    Raises:
        WorkerError: a process died or waited too long.
    """
    with scratch_folder("links") as folder, ExitStack() as stack:
        meeting = str(folder / "store")
        children = [
            stack.enter_context(Child(function, rank, len(cores), meeting, quick, *more, core=core))
            for rank, core in enumerate(cores)
        ]
        costs: LinkCosts = children[0].finish(SILENCE_S, lambda told: progress(*told) if progress else None)
        return costs


def num_measurements(num_workers: int) -> int:
    """How often ``measure_links`` reports progress."""
    return 1 + 2 * len(groups_of(("",) * num_workers))


def groups_of(hosts: Sequence[str]) -> list[tuple[int, ...]]:
    """The groups of ranks whose sums are measured."""
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    most = max(by_host.values(), key=len)
    firsts = [ranks[0] for ranks in by_host.values()]
    groups = [
        tuple(ranks[:n])
        for ranks in (most, firsts)
        for n in range(2, len(ranks) + 1)
        if n <= _EVERY_SIZE or n == len(ranks) or n & (n - 1) == 0
    ]
    if 1 < len(by_host) < len(hosts):
        groups.append(tuple(range(len(hosts))))
    return groups
