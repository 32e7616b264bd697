"""Names of drivers, and what the catalogue knows under its own."""

from __future__ import annotations

import pytest

from planner.extras.catalogue.known_devices import _with_figures, entry_of
from planner.extras.catalogue.listing import devices
from planner.ir.cluster import DeviceSpec


@pytest.mark.parametrize(
    ("kind", "gibibytes", "entry"),
    [
        ("NVIDIA H200", 139.8, "H200"),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100-SXM"),
        ("NVIDIA H100 PCIe", 79.6, "H100-PCIe"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", 79.2, "A100-80GB"),
        ("Tesla V100-SXM2-16GB", 15.8, "V100-16GB"),
        ("Tesla V100-SXM2-32GB", 31.7, "V100-32GB"),
        ("Tesla T4", 14.6, "T4"),
        ("NVIDIA L4", 22.0, "L4"),
        ("NVIDIA GeForce RTX 3090", 23.7, "RTX-3090"),
        ("NVIDIA TITAN V", 11.8, "Titan-V"),
        ("NVIDIA GeForce RTX 3090 Ti", 23.7, None),
        ("NVIDIA A10G", 22.0, None),
        ("Tesla V100-SXM2-16GB", 1.0, None),  # another program has it: which of two it is cannot be told
    ],
)
def test_a_driver_s_name_and_memory_find_the_catalogue_s_entry(kind: str, gibibytes: float, entry: str | None) -> None:
    found = entry_of(kind, int(gibibytes * 2**30), devices().values())
    assert (found and found.name) == entry


def test_a_gpu_gets_the_peaks_of_its_entry_and_a_core_none() -> None:
    gpu = _with_figures(DeviceSpec("n0/gpu0", "NVIDIA H200", "n0", 139 << 30))
    assert gpu.peak_flop_per_s["bfloat16"] == 989.5e12
    assert gpu.memory_bytes_per_s == 4.8e12
    core = DeviceSpec("n0/cpu0", "NVIDIA H200", "n0", 1 << 30)
    assert _with_figures(core) is core
