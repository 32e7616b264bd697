"""What was measured of this machine, kept for this user: links, sums and exchanges within the host.

None of it has to do with the network that is profiled, and it takes longer than a small network's layers:

    profile:  measures the links ── JSON in the cache folder ──> later profiles of this boot

It is believed where host, boot, cores, processor, packages and the code that measures are the same, and where a fixed
kernel, which each measuring process times before and after its layers, takes as long as it did then.  What was measured
while the machine was busy is believed only while it still is.  In doubt (somebody else's folder, a file that makes no
sense) links are measured.

Processes that write at once each replace the whole file in one move: what one of them loses is measured again.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from cuda_ops.device.compiling import cache_folder, foreign, processor
from planner.ir.cluster import SITES, Cluster, DeviceSpec
from planner.ir.codec import canonical, fingerprint, from_json
from planner.ir.errors import HalopipeError
from planner.ir.files import read_plain, write_text
from planner.ir.validation import faults
from profiler.links.processes import LinkCosts

MOST_APART = 0.1
"""By how much the fixed kernel may take longer, or shorter, for what was kept to be believed."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MEASURING = ("profiler/links", "runtime/transport")
_ROOT = Path(__file__).resolve().parents[2]
_KIND = "machine"
_MOST_KEPT = 64
_MOST_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Quietness:
    """How the machine was while something was measured.

    Attributes:
        canary_s: of the fixed kernel (:func:`profiler.measure.noise.reference_kernel_s`).
        contended: as of :class:`planner.ir.profile.Provenance`.
    """

    canary_s: float
    contended: bool


@dataclass(frozen=True, slots=True)
class KeptLinks:
    """One measurement of the links.

    Attributes:
        key: of the machine and of what was asked (:func:`key_of`).
        host: that it was measured on.
        measured_at: as of :class:`planner.ir.profile.Provenance`.
    """

    key: str
    host: str
    measured_at: str
    quietness: Quietness
    links: LinkCosts

    def stands_for(self, now: Quietness, sites: bool) -> bool:
        """Whether the machine is as it was, and all was measured that is wanted now."""
        is_alike = abs(now.canary_s / self.quietness.canary_s - 1) <= MOST_APART
        is_quiet = now.contended or not self.quietness.contended
        return is_alike and is_quiet and (not sites or SITES in {each.operation for each in self.links.collectives})

    def wanted(self, sites: bool) -> LinkCosts:
        """As :func:`profiler.links.processes.measure_links` would have found them."""
        sums = self.links.collectives
        return replace(self.links, collectives=tuple(each for each in sums if sites or each.operation != SITES))


@dataclass(frozen=True, slots=True)
class _KeptFile:
    halopipe: str
    kept: tuple[KeptLinks, ...]


def key_of(devices: tuple[DeviceSpec, ...], quick: bool, transport: str, versions: Mapping[str, str]) -> str:
    """The name that a measurement is kept under; empty where nobody can tell one boot from another.

    Args:
        devices: between which.
        quick, transport: as of :func:`profiler.links.processes.measure_links`.
        versions: of packages and of the operating system.
    """
    try:
        boot = _BOOT.read_text(encoding="ascii").strip()
        cores = sorted(os.sched_getaffinity(0))
        code = [hashlib.sha256(path.read_bytes()).hexdigest() for name in _MEASURING for path in _sources(name)]
    except (OSError, AttributeError):
        return ""
    machine = [socket.gethostname(), boot, cores, platform.machine(), processor()]
    return fingerprint([machine, [device.kind for device in devices], quick, transport, dict(versions), code])


def kept(key: str, devices: tuple[DeviceSpec, ...]) -> KeptLinks | None:
    """What is kept under ``key``; None: the links are to be measured."""
    for each in _read() if key else ():
        cluster = Cluster(devices, each.links.links, each.links.collectives)
        if each.key == key:
            return each if each.quietness.canary_s > 0 and cluster.links and not faults(cluster) else None
    return None


def keep(key: str, measured_at: str, quietness: Quietness, links: LinkCosts) -> None:
    """Keeps ``links`` unless ``key`` is empty or the folder somebody else's; of all that is kept the newest stay."""
    file = _file()
    own = KeptLinks(key, socket.gethostname(), measured_at, quietness, links)
    with suppress(HalopipeError, OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if key and not foreign(file.parent):
            others = [each for each in _read() if each.key != key]
            write_text(file, canonical(_KeptFile(_KIND, (own, *others[: _MOST_KEPT - 1]))))


def _read() -> tuple[KeptLinks, ...]:
    try:
        file = _file()
        read = from_json(read_plain(file, _MOST_BYTES), _KeptFile) if not foreign(file.parent) else None
    except (OSError, ValueError, RecursionError):
        return ()
    return read.kept if read is not None and read.halopipe == _KIND else ()


def _file() -> Path:
    return cache_folder(os.environ) / "machine.json"


def _sources(folder: str) -> list[Path]:
    return sorted((_ROOT / folder).rglob("*.py"))
