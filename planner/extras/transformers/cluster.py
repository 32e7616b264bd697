"""A cluster of alike GPUs, as a transformer's exchanges see it.

group       members, ``stride`` ranks apart: ranks lie on hosts in order: tensor innermost, then context, data, pipeline
within      of one host: the system's table, or a ring by latency and rate
across      a ring over hosts; groups that talk at once share the cards of their host:
t = steps x latency + factor x bytes / min(host rate / groups, rate within)
domain      hosts that NVLink joins: what is said here of a host is said of all of them together
to all      no ring: of what a member sends, its share for other hosts passes the cards at a rank's share of their rate
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log2

from planner.extras.catalogue.listing import device, link
from planner.extras.kernels.clusters import SYSTEMS, System
from planner.extras.kernels.estimates import DATASHEET, NOTHING, Estimate
from planner.extras.kernels.links import (
    ALL_REDUCE,
    ALL_TO_ALL,
    ALPHA_ACROSS_S,
    EFFICIENCY,
    SEND,
    AlphaBeta,
    SystemLinks,
    bus_factor,
    links,
)
from planner.extras.kernels.models import Kernels, kernels
from planner.extras.transformers.host import HOSTS, HostSide
from planner.extras.transformers.passes import Timed
from planner.extras.transformers.shape import ParallelDegrees
from planner.ir.errors import UnknownNameError, nearest

GBIT = 1e9 / 8
EIGHT_BIT = "float8"
"""What the catalogue calls numbers of 8 bits."""
RESERVED_BYTES = 1.5 * 2**30
"""Of a device's memory what the CUDA context, NCCL's buffers and the libraries' workspaces take."""
FRAGMENTED = 0.06
"""Of the rest, what an allocator loses."""
TCP_OF_EIGHT = 0.58
"""What NCCL over TCP sends of a host's card while its eight GPUs do: 14.5 to 14.9 of 32 Gbit/s between two hosts of 8
V100, 22.2 to 22.9 between four; one GPU a host gets 30.4 to 31.4 (github.com/NVIDIA/nccl/issues/209)."""
TAKEN_WITHIN = 0.46
TAKEN_ACROSS = 0.07
"""Of its own time, what an exchange adds to products that run beside it, by NVLink and by network cards: medians of
A100 (0.41 to 0.55, and 0.03 to 0.12) and V100 (0.05 to 0.67, and 0.04 to 0.15), as Mist measured them
(github.com/Dazz993/Mist, ``mist/tools/backup``).  V100's alone would say 0.26 of A100's 0.48, and 0.08 of its 0.065."""
_LOW = 0.75
_HIGH = 1.5
"""Of a ring by a data sheet."""


