"""What messages and all-reduces cost between the workers of this host, over gloo, pinned as a run pins them.

Receives are posted before sends: gloo serialises a send and a later receive with the same peer (1.99 times as long).
Times are wall-clock: the least of the medians of a few rounds over all sizes, since what other programs do can only
add to them, and does so for a while.  A sum over two ranks is timed in both ways a run has, gloo's ring and an exchange
with an addition, and the faster one counts.

Sums of statistics happen between two operators.  Then ranks do not arrive together, and a thread that slept must be
woken on a core that computes: on a virtual machine such a sum took 2.5 ms where the same sum alone took 0.2.  Hence
they are measured amid computation, and their mean counts, not the median: waits come in two sizes, and a step has both.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from cuda_ops import core_of
from planner.ir.cluster import ALL_REDUCE, MEASURED, STATISTICS, WITHIN_HOST, Collective, Link
from profiler.child import Child, Report

MESSAGE_BYTES = tuple(1024 * 4**power for power in range(8))  # 1 KiB ... 16 MiB
REDUCE_BYTES = tuple(1024 * 4**power for power in range(9))  # 1 KiB ... 64 MiB
STATISTICS_BYTES = tuple(1024 * 4**power for power in range(5))  # 1 KiB ... 256 KiB
_COMPUTE_S = 0.0015  # between two sums of statistics, about what a layer takes
_DUPLEX_BYTES = 1 << 20
_DUPLEX_LIMIT = 1.5
_DEADLINE_S = 60.0
_NUM_ROUNDS = 3
_ELEMENT_BYTES = 4

Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """The link between two workers of this host, and sums over groups of them."""

    link: Link
    collectives: tuple[Collective, ...]


def measure_links(num_workers: int, quick: bool, progress: Callable[[str, float], None] | None = None) -> LinkCosts:
    """Measures in ``num_workers`` (at least 2) processes.

    Args:
        progress: called with what has been measured and its seconds, ``num_measurements`` times.

    Raises:
        WorkerError: a process died or waited too long.
    """
    with tempfile.TemporaryDirectory(prefix="halopipe-") as folder, ExitStack() as stack:
        meeting = str(Path(folder) / "store")
        children = [
            stack.enter_context(
                Child("profiler.links:measure_rank", rank, num_workers, meeting, quick, core=core_of(rank))
            )
            for rank in range(num_workers)
        ]
        first = children[0].reports(_DEADLINE_S)
        while True:
            try:
                what, seconds = next(first)
            except StopIteration as stop:
                return stop.value
            if progress is not None:
                progress(what, seconds)


def num_measurements(num_workers: int) -> int:
    """How often ``measure_links`` reports progress."""
    return _NUM_ROUNDS * (len(MESSAGE_BYTES) + (num_workers - 1) * (len(REDUCE_BYTES) + len(STATISTICS_BYTES)))


def measure_rank(report: Report, rank: int, num_workers: int, meeting: str, quick: bool) -> LinkCosts:
    """One rank's part, in its own process; all ranks call it together, rank 0's answer counts."""
    store = dist.FileStore(meeting, num_workers)
    timeout = timedelta(seconds=_DEADLINE_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_workers, timeout=timeout)
    try:
        groups = {size: dist.new_group(list(range(size))) for size in range(2, num_workers + 1)}
        rounds = [_one_round(report, rank, groups, quick) for _ in range(_NUM_ROUNDS)]
    finally:
        dist.destroy_process_group()
    best = {what: min(found[what] for found in rounds) for what in rounds[0]}
    points = tuple((num_bytes, best["message", num_bytes]) for num_bytes in MESSAGE_BYTES)
    sums = tuple(
        Collective(operation, size, WITHIN_HOST, tuple((n, best[_name(operation, size), n]) for n in sizes))
        for size in groups
        for operation, sizes in ((ALL_REDUCE, REDUCE_BYTES), (STATISTICS, STATISTICS_BYTES))
    )
    return LinkCosts(_link(points, best["both ways", _DUPLEX_BYTES]), sums)


def _one_round(
    report: Report, rank: int, groups: Mapping[int, dist.ProcessGroup], quick: bool
) -> dict[tuple[str, int], float]:
    """Median seconds by what is done and its bytes."""
    found = {}

    def measured(what: str, num_bytes: int, seconds: float) -> None:
        found[what, num_bytes] = seconds
        report((f"{what}, {num_bytes} bytes", seconds))

    for num_bytes in MESSAGE_BYTES:
        there_and_back_s = _median(lambda n=num_bytes: _ping_pong(rank, n), _repeats(num_bytes, quick))
        measured("message", num_bytes, there_and_back_s / 2)
    found["both ways", _DUPLEX_BYTES] = _median(lambda: _both_ways(rank), _repeats(_DUPLEX_BYTES, quick))
    for size, group in groups.items():
        for num_bytes in REDUCE_BYTES:
            seconds = _sum_s(rank, size, group, num_bytes, _repeats(num_bytes, quick))
            measured(_name(ALL_REDUCE, size), num_bytes, seconds)
        for num_bytes in STATISTICS_BYTES:
            measured(_name(STATISTICS, size), num_bytes, _statistics_s(rank, size, group, num_bytes, quick))
    return found


def _name(operation: str, size: int) -> str:
    return f"{operation} over {size}"


def _link(points: Points, duplex_s: float) -> Link:
    one_way_s = dict(points)[_DUPLEX_BYTES]
    last_bytes, last_s = points[-1]
    return Link(
        latency_s=points[0][1],
        bandwidth_bytes_per_s=last_bytes / last_s,
        points=points,
        duplex=duplex_s < _DUPLEX_LIMIT * one_way_s,
        evidence=MEASURED,
    )


def _sum_s(rank: int, size: int, group: dist.ProcessGroup, num_bytes: int, repeats: int) -> float:
    tensor = torch.zeros(num_bytes // _ELEMENT_BYTES)
    dist.barrier()
    if rank >= size:
        return 0.0
    ring_s = _median(lambda: dist.all_reduce(tensor, group=group), repeats, group)
    if size > 2:
        return ring_s
    return min(ring_s, _median(lambda: _exchange_and_add(rank, tensor), repeats, group))


def _statistics_s(rank: int, size: int, group: dist.ProcessGroup, num_bytes: int, quick: bool) -> float:
    """Mean seconds of a sum that follows computation, the waits for late ranks included."""
    tensor, factor = torch.zeros(num_bytes // _ELEMENT_BYTES), torch.zeros(128, 128)
    dist.barrier()
    if rank >= size:
        return 0.0
    repeats = 15 if quick else 60
    total_s = 0.0
    for _ in range(repeats):
        stop_s = time.thread_time() + _COMPUTE_S
        while time.thread_time() < stop_s:
            torch.mm(factor, factor)
        start_s = time.perf_counter()
        if size == 2:
            _exchange_and_add(rank, tensor)
        else:
            dist.all_reduce(tensor, group=group)
        total_s += time.perf_counter() - start_s
    return total_s / repeats


def _repeats(num_bytes: int, quick: bool) -> int:
    """Many for small messages, which cost little and vary most."""
    most, volume_bytes = (7, 32 << 20) if quick else (40, 128 << 20)
    return max(3, min(most, volume_bytes // num_bytes))


def _median(action: Callable[[], object], repeats: int, group: dist.ProcessGroup | None = None) -> float:
    """Median seconds of ``action``; each starts when every rank of ``group`` (or rank 1, answering) is ready."""
    times = []
    for _ in range(repeats + 2):
        if group is not None:
            dist.barrier(group)
        start_s = time.perf_counter()
        action()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times[2:])


def _ping_pong(rank: int, num_bytes: int) -> None:
    """Rank 0 sends to rank 1, which sends it back; the others wait for neither."""
    if rank > 1:
        return
    message = torch.zeros(num_bytes, dtype=torch.uint8)
    buffer = torch.empty_like(message)
    coming = dist.irecv(buffer, 1 - rank)
    if rank == 0:
        _wait([dist.isend(message, 1), coming])
    else:
        _wait([coming])
        _wait([dist.isend(message, 0)])


def _both_ways(rank: int) -> None:
    if rank > 1:
        return
    message = torch.zeros(_DUPLEX_BYTES, dtype=torch.uint8)
    coming = dist.irecv(torch.empty_like(message), 1 - rank)
    _wait([dist.isend(message, 1 - rank), coming])


def _exchange_and_add(rank: int, tensor: torch.Tensor) -> None:
    other = torch.empty_like(tensor)
    coming = dist.irecv(other, 1 - rank)
    _wait([dist.isend(tensor, 1 - rank), coming])
    tensor += other


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait(timedelta(seconds=_DEADLINE_S))
