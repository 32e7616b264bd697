"""Links between GPUs: the measurement itself over gloo between two processes, and what is made of its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from planner.ir.cluster import ALL_REDUCE, STATISTICS, WITHIN_HOST
from profiler.links import gpu
from profiler.links.gpu import GpuMeasuring, costs_of, measure_gpu_links, num_gpu_measurements
from tests.forks import forked

SMALL = (1024, 4096)


def rank(number: int, path: Path) -> tuple[dict[tuple[str, int], float], int]:
    """What rank ``number`` of two measures, and how many reports it made; in a process of its own."""
    torch.set_num_threads(1)
    for name in ("MESSAGE_BYTES", "REDUCE_BYTES", "STATISTICS_BYTES"):
        setattr(gpu, name, SMALL)
    gpu._ALL_REDUCES.update({ALL_REDUCE: SMALL, STATISTICS: SMALL})
    gpu._DUPLEX_BYTES = 4096
    dist.init_process_group("gloo", store=dist.FileStore(str(path), 2), rank=number, world_size=2)
    reports: list[object] = []
    measuring = GpuMeasuring(reports.append, number, 2, torch.device("cpu"), True, backend="gloo")
    found = measuring.one_round()
    dist.destroy_process_group()
    return found, len(reports)


def test_both_ends_measure_messages_both_ways_and_sums(tmp_path: Path) -> None:
    for measured, num_reports in forked(2, lambda number: rank(number, tmp_path / "store")):
        assert num_reports == len(measured) == 2 + 1 + 2 * 2
        assert min(measured.values()) > 0


def numbers(num_gpus: int) -> dict[tuple[str, int], float]:
    """A link of 10 microseconds and 100 GB/s; sums twice as long for each further rank."""

    def seconds(num_bytes: int) -> float:
        return 1e-5 + num_bytes / 1e11

    found = {("message", n): seconds(n) for n in gpu.MESSAGE_BYTES}
    found["both ways", gpu._DUPLEX_BYTES] = 1.1 * seconds(gpu._DUPLEX_BYTES)
    for ranks in range(2, num_gpus + 1):
        for operation, sizes in gpu._ALL_REDUCES.items():
            found |= {(f"{operation} over {ranks}", n): ranks * seconds(n) for n in sizes}
    return found


def test_numbers_become_a_link_and_collectives_of_every_size_of_group() -> None:
    costs = costs_of(numbers(3), 3)
    link = costs.links[WITHIN_HOST]
    assert link.duplex
    assert link.bandwidth_bytes_per_s == pytest.approx(1e11)
    assert link.latency_s == pytest.approx(1e-5 + 1024 / 1e11)
    assert [(each.operation, each.num_ranks) for each in costs.collectives] == [
        (operation, ranks) for ranks in (2, 3) for operation in (ALL_REDUCE, STATISTICS)
    ]
    assert num_gpu_measurements(3) == 3 * len(numbers(3))
    slow = numbers(2) | {("both ways", gpu._DUPLEX_BYTES): 1.0}
    assert not costs_of(slow, 2).links[WITHIN_HOST].duplex


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs two GPUs")
def test_two_gpus_have_a_link() -> None:
    reports: list[str] = []
    costs = measure_gpu_links(2, True, lambda what, seconds: reports.append(what))
    assert len(reports) == num_gpu_measurements(2)
    times = [seconds for _, seconds in costs.links[WITHIN_HOST].points]
    assert min(times) > 0
    assert times[-1] > times[0]
