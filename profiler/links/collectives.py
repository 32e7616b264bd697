"""What sums over groups of ranks cost: of gradients, and of statistics between two operators.

Two ranks exchange small terms and add, as a run does; larger sums, and those of more ranks, are gloo's rings.

Sums of statistics happen between two operators.  Then ranks do not arrive together, and a thread that slept must be
woken on a core that computes: on a virtual machine such a sum took 2.5 ms where the same sum alone took 0.2.  Hence
they are measured amid computation, and their mean counts, not the median: waits come in two sizes, and a step has both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from profiler.links.messages import LEAST_LAST_BYTES, Effort, Points, wait

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
