"""Clocks: what a lap is, on the processor and (as far as it can be told with a stand-in for events) on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from profiler.measure import noise
from profiler.measure.noise import CudaClock, LapClock, ThreadClock, clock_for, timed
from tests.profiler.fake_gpu import FakeGpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu.installed(monkeypatch)


def lap_of(clock: LapClock, work: Callable[[], object]) -> object:
    started = clock.start()
    work()
    return clock.stop(started)


def test_thread_time_counts_work_and_not_sleep() -> None:
    clock = clock_for("cpu")
    assert isinstance(clock, ThreadClock)
    assert timed(clock, lambda: time.sleep(0.05)) < 0.04
    assert timed(clock, lambda: sum(range(200_000))) > 0


def test_kernels_that_outlast_their_calls_are_timed_by_events(gpu: FakeGpu) -> None:
    clock = CudaClock(torch.device("cuda:0"))
    laps = [lap_of(clock, lambda s=s: gpu.launch(kernel_s=s, call_s=0.001)) for s in (0.25, 0.5)]
    assert gpu.waits == 0, "noting a lap must not wait for the GPU"
    clock.settle()
    assert [clock.seconds(lap) for lap in laps] == pytest.approx([0.251, 0.5])  # the first waited for its call
    assert gpu.waits == 1


def test_where_calls_outlast_kernels_the_calls_are_timed(gpu: FakeGpu) -> None:
    clock = CudaClock(torch.device("cuda:0"))
    gpu.launch(kernel_s=10.0, call_s=0.001)  # hides the call that follows from the events
    lap = lap_of(clock, lambda: gpu.launch(kernel_s=0.002, call_s=0.03))
    clock.settle()
    assert clock.seconds(lap) == pytest.approx(0.03)


def test_events_are_used_again(gpu: FakeGpu) -> None:
    clock = CudaClock(torch.device("cuda:0"))
    for _ in range(5):
        timed(clock, lambda: gpu.launch(kernel_s=0.1, call_s=0.001))
    assert gpu.num_events == 2


def test_a_device_has_the_clock_of_its_type(gpu: FakeGpu) -> None:
    assert isinstance(noise.clock_for(torch.device("cuda:1")), CudaClock)


@pytest.mark.cuda
def test_laps_of_a_gpu_are_about_as_long_as_its_work() -> None:
    device = torch.device("cuda:0")
    clock = clock_for(device)
    matrix = torch.randn(2048, 2048, device=device)

    def times_of(count: int) -> float:
        return min(timed(clock, lambda: [matrix @ matrix for _ in range(count)]) for _ in range(5))

    times_of(2)
    one_s, ten_s = times_of(1), times_of(10)
    assert 0 < one_s < ten_s
