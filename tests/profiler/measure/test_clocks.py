"""Clocks on the processor and on a GPU, which devices are profiled, what the host adds to a step on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from cuda_ops.device.gpus import GpuDescription
from planner.ir.errors import MissingDeviceError, RankCountError, UsageError
from profiler.measure import devices, noise
from profiler.measure.contention import clocks, governor, is_throttled
from profiler.measure.devices import BACKENDS, CPU, CUDA, chosen, describe, described
from profiler.measure.host_time import with_calls
from profiler.measure.noise import (
    CallClock,
    CudaClock,
    LapClock,
    ThreadClock,
    clock_for,
    timed,
)
from profiler.measure.partial_results import Rest
from profiler.measure.timing import TimedLayer
from profiler.session import profile
from tests.halopipe.plans import RESNET
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
    clock = CudaClock(device)
    matrix = torch.randn(256, 256, device=device)
    laps = [lap_of(clock, lambda: matrix @ matrix, of) for _ in range(3)]
    clock.settle()
    assert min(map(clock.seconds, laps)) > 0


def test_clocks_and_governor_are_read_where_the_system_tells_them(tmp_path: Path) -> None:
    folder = tmp_path / "cpu3" / "cpufreq"
    folder.mkdir(parents=True)
    for name, text in {
        "scaling_cur_freq": "2450000",
        "scaling_max_freq": "3500000",
        "scaling_governor": "powersave",
    }.items():
        (folder / name).write_text(f"{text}\n")
    assert clocks(3, tmp_path, tmp_path / "none") == {"now": 2.45e9, "most": 3.5e9}
    assert governor(3, tmp_path) == "powersave"


def test_else_the_processor_s_own_word_counts(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("model name\t: X\ncpu MHz\t\t: 2000.5\nmodel name\t: X\ncpu MHz\t\t: 3000.0\n")
    assert clocks(1, tmp_path, info) == {"now": 3e9}
    assert clocks(7, tmp_path, info) == {}
    assert clocks(None, tmp_path, info) == {"now": 2000.5e6}
    assert (clocks(0, tmp_path, tmp_path / "none"), governor(0, tmp_path)) == ({}, "")


GPU_CLOCK = CudaClock(torch.device("cuda:0"))
KERNELS = {
    "conv": TimedLayer(4.0, 8.0, 5.0, 3.0, 2, 0.0, (12.0, 12.0)),
    "relu": TimedLayer(0.5, 1.0, 1.0, 0.0, 2, 0.0, (1.5, 1.5)),
}
CALLS = {
    "conv": TimedLayer(3.0, 9.0, 6.0, 4.0, 2, 0.0, (12.0, 12.0)),
    "relu": TimedLayer(2.0, 6.0, 6.0, 0.0, 2, 0.0, (8.0, 8.0)),
}


def calls(clock: CallClock) -> dict[str, TimedLayer]:
    return CALLS


def never(clock: CallClock) -> dict[str, TimedLayer]:
    raise AssertionError("calls are timed only where they matter")


def test_layers_add_up_to_a_step_that_waits_for_the_host() -> None:
    found, share = with_calls(KERNELS, 18.5, GPU_CLOCK, calls)
    assert share == pytest.approx(5.0 / 20.0)
    assert sum(each.forward_s + each.backward_s for each in found.values()) == pytest.approx(18.5)
    conv = found["conv"]
    assert (conv.forward_s, conv.backward_s, conv.backward_input_s, conv.backward_weight_s) == (4.75, 10.25, 6.5, 4.0)
    assert conv.raw_s == (15.0, 15.0)
    assert found["relu"].backward_weight_s == 0
    assert found["relu"].backward_input_s == found["relu"].backward_s == 2.5


@pytest.mark.parametrize("passes_s", [10.0, 13.5, 13.6])
def test_a_step_that_kernels_fill_leaves_them_as_they_are(passes_s: float) -> None:
    assert with_calls(KERNELS, passes_s, GPU_CLOCK, never) == (KERNELS, 0.0)


def test_on_the_processor_nothing_runs_ahead() -> None:
    assert with_calls(KERNELS, 18.5, ThreadClock(), never) == (KERNELS, 0.0)


def here(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(devices, "num_gpus", lambda: count)
    monkeypatch.setattr(devices, "may_have_gpus", lambda: True)
    monkeypatch.setattr(devices, "why_no_gpu", lambda: "" if count else "torch finds no NVIDIA GPU")


@pytest.mark.parametrize(
    ("name", "workers", "gpus", "expected"),
    [
        ("cpu", 0, 4, (CPU, 2)),
        ("cpu", 7, 0, (CPU, 7)),
        ("auto", 0, 0, (CPU, 2)),
        ("auto", 3, 2, (CPU, 3)),
        ("auto", 2, 4, (CUDA, 2)),
        ("cuda", 2, 4, (CUDA, 2)),
    ],
)
def test_gpus_are_chosen_where_there_are_enough(
    monkeypatch: pytest.MonkeyPatch, name: str, workers: int, gpus: int, expected: tuple[str, int]
) -> None:
    here(monkeypatch, gpus)
    kind, count = chosen(name, workers)
    assert (kind.type, count) == expected


def test_a_gpu_that_is_not_there_cannot_be_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, 0)
    with pytest.raises(MissingDeviceError, match="there is no GPU to profile") as caught:
        profile(RESNET, device="cuda")
    assert caught.value.details == ("torch finds no NVIDIA GPU",)
    with pytest.raises(UsageError, match="device 'tpu' is not known"):
        chosen("tpu")
    with pytest.raises(RankCountError, match="5000 workers are asked for, at most "):
        chosen("cpu", 5000)


def test_no_more_gpus_are_planned_for_than_there_are() -> None:
    with pytest.raises(MissingDeviceError, match=r"9999 devices are to be planned for, this host has \d+"):
        described(BACKENDS[CUDA], "n0", 9999)


def test_gpus_are_named_by_number_and_lose_nothing_to_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_descriptions", lambda: (GpuDescription("NVIDIA L4", 22 << 30, 23 << 30),) * 3)
    found = describe(lambda report: None, CUDA, "n1", 2)
    assert [device.name for device in found] == ["n1/gpu0", "n1/gpu1"]
    assert {(device.kind, device.host, device.memory_bytes) for device in found} == {("NVIDIA L4", "n1", 22 << 30)}
    assert {device.core_share for device in found} == {0.0}


def test_cores_are_described_as_before() -> None:
    found = described(BACKENDS[CPU], "n0", 3)
    assert [device.name for device in found] == ["n0/cpu0", "n0/cpu1", "n0/cpu2"]
    assert {device.core_share for device in found} == {1.0}


def test_a_clock_that_changed_at_work_makes_a_profile_contended() -> None:
    slow = {"sm": 1.5e9, "memory": 2e9}
    fast = {"sm": 1.98e9, "memory": 2e9}
    assert is_throttled(fast, slow)
    assert is_throttled(slow, fast)
    assert not is_throttled(fast, {"sm": 1.95e9})
    assert not is_throttled({}, fast)
    assert Rest({}, 1.0, 1.0, 0.0, clocks_before=fast, clocks_after=slow).is_contended
    assert not Rest({}, 1.0, 1.0, 0.0, clocks_before=fast, clocks_after=fast).is_contended
