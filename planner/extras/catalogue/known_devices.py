"""Measured devices that the catalogue knows: their peaks, for what is not measured and for efficiency figures.

The driver calls a device ``NVIDIA H100 80GB HBM3``, the catalogue ``H100-SXM``: the model's name and the memory tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from planner.extras.catalogue.listing import DeviceEntry, devices
from planner.ir.cluster import Cluster, DeviceSpec
from planner.ir.profile import Profile

_FAMILY = "gpu"
_PCIE = "pcie"
_VARIANTS = frozenset({"ti", "super", "max", "laptop", "mobile"})
_LEAST = 0.85
_MOST = 1.1
"""Of what is printed on the box a process finds that much at least (the driver has its share), and at most."""


def with_figures(profile: Profile) -> Profile:
    """The profile with the catalogue's peaks for those of its devices that it knows and that have none."""
    specs = tuple(_with_figures(device) for device in profile.cluster.devices)
    if specs == profile.cluster.devices:
        return profile
    cluster: Cluster = replace(profile.cluster, devices=specs)
    return replace(profile, cluster=cluster)


def name_of(kind: str, memory_bytes: int) -> str:
    """What the catalogue calls a GPU; empty if it does not know it.  Arguments as of :func:`entry_of`."""
    entry = entry_of(kind, memory_bytes, devices().values())
    return "" if entry is None else entry.name


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
