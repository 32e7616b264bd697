"""Machines: those of the catalogue, those a cluster file describes, and what this host has."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halopipe import text, units
from planner.ir.cluster import MEASURED, Cluster, DeviceSpec
from planner.ir.profile import Profile

if TYPE_CHECKING:
    from planner.catalogue import Figure

_UNKNOWN = "–"


def on_cluster(profile: Profile, cluster: str | Path | Cluster) -> Profile:
    """The profile as it would be on the machines of a cluster file (or on ``cluster`` itself).

    Kinds of device that the profile measured keep their costs; others are scaled by the rule of
    :mod:`planner.costs.datasheet`, and say so (evidence ``datasheet``).  What runs of plans corrected of a kind of
    device stays too; what they corrected of links does not.

    Raises:
        CorruptFileError: the file is wrong; all its faults are named.
        MissingMeasurementError: no source states a figure that a layer needs.
    """
    from planner.costs import datasheet
    from planner.costs.calibration import on_other_machines

    if isinstance(cluster, Cluster):
        return on_other_machines(datasheet.on_cluster(profile, cluster), profile)
    from planner.catalogue import read_machines

    machines = read_machines(cluster, profile.cluster)
    return on_other_machines(datasheet.on_cluster(profile, machines.cluster, machines.measured_on), profile)


def catalogue_table() -> str:
    """Devices and links of the catalogue."""
    from planner.catalogue import devices, links

    dtypes = ("float32", "tfloat32", "float16", "bfloat16", "float64")
    rows = [
        [
            entry.name,
            entry.family,
            _written(entry.memory_bytes),
            _written(entry.memory_bytes_per_s),
            *(_tera(entry.peak_flop_per_s.get(dtype)) for dtype in dtypes),
            entry.note,
        ]
        for entry in devices().values()
    ]
    header = ["device", "what", "memory", "at", *dtypes, ""]
    cables = [
        [entry.name, _written(entry.bandwidth_bytes_per_s), ", ".join(entry.aliases)] for entry in links().values()
    ]
    return "\n".join(
        [
            "Devices (dense peaks in TFLOP/s by dtype; sources and dates: --json)",
            text.table(header, rows),
            "",
            "Links (from one device to another, in one direction)",
            text.table(["link", "bandwidth", "also"], cables),
        ]
    )


def catalogue_data() -> dict[str, Any]:
    """The catalogue as plain data: every figure with its source and date."""
    from planner.catalogue import devices, links
    from planner.ir.codec import plain

    return {
        "devices": [plain(entry) for entry in devices().values()],
        "links": [plain(entry) for entry in links().values()],
    }


def detected() -> Cluster:
    """This host as ``profile`` would find it: a device a core that may be used, then its GPUs; no links measured."""
    from cuda_ops import device_description

    num_cores = device_description().num_cores
    found = device_description(num_cores)
    cores = tuple(DeviceSpec(f"n0/cpu{rank}", found.processor, "n0", found.memory_bytes) for rank in range(num_cores))
    return Cluster((*cores, *_gpus("n0")), {})


def _gpus(host: str) -> tuple[DeviceSpec, ...]:
    from cuda_ops.gpus import may_have_gpus, num_gpus, why_no_gpu

    if not may_have_gpus() or why_no_gpu():
        return ()
    from profiler.devices import BACKENDS, CUDA, described

    return described(BACKENDS[CUDA], host, num_gpus())


def cluster_text(cluster: Cluster, measured_kinds: Iterable[str] = ()) -> str:
    """The devices by host and kind, and the links."""
    alike: dict[tuple[str, str, int], list[str]] = {}
    for device in cluster.devices:
        alike.setdefault((device.host, device.kind, device.memory_bytes), []).append(device.name)
    known = set(measured_kinds)
    rows = [
        [host, _span(names), kind, units.size(memory), MEASURED if kind in known else _UNKNOWN]
        for (host, kind, memory), names in alike.items()
    ]
    blocks = [text.table(["host", "devices", "kind", "memory", "costs"], rows)]
    rows = [
        [name, f"{units.size(link.bandwidth_bytes_per_s)}/s", units.seconds(link.latency_s), link.evidence]
        for name, link in cluster.links.items()
    ]
    if rows:
        blocks.append(text.table(["link", "bandwidth", "latency", "known"], rows))
    return "\n\n".join(blocks)


def _span(names: list[str]) -> str:
    words = [name.rpartition("/")[2] for name in names]
    return words[0] if len(words) == 1 else f"{words[0]} ... {words[-1]} ({len(words)})"


def _written(figure: Figure | None) -> str:
    return _UNKNOWN if figure is None else figure.text


def _tera(figure: Figure | None) -> str:
    return _UNKNOWN if figure is None else f"{figure.value / 1e12:.4g}"
