"""Machines: those of the catalogue, those a cluster file describes, and what this host has.

Measured devices that the catalogue knows: their peaks, for what is not measured and for efficiency figures.

The driver calls a device ``NVIDIA H100 80GB HBM3``, the catalogue ``H100-SXM``: the model's name and the memory tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halopipe.terminal import tables, units
from planner.extras.catalogue import DeviceEntry, devices
from planner.ir.cluster import HOST, MEASURED, Cluster, DeviceSpec
from planner.ir.profile import Profile

if TYPE_CHECKING:
    from planner.extras.catalogue import Figure


_UNKNOWN = "–"


def on_cluster(profile: Profile, cluster: str | Path | Cluster) -> Profile:
    """The profile as it would be on the machines of a cluster file (or on ``cluster`` itself).

    Kinds of device that the profile measured keep their costs; others are scaled by the rule of
    :mod:`planner.costs.layers.roofline`, and say so (evidence ``datasheet``).  What runs of plans corrected of a kind
    of device stays too; what they corrected of links does not.

    Raises:
        CorruptFileError: the file is wrong; all its faults are named.
        MissingMeasurementError: no source states a figure that a layer needs.
    """
    from planner.costs.calibration.fit import on_other_machines
    from planner.costs.layers import roofline

    if isinstance(cluster, Cluster):
        return on_other_machines(roofline.on_cluster(profile, cluster), profile)
    from planner.extras.catalogue import read_machines

    machines = read_machines(cluster, profile.cluster)
    return on_other_machines(roofline.on_cluster(profile, machines.cluster, machines.measured_on), profile)


def catalogue_table() -> str:
    """Devices and links of the catalogue."""
    from planner.extras.catalogue import devices, links

    dtypes = ("float32", "tfloat32", "float16", "bfloat16", "float64", "int8")
    rows = [
        [
            entry.name,
            entry.family,
            _written(entry.memory_bytes),
            _written(entry.memory_bytes_per_s),
            _written(entry.on_chip_bytes),
            *(
                f"{entry.peak_flop_per_s[dtype].value / 1e12:.4g}" if dtype in entry.peak_flop_per_s else _UNKNOWN
                for dtype in dtypes
            ),
            entry.note,
        ]
        for entry in devices().values()
    ]
    header = ["device", "what", "memory", "at", "on chip", *dtypes, ""]
    cables = [
        [entry.name, _written(entry.bandwidth_bytes_per_s), ", ".join(entry.aliases)] for entry in links().values()
    ]
    return "\n".join(
        [
            "Devices (dense peaks in TFLOP/s by dtype; sources, dates, and why a figure is missing: --json)",
            tables.table(header, rows),
            "",
            "Links (from one device to another, in one direction)",
            tables.table(["link", "bandwidth", "also"], cables),
        ]
    )


def catalogue_data() -> dict[str, Any]:
    """The catalogue as plain data: every figure with its source and date."""
    from planner.extras.catalogue import devices, links
    from planner.ir.codec import plain

    return {
        "devices": [plain(entry) for entry in devices().values()],
        "links": [plain(entry) for entry in links().values()],
    }


def detected() -> Cluster:
    """This host as ``profile`` would find it: a device a core that may be used, then its GPUs; no links measured."""
    from cuda_ops import device_description

    num_cores = device_description().num_cores
    host = device_description(num_cores)
    cores = tuple(DeviceSpec(f"n0/cpu{rank}", host.processor, "n0", host.memory_bytes) for rank in range(num_cores))
    return Cluster((*cores, *_gpus("n0")), {})


def _gpus(host: str) -> tuple[DeviceSpec, ...]:
    from cuda_ops.device.gpus import may_have_gpus, num_gpus, why_no_gpu

    if not may_have_gpus() or why_no_gpu():
        return ()
    from profiler.measure.devices import BACKENDS, CUDA, described

    return described(BACKENDS[CUDA], host, num_gpus())


def cluster_text(cluster: Cluster, measured_kinds: Iterable[str] = ()) -> str:
    """The devices by host and kind, and the links."""
    levels = [tier.within for tier in cluster.tiers if tier.within not in ("", HOST)]
    alike: dict[tuple[object, ...], list[DeviceSpec]] = {}
    for device in cluster.devices:
        groups = tuple(device.group(level) for level in levels)
        alike.setdefault((device.host, device.kind, device.memory_bytes, *groups), []).append(device)
    measured = set(measured_kinds)
    rows = [
        [
            device.host,
            _span([each.name for each in those]),
            device.kind,
            units.size(device.memory_bytes),
            MEASURED if device.kind in measured else _UNKNOWN,
            *((device.group(level) or _UNKNOWN).removeprefix(f"{device.host}/") for level in levels),
        ]
        for those in alike.values()
        for device in those[:1]
    ]
    blocks = [tables.table(["host", "devices", "kind", "memory", "costs", *levels], rows)]
    within = {tier.name: tier.within or "all" for tier in cluster.tiers}
    rows = [
        [
            name,
            f"{units.size(link.bandwidth_bytes_per_s)}/s",
            units.seconds(link.latency_s),
            link.evidence,
            *([within.get(name, _UNKNOWN)] if within else []),
        ]
        for name, link in cluster.links.items()
    ]
    if rows:
        blocks.append(tables.table(["link", "bandwidth", "latency", "known", *(["within"] if within else [])], rows))
    return "\n\n".join(blocks)


def _span(names: list[str]) -> str:
    short_names = [name.rpartition("/")[2] for name in names]
    return short_names[0] if len(short_names) == 1 else f"{short_names[0]} ... {short_names[-1]} ({len(short_names)})"


def _written(figure: Figure | None) -> str:
    return _UNKNOWN if figure is None else figure.text


_FAMILY = "gpu"
_PCIE = "pcie"
_VARIANTS = frozenset({"ti", "super", "max", "laptop", "mobile"})
_LEAST, _MOST = 0.85, 1.1
"""Of what is printed on the box a process finds that much at least (the driver has its share), and at most."""


def with_figures(profile: Profile) -> Profile:
    """The profile with the catalogue's peaks for those of its devices that it knows and that have none."""
    specs = tuple(_with_figures(device) for device in profile.cluster.devices)
    if specs == profile.cluster.devices:
        return profile
    cluster: Cluster = replace(profile.cluster, devices=specs)
    return replace(profile, cluster=cluster)


