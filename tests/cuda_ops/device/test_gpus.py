"""What this host says of its GPUs; the driver and torch are stand-ins."""

from __future__ import annotations

import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cuda_ops.device import gpus
from cuda_ops.device.gpus import GpuDescription, gpu_clocks, gpu_descriptions, num_gpus, parse_clocks, why_no_gpu

UUID = "ffc79498-8ff3-c2dc-3b0d-fafd804516ae"


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=150 * 10**9, uuid=UUID)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((149 - index) * 10**9, 150 * 10**9))


def test_a_host_without_gpus_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert why_no_gpu() == "this build of torch has no CUDA"
    assert (num_gpus(), gpu_descriptions()) == (0, ())
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert why_no_gpu() == "torch finds no NVIDIA GPU"


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_has_as_much_memory_as_a_process_that_uses_it_finds_free() -> None:
    assert why_no_gpu() == ""
    assert gpu_descriptions() == (
        GpuDescription("NVIDIA H200", 149 * 10**9, 150 * 10**9),
        GpuDescription("NVIDIA H200", 148 * 10**9, 150 * 10**9),
    )


@pytest.mark.parametrize(
    ("answer", "clocks"),
    [
        ("1980, 3201\n", {"sm": 1.98e9, "memory": 3.201e9}),
        ("[N/A], 3201\n", {"memory": 3.201e9}),
        ("1980, [Not Supported]", {"sm": 1.98e9}),
        ("No devices were found\n", {}),
        ("", {}),
    ],
)
def test_clocks_are_in_hertz_and_what_is_not_known_is_left_out(answer: str, clocks: dict[str, float]) -> None:
    assert parse_clocks(answer) == clocks


@pytest.mark.usefixtures("two_gpus")
def test_clocks_are_asked_by_uuid_as_torch_may_number_gpus_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\necho "1755, 2619"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpu_clocks(1) == {"sm": 1.755e9, "memory": 2.619e9}
    assert f"--id=GPU-{UUID}" in (tmp_path / "asked").read_text().split()
    program.write_text("#!/bin/sh\nexit 9\n")
    assert gpu_clocks(1) == {}
    monkeypatch.setattr(gpus.shutil, "which", lambda name: None)
    assert gpu_clocks(1) == {}


@pytest.mark.cuda
def test_a_gpu_of_this_host_is_described() -> None:
    found = gpu_descriptions()[0]
    assert 0 < found.memory_bytes < found.total_bytes
    assert found.name == torch.cuda.get_device_name(0)
    assert all(1e8 < hertz < 1e10 for hertz in gpu_clocks(0).values())
