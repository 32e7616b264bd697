"""Devices, and the links between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Evidence = str
"""How a figure is known, best first: ``measured``, ``interpolated``, by the model of a ``family``, or ``datasheet``."""

MEASURED, INTERPOLATED, FAMILY, DATASHEET = "measured", "interpolated", "family", "datasheet"
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
        core_share: which part of a link's ``sender_core`` and ``receiver_core`` the device's computing loses: 1 for a
            core that also moves messages, 0 for an accelerator beside it.
    """

    name: str
    kind: str
    host: str
    memory_bytes: int
    peak_flop_per_s: Mapping[str, float] = field(default_factory=dict)
    memory_bytes_per_s: float | None = None
    core_share: float = field(default=1.0, metadata={"added": "0.1"})


@dataclass(frozen=True, slots=True)
class Link:
    """What moving a message costs.  All tables are (message bytes, seconds), by growing size.

    Attributes:
        latency_s: datasheet or fit; used where ``points`` is empty.
        bandwidth_bytes_per_s: of a long stream of messages: what is beyond ``points`` takes so long by the byte.
        points: measured on an idle link, from the call that sends to the arrival; interpolated in log-log.
        duplex: whether both directions run at full speed at once (receives posted first).
        burst_bytes: what passes at once after a silence, before ``bandwidth_bytes_per_s`` counts (a token bucket's).
        sending: how long the call that sends keeps its rank; empty: not at all.
        sender_core: by how much a computation on the sender's core is delayed while one message of that size moves,
            beyond ``sending``; empty: not at all.
        receiver_core: likewise on the receiver's core.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    points: tuple[tuple[int, float], ...] = ()
    duplex: bool = True
    evidence: Evidence = DATASHEET
    burst_bytes: int = field(default=0, metadata={"added": "0.1"})
    sending: tuple[tuple[int, float], ...] = field(default=(), metadata={"added": "0.1"})
    sender_core: tuple[tuple[int, float], ...] = field(default=(), metadata={"added": "0.1"})
    receiver_core: tuple[tuple[int, float], ...] = field(default=(), metadata={"added": "0.1"})


@dataclass(frozen=True, slots=True)
class PairLink:
    """The link from one host to another, where it differs from its class."""

    src_host: str
    dst_host: str
    link: Link


@dataclass(frozen=True, slots=True)
class Collective:
    """What a collective over ``num_ranks`` ranks costs, measured: (bytes per rank, seconds) by growing size.

    Attributes:
        num_hosts: that the ranks are on; 0: one if ``link`` is within a host, else as many as ranks.
    """

    operation: str
    num_ranks: int
    link: str
    points: tuple[tuple[int, float], ...]
    num_hosts: int = field(default=0, metadata={"added": "0.1"})


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices by rank, the link classes by name, and collectives measured on them.

    Attributes:
        pairs: links between hosts that are not as their class says.
    """

    devices: tuple[DeviceSpec, ...]
    links: Mapping[str, Link]
    collectives: tuple[Collective, ...] = ()
    pairs: tuple[PairLink, ...] = field(default=(), metadata={"added": "0.1"})

    def link_class(self, src: int, dst: int) -> str:
        """Name of the link class between two ranks."""
        return WITHIN_HOST if self.devices[src].host == self.devices[dst].host else ACROSS_HOSTS

    def link(self, src: int, dst: int) -> Link:
        """The link from one rank to another: that of their hosts if one is stated, else that of their class."""
        if self.pairs:
            ends = self.devices[src].host, self.devices[dst].host
            for pair in self.pairs:
                if (pair.src_host, pair.dst_host) == ends:
                    return pair.link
        return self.links[self.link_class(src, dst)]

    def group_link_class(self, ranks: tuple[int, ...]) -> str:
        """The slowest link class that a collective over ``ranks`` uses."""
        return WITHIN_HOST if len({self.devices[rank].host for rank in ranks}) == 1 else ACROSS_HOSTS

    def group_alike(self, ranks: tuple[int, ...]) -> tuple[object, ...]:
        """Equal for groups that pay the same for what they do together."""
        hosts = tuple(self.devices[rank].host for rank in ranks)
        return self.group_link_class(ranks), len(ranks), len(set(hosts)), hosts if self.pairs else ()

    def nic_bytes_per_s(self, host: str) -> float | None:
        """What the network card of a host carries in each direction: the most that a link from or to it does.

        None where the host has no link to another.
        """
        others = {device.host for device in self.devices} - {host}
        stated = {(pair.src_host, pair.dst_host): pair.link for pair in self.pairs}
        ends = [(host, other) for other in others] + [(other, host) for other in others]
        links = [stated.get(pair, self.links.get(ACROSS_HOSTS)) for pair in ends]
        return max((link.bandwidth_bytes_per_s for link in links if link is not None), default=None)
