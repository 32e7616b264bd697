"""What messages and sums cost between the GPUs of this host, over NCCL, as the runtime sends them.

Each direction has a communicator of its own (:mod:`runtime.transport.nccl`): on one communicator a receive that
waits holds up the send behind it.  Times are wall-clock, from the call to the end of the kernels on both sides, since a
rank waits for its GPU after every action; the least of the medians of a few rounds counts.

All pairs of GPUs are taken for alike: the first two are measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from cuda_ops import cores_beside
from cuda_ops._torch import FileStore
from planner.ir.cluster import ALL_REDUCE, MEASURED, NCCL, STATISTICS, Collective, Link, host_tier
from profiler.links.cpu import STATISTICS_SIZES
from profiler.links.processes import SILENCE_S, LinkCosts, in_processes
from profiler.measure.child_process import Report

MESSAGE_BYTES = REDUCE_BYTES = tuple(1024 * 4**power for power in range(10))  # 1 KiB ... 256 MiB
_DUPLEX_BYTES = 1 << 24
_DUPLEX_LIMIT = 1.5
_NUM_ROUNDS = 3
_ELEMENT_BYTES = 4

_ALL_REDUCES = {ALL_REDUCE: REDUCE_BYTES, STATISTICS: STATISTICS_SIZES}
"""Sums of statistics go the same way: a GPU needs nobody to wake it."""


def measure_gpu_links(num_gpus: int, quick: bool, progress: Callable[[str, float], None] | None = None) -> LinkCosts:
    """Measures between the first ``num_gpus`` (at least 2) GPUs, each driven by a process.

    Args:
        progress: called with what has been measured and its seconds, ``num_gpu_measurements`` times.

    Raises:
        WorkerError: a process died or waited too long.
    """
    cores = [cores_beside(rank, num_gpus) for rank in range(num_gpus)]
    return in_processes("profiler.links.gpu:measure_rank", cores, quick, progress)


def num_gpu_measurements(num_gpus: int) -> int:
    """How often ``measure_gpu_links`` reports progress."""
    return _NUM_ROUNDS * (len(MESSAGE_BYTES) + 1 + (num_gpus - 1) * sum(map(len, _ALL_REDUCES.values())))


def measure_rank(report: Report, rank: int, num_gpus: int, meeting: str, quick: bool) -> LinkCosts:
    """One rank's part, in its own process; all ranks call it together, rank 0's answer counts."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = FileStore(meeting, num_gpus)
    timeout = timedelta(seconds=SILENCE_S)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=num_gpus, timeout=timeout, device_id=device)
    try:
        measuring = GpuMeasuring(report, rank, num_gpus, device, quick)
        rounds = [measuring.one_round() for _ in range(_NUM_ROUNDS)]
    finally:
        dist.destroy_process_group()
    return costs_of({what: min(of_round[what] for of_round in rounds) for what in rounds[0]}, num_gpus)


def costs_of(best: Mapping[tuple[str, int], float], num_gpus: int) -> LinkCosts:
    """From seconds by what was done and its bytes."""
    points = tuple((size, best["message", size]) for size in MESSAGE_BYTES)
    (before_bytes, before_s), (last_bytes, last_s) = points[-2:]
    rate = (last_bytes - before_bytes) / max(1e-9, last_s - before_s)
    link = Link(
        latency_s=points[0][1],
        bandwidth_bytes_per_s=max(rate, last_bytes / last_s),
        points=points,
        duplex=best["both ways", _DUPLEX_BYTES] < _DUPLEX_LIMIT * best["message", _DUPLEX_BYTES],
        evidence=MEASURED,
        transport=NCCL,
    )
    tier = host_tier([""])
    sums = tuple(
        Collective(operation, ranks, tier, tuple((size, best[_name(operation, ranks), size]) for size in sizes))
        for ranks in range(2, num_gpus + 1)
        for operation, sizes in _ALL_REDUCES.items()
    )
    return LinkCosts({tier: link}, sums)


class GpuMeasuring:
    """One rank of the measurement, in a default process group with the communicators that it needs.

    Args:
        backend: of the communicators.
    """

    def __init__(
        self, report: Report, rank: int, num_gpus: int, device: torch.device, quick: bool, backend: str = "nccl"
    ) -> None:
        self._report = report
        self._rank = rank
        self._device = device
        self._quick = quick
        self._there, self._back = (dist.new_group([0, 1], backend=backend) for _ in range(2))
        self._groups = {ranks: dist.new_group(list(range(ranks)), backend=backend) for ranks in range(2, num_gpus + 1)}

    def one_round(self) -> dict[tuple[str, int], float]:
        """Median seconds by what is done and its bytes; zeros for what this rank has no part in."""
        medians_s = {}

        def measured(what: str, num_bytes: int, seconds: float) -> None:
            medians_s[what, num_bytes] = seconds
            self._report((f"{what}, {num_bytes} bytes", seconds))

        for num_bytes in MESSAGE_BYTES:
            measured("message", num_bytes, self._ping_pong_s(num_bytes) / 2)
        measured("both ways", _DUPLEX_BYTES, self._both_ways_s(_DUPLEX_BYTES))
        for ranks in self._groups:
            for operation, sizes in _ALL_REDUCES.items():
                for num_bytes in sizes:
                    measured(_name(operation, ranks), num_bytes, self._sum_s(ranks, num_bytes))
        return medians_s

    def _ping_pong_s(self, num_bytes: int) -> float:
        """Rank 0 sends to rank 1, which sends it back; the others wait for neither."""
        message = self._message(num_bytes)
        there = self._there
        back = self._back

        def once() -> None:
            if self._rank == 0:
                dist.send(message, 1, group=there)
                dist.recv(message, 1, group=back)
            else:
                dist.recv(message, 0, group=there)
                dist.send(message, 0, group=back)

        return self._median_s(once, num_bytes, there) if self._rank < 2 else 0.0

    def _both_ways_s(self, num_bytes: int) -> float:
        mine = self._message(num_bytes)
        other = self._message(num_bytes)
        sending, receiving = (self._there, self._back) if self._rank == 0 else (self._back, self._there)
        peer = 1 - self._rank

        def once() -> None:
            works = [dist.irecv(other, peer, group=receiving), dist.isend(mine, peer, group=sending)]
            for work in works:
                if work is not None:
                    work.wait()

        return self._median_s(once, num_bytes, self._there) if self._rank < 2 else 0.0

    def _sum_s(self, ranks: int, num_bytes: int) -> float:
        if self._rank >= ranks:
            return 0.0
        tensor = torch.zeros(num_bytes // _ELEMENT_BYTES, device=self._device)
        group = self._groups[ranks]
        return self._median_s(lambda: dist.all_reduce(tensor, group=group), num_bytes, group)

    def _median_s(self, action: Callable[[], object], num_bytes: int, group: dist.ProcessGroup | None) -> float:
        """Median seconds of ``action``, which every rank of ``group`` starts when all are ready."""
        ready = torch.zeros(1, device=self._device)
        times = []
        for _ in range(_repeats(num_bytes, self._quick) + 2):
            dist.all_reduce(ready, group=group)
            self._synchronize()
            start_s = time.perf_counter()
            action()
            self._synchronize()
            times.append(time.perf_counter() - start_s)
        return statistics.median(times[2:])

    def _message(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _name(operation: str, ranks: int) -> str:
    return f"{operation} over {ranks}"


def _repeats(num_bytes: int, quick: bool) -> int:
    """Many for small messages, which cost little and vary most."""
    most, volume_bytes = (7, 1 << 30) if quick else (40, 4 << 30)
    return max(3, min(most, volume_bytes // num_bytes))