def entry_of(kind: str, memory_bytes: int, entries: Iterable[DeviceEntry]) -> DeviceEntry | None:
    """The one entry that a GPU's name and memory fit; None if there is none, or more than one.

    Args:
        kind: as the driver calls it.
        memory_bytes: as much as is usable, or all of it.
    """
    name_parts = _words(kind)
    alike = [entry for entry in entries if entry.family == _FAMILY and _named(entry, name_parts)]
    if len(alike) > 1:
        alike = [entry for entry in alike if _fits(entry, memory_bytes)]
    if len(alike) > 1:  # H100-PCIe beside H100-SXM: a name says PCIe if it is
        fully_named = [entry for entry in alike if _words(entry.name) <= name_parts]
        alike = fully_named or [entry for entry in alike if (_PCIE in _words(entry.name)) == (_PCIE in name_parts)]
    return alike[0] if len(alike) == 1 else None


def _with_figures(device: DeviceSpec) -> DeviceSpec:
    if device.peak_flop_per_s or not device.name.rpartition("/")[2].startswith(_FAMILY):
        return device
    entry = entry_of(device.kind, device.memory_bytes, devices().values())
    if entry is None:
        return device
    bandwidth = device.memory_bytes_per_s
    if bandwidth is None and entry.memory_bytes_per_s is not None:
        bandwidth = entry.memory_bytes_per_s.value
    peaks = {dtype: figure.value for dtype, figure in entry.peak_flop_per_s.items()}
    return replace(device, peak_flop_per_s=peaks, memory_bytes_per_s=bandwidth)


def _named(entry: DeviceEntry, name_parts: frozenset[str]) -> bool:
    """Whether the name holds the entry's model: ``A100`` of ``A100-80GB``, both words of ``RTX-3090``."""
    own = [word for word in re.split(r"[^a-z0-9]+", entry.name.lower()) if word]
    model = own[:2] if own[0] in ("rtx", "titan") else own[:1]
    return set(model) <= name_parts and not (name_parts & _VARIANTS) - set(own)


def _fits(entry: DeviceEntry, memory_bytes: int) -> bool:
    return entry.memory_bytes is None or _LEAST <= memory_bytes / entry.memory_bytes.value <= _MOST


def _words(name: str) -> frozenset[str]:
    return frozenset(word for word in re.split(r"[^a-z0-9]+", name.lower()) if word)
