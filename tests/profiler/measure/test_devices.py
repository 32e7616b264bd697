"""Which devices are profiled, and what a clock that changed means."""

from __future__ import annotations

import pytest

from cuda_ops.device.gpus import GpuDescription
from planner.ir.errors import MissingDeviceError, UsageError
from profiler.measure import devices
from profiler.measure.devices import BACKENDS, CPU, CUDA, chosen, describe, described
from profiler.measure.noise import is_throttled
from profiler.measure.partial_results import Rest
from profiler.session import profile
from tests.halopipe.plans import RESNET


def here(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(devices, "num_gpus", lambda: count)
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
    slow, fast = {"sm": 1.5e9, "memory": 2e9}, {"sm": 1.98e9, "memory": 2e9}
    assert is_throttled(fast, slow)
    assert is_throttled(slow, fast)
    assert not is_throttled(fast, {"sm": 1.95e9})
    assert not is_throttled({}, fast)
    assert Rest({}, 1.0, 1.0, 0.0, clocks_before=fast, clocks_after=slow).is_contended
    assert not Rest({}, 1.0, 1.0, 0.0, clocks_before=fast, clocks_after=fast).is_contended
