"""Devices, and the links between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Evidence = str
"""How a figure is known: ``measured``, ``interpolated`` or ``datasheet``."""

MEASURED, INTERPOLATED, DATASHEET = "measured", "interpolated", "datasheet"
WITHIN_HOST, ACROSS_HOSTS = "within-host", "across-hosts"

ALL_REDUCE = "all_reduce"
"""A sum of gradients: every rank is ready, nothing else runs."""

STATISTICS = "statistics"
"""A small sum between two operators: the others may still compute, and the thread that moves messages sleeps."""


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One device, driven by one rank.

    Attributes:
        name: ``host/device``, unique in the cluster, such as ``n0/cpu1``.
        kind: devices of one kind share measurements.
        host: devices of one host share links within it.
        memory_bytes: usable memory.
        peak_flop_per_s: by dtype, where known.
        memory_bytes_per_s: memory bandwidth, where known.
    """

    name: str
    kind: str
    host: str
    memory_bytes: int
    peak_flop_per_s: Mapping[str, float] = field(default_factory=dict)
    memory_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """What moving a message costs.

    Attributes:
        latency_s, bandwidth_bytes_per_s: datasheet or fit; used where ``points`` is empty.
        points: measured (message bytes, seconds), by growing size; interpolated in log-log.
        duplex: whether both directions run at full speed at once (receives posted first).
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    points: tuple[tuple[int, float], ...] = ()
    duplex: bool = True
    evidence: Evidence = DATASHEET


@dataclass(frozen=True, slots=True)
class Collective:
    """What a collective over ``num_ranks`` ranks costs, measured: (bytes per rank, seconds) by growing size."""

    operation: str
    num_ranks: int
    link: str
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices by rank, the link classes by name, and collectives measured on them."""

    devices: tuple[DeviceSpec, ...]
    links: Mapping[str, Link]
    collectives: tuple[Collective, ...] = ()

    def link_class(self, src: int, dst: int) -> str:
        """Name of the link class between two ranks."""
        return WITHIN_HOST if self.devices[src].host == self.devices[dst].host else ACROSS_HOSTS

    def link(self, src: int, dst: int) -> Link:
        """The link between two ranks."""
        return self.links[self.link_class(src, dst)]

    def group_link_class(self, ranks: tuple[int, ...]) -> str:
        """The slowest link class that a collective over ``ranks`` uses."""
        return WITHIN_HOST if len({self.devices[rank].host for rank in ranks}) == 1 else ACROSS_HOSTS
