"""Clocks: what a lap is, on the processor and (as far as it can be told with a stand-in for events) on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from profiler.measure import noise
from profiler.measure.noise import CallClock, CudaClock, LapClock, ThreadClock, clock_for, timed
from tests.profiler.fake_gpu import FakeGpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu.installed(monkeypatch)


def lap_of(clock: LapClock, work: Callable[[], object], of: str | None = None) -> object:
    started = clock.start(of)
    work()
    return clock.stop(started)


def test_thread_time_counts_work_and_not_sleep() -> None:
    clock = clock_for("cpu")
    assert isinstance(clock, ThreadClock)
    assert timed(clock, lambda: time.sleep(0.05)) < 0.04
    assert timed(clock, lambda: sum(range(200_000))) > 0


def test_laps_one_after_another_are_what_the_stream_took_with_what_it_waited(gpu: FakeGpu) -> None:
    clock = CudaClock(torch.device("cuda:0"))
    laps = [lap_of(clock, lambda s=s: gpu.launch(kernel_s=s, call_s=0.001)) for s in (0.25, 0.5)]
    assert gpu.waits == 0, "noting a lap must not wait for the GPU"
    clock.settle()
    assert [clock.seconds(lap) for lap in laps] == pytest.approx([0.251, 0.5])  # the first waited for its call
    assert gpu.waits == 1


@pytest.mark.parametrize("call_s", [1e-4, 3e-3])
def test_a_lap_of_something_is_its_kernels_whatever_the_host_needs_for_their_calls(gpu: FakeGpu, call_s: float) -> None:
    clock = CudaClock(torch.device("cuda:0"))

    def work() -> None:
        for _ in range(3):
            gpu.launch(kernel_s=2e-5, call_s=call_s)

    seconds = []
    for _ in range(3):
        laps = [lap_of(clock, work, name) for name in ("relu", "add")]
        clock.settle()
        seconds.append([clock.seconds(lap) for lap in laps])
    assert seconds[1:] == [pytest.approx([6e-5, 6e-5])] * 2  # at first, nobody knows how long the calls take


def test_a_lap_in_which_the_host_waits_for_the_gpu_does_not_make_the_next_longer_and_longer(gpu: FakeGpu) -> None:
    clock = CudaClock(torch.device("cuda:0"))

    def reads() -> None:
        gpu.launch(kernel_s=1e-3, call_s=1e-5)
        gpu.synchronize()
        gpu.launch(kernel_s=1e-3, call_s=1e-5)

    began_s = []
    for _ in range(6):
        began_s.append(gpu.host_s)
        lap = lap_of(clock, reads, "nonzero")
        clock.settle()
        assert clock.seconds(lap) == pytest.approx(2e-3, rel=0.02)
    took_s = [after_s - before_s for before_s, after_s in pairwise(began_s)]
    assert took_s[1:] == pytest.approx(took_s[1:2] * 4)


def test_calls_are_timed_while_the_gpu_has_nothing_to_do(gpu: FakeGpu) -> None:
    clock = CallClock(torch.device("cuda:0"))
    laps = [lap_of(clock, lambda s=s: gpu.launch(kernel_s=0.5, call_s=s), "relu") for s in (0.001, 0.002)]
    clock.settle()
    assert [clock.seconds(lap) for lap in laps] == pytest.approx([0.001, 0.002])


def test_events_are_used_again(gpu: FakeGpu) -> None:
    clock = CudaClock(torch.device("cuda:0"))
    for _ in range(5):
        timed(clock, lambda: gpu.launch(kernel_s=0.1, call_s=0.001))
    assert gpu.num_events == 2


def test_a_device_has_the_clock_of_its_type(gpu: FakeGpu) -> None:
    assert isinstance(noise.clock_for(torch.device("cuda:1")), CudaClock)


@pytest.mark.cuda
@pytest.mark.parametrize("of", [None, "product"])
def test_a_lap_of_a_gpu_has_seconds_once_the_clock_has_settled(of: str | None) -> None:
    device = torch.device("cuda:0")
    clock, matrix = CudaClock(device), torch.randn(256, 256, device=device)
    laps = [lap_of(clock, lambda: matrix @ matrix, of) for _ in range(3)]
    clock.settle()
    assert min(map(clock.seconds, laps)) > 0