@dataclass(frozen=True, slots=True)
class GpuCluster:
    """Hosts of ``per_host`` alike devices.

    Attributes:
        device: its name in the catalogue.
        within: of a host's devices: the name of a system that was measured, or what each sends in one direction.
        across: the network cards of a host, together.
        of_network: what messages get of the cards' rate; TCP leaves them about so much.
        memory_bytes: of a device; 0: as the catalogue says.
        island: neighbours that NVLink joins, where it does not join all of a host; 0: all of them.
        domain: devices that it joins, where they are of several hosts; 0: those of one host.  Jobs beyond one domain
            are laid out so that a group that fits into one is in one (of NVL72's 72 GPUs they leave 8 idle, if groups
            are powers of two).
        stream_bytes_per_s: what one rank gets of the cards at most; 0: all, where it is alone.
        timed: passes that were measured on these devices, in place of those of kernels.
        host: what hosts keep for their devices; None: nothing is known of them.
    """

    name: str
    device: str
    per_host: int
    within: str | AlphaBeta
    across: AlphaBeta
    dtype: str = "float16"
    of_network: float = 0.85
    memory_bytes: float = 0.0
    island: int = 0
    domain: int = 0
    stream_bytes_per_s: float = 0.0
    timed: Timed | None = None
    host: HostSide | None = None

    def at(self, ways: ParallelDegrees, stage: int) -> GpuCluster:
        """Where a stage is: here."""
        del ways, stage
        return self

    def alone(self, ways: ParallelDegrees) -> GpuCluster:
        """Where all stages are."""
        del ways
        return self

    @property
    def width(self) -> int:
        """Bytes of a number that is kept or sent."""
        return 4 if self.dtype == "float32" else 2

    @property
    def kernels(self) -> Kernels:
        """What kernels take on its devices."""
        return _kernels(self.device, self.dtype)

    @property
    def eight_bit(self) -> Kernels:
        """What products in 8 bits take on its devices."""
        return _kernels(self.device, EIGHT_BIT)

    @property
    def usable_bytes(self) -> float:
        """Of a device's memory what tensors may fill."""
        entry = device(self.device)
        whole = self.memory_bytes or (entry.memory_bytes.value if entry.memory_bytes else 0.0)
        return (1 - FRAGMENTED) * (whole - RESERVED_BYTES)

    @property
    def joined(self) -> int:
        """Devices that exchange without network cards: those of a host, or of hosts that NVLink joins."""
        return self.domain or self.per_host

    def filled(self, ranks: int) -> int:
        """How many of those the stages of ``ranks`` fill."""
        return self.domain // ranks * ranks if ranks <= self.domain else self.joined

    def text(self, devices: int) -> str:
        """So many of its devices, for people."""
        domain = f", NVLink joins {self.domain}" if self.domain else ""
        return f"{devices} {self.device} ({self.name}, {self.per_host} a host{domain})"

    def exchange(self, name: str, num_bytes: float, members: int, stride: int = 1) -> Estimate:
        """A collective of ``members`` ranks, ``stride`` apart, while the other groups of their hosts do the same.

        ``num_bytes``: of the whole tensor.
        """
        if members <= 1 or num_bytes <= 0:
            return NOTHING
        if members * stride <= self.joined:
            return self._within(name, num_bytes, members, stride)
        on_host = max(1, self.joined // stride)
        groups = self.joined // on_host
        if name == ALL_TO_ALL:
            return self._to_all(num_bytes, members, stride, on_host)
        rate = self._card_rate(groups)
        if on_host > 1:
            rate = min(rate, self._rate_within(on_host, stride))
        steps = log2(members) * (2 if name == ALL_REDUCE else 1)
        seconds = self.across.alpha_s * steps + bus_factor(name, members) * num_bytes / rate
        return by_data_sheet(seconds)

    def _to_all(self, num_bytes: float, members: int, stride: int, on_host: int) -> Estimate:
        """Each member has a part for every other: those for other hosts leave by the cards, which all ranks share."""
        inside = self._within(ALL_TO_ALL, num_bytes * on_host / members, on_host, stride) if on_host > 1 else NOTHING
        away = num_bytes * (members - on_host) / members
        across_s = self.across.alpha_s * log2(members) + away / self._card_rate(self.joined)
        return by_data_sheet(max(inside.seconds, across_s))

    def waited_s(self, exchange: Estimate, beside_s: float, members: int, stride: int = 1) -> float:
        """What a pass of ``beside_s`` grows by, with an exchange beside it.

        By what is left of the exchange, and no less than its kernels take of the processors and the memory.
        """
        share = TAKEN_WITHIN if members * stride <= self.joined else TAKEN_ACROSS
        return max(exchange.seconds - beside_s, share * exchange.seconds)

    def send(self, num_bytes: float, stride: int, at_once: int = 1) -> Estimate:
        """A message to the rank ``stride`` further on, while ``at_once`` ranks of each host send one too."""
        if stride < self.joined:
            if isinstance(self.within, AlphaBeta):
                return by_data_sheet(self.within.alpha_s + num_bytes / self.within.bytes_per_s)
            if self.island:  # of a chain of stages the slowest message counts
                return self._between_islands(SEND, num_bytes, 2)
            return self._links.collective(SEND, num_bytes, 2, 2)
        return by_data_sheet(self.card_s(num_bytes, at_once))

    def card_s(self, num_bytes: float, at_once: int) -> float:
        """What the cards of a host take of a message of ``num_bytes``, while ``at_once`` of its ranks have one too.

        No message has more cards than those of its own host.
        """
        rate = min(self._card_rate(at_once), self._card_rate(self.joined // self.per_host))
        return self.across.alpha_s + num_bytes / rate

    def _card_rate(self, streams: int) -> float:
        """Bytes a second of each of so many streams of a host, or of the hosts that NVLink joins."""
        hosts = self.joined / self.per_host
        share = self.of_network * hosts * self.across.bytes_per_s / streams
        return min(share, self.stream_bytes_per_s or share)

    def latency_s(self, stride: int) -> float:
        """Of the least message to the rank ``stride`` further on."""
        if stride < self.joined:
            return self.within.alpha_s if isinstance(self.within, AlphaBeta) else self.send(1, stride).seconds
        return self.across.alpha_s

    @property
    def _links(self) -> SystemLinks:
        return _links(str(self.within))

    def _between_islands(self, name: str, num_bytes: float, members: int) -> Estimate:
        """At the rate that a ring of the whole host has, which PCIe passes on from island to island."""
        ratio = bus_factor(name, members) / bus_factor(ALL_REDUCE, self.per_host)
        return self._links.collective(ALL_REDUCE, num_bytes, self.per_host, self.per_host) * ratio

    def _within(self, name: str, num_bytes: float, members: int, stride: int = 1) -> Estimate:
        if self.island and members * stride > self.island:
            return self._between_islands(name, num_bytes, members)
        if not isinstance(self.within, AlphaBeta):
            return self._links.collective(name, num_bytes, members, members)
        steps = log2(members) * (2 if name == ALL_REDUCE else 1)
        ring = bus_factor(name, members) * num_bytes / self.within.bytes_per_s
        return by_data_sheet(self.within.alpha_s * steps + ring)

    def ring_s(self, num_bytes: float, members: int, stride: int = 1) -> float:
        """What so many bytes take at the rate of a ring of so many devices of a host; nothing, of one."""
        return num_bytes / self._rate_within(members, stride) if members > 1 else 0.0

    def _rate_within(self, members: int, stride: int = 1) -> float:
        """Bytes a second that a ring of so many devices of a host, ``stride`` apart, passes on."""
        if isinstance(self.within, AlphaBeta):
            return self.within.bytes_per_s
        num_bytes = 64 * 2**20
        return (
            bus_factor(ALL_REDUCE, members) * num_bytes / self._within(ALL_REDUCE, num_bytes, members, stride).seconds
        )


_kernels = functools.cache(kernels)
_links = functools.cache(links)


def by_data_sheet(seconds: float) -> Estimate:
    """With the range of a data sheet's figures."""
    return Estimate(seconds, seconds * _LOW, seconds * _HIGH, DATASHEET)


@functools.cache
def clusters() -> Mapping[str, GpuCluster]:
    """The clusters that have a name."""
    named = [
        GpuCluster(
            name,
            system.device,
            system.per_host,
            system.tables,
            _cards(system),
            of_network=EFFICIENCY,
            domain=system.domain,
        )
        for name, system in SYSTEMS.items()
    ]
    named += [
        # Pairs of A100 that NVLink joins, two to a host, and PCIe between them (Azure's NC96ads v4; 80 Gbit/s a host).
        GpuCluster("a100-pairs", "A100-80GB", 4, "a100_pairwise_nvlink", AlphaBeta(60e-6, 80 * GBIT), island=2),
        # p3.16xlarge: NVLink-2 by tables of hosts of 2 and 4 V100; 25 Gbit/s a host.
        GpuCluster("p3.16xlarge", "V100-16GB", 8, "v100_host", AlphaBeta(60e-6, 25 * GBIT), of_network=TCP_OF_EIGHT),
        # p3.2xlarge: one V100 a host, up to 10 Gbit/s.
        GpuCluster("p3.2xlarge", "V100-16GB", 1, AlphaBeta(20e-6, 1e9), AlphaBeta(100e-6, 10 * GBIT)),
        # g4dn.12xlarge: 4 T4, 50 Gbit/s between them by PCIe (Li et al. 2022, AMP) and a host.
        GpuCluster("g4dn.12xlarge", "T4", 4, AlphaBeta(30e-6, 50 * GBIT), AlphaBeta(60e-6, 50 * GBIT)),
    ]
    return {cluster.name: replace(cluster, host=HOSTS.get(cluster.name)) for cluster in named}


def _cards(system: System) -> AlphaBeta:
    """A card for each device of a host, together."""
    return AlphaBeta(ALPHA_ACROSS_S, system.per_host * link(system.network).bandwidth_bytes_per_s.value)


def named_cluster(name: str) -> GpuCluster:
    """The cluster of that name.

    Raises:
        UnknownNameError: none is known.
    """
    cluster = clusters().get(name)
    if cluster is None:
        having = [each.name for each in clusters().values() if name.lower() in each.device.lower()]
        raise UnknownNameError(
            f"no cluster {name!r}",
            [f"known: {', '.join(clusters())}"],
            [*(having or nearest(name.lower(), clusters())), "a cluster file (.yaml) of your hosts"],
        )
    return cluster
