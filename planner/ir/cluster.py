"""Devices, the groups they are in, and the links between them.

Groups nest: an NVLink island within a host within a rack.  A tier is a level of them with a name, and links and
collectives are stated by tier.  Two devices use the tier of the smallest group that holds both, a collective that of
the smallest group that holds all of its ranks.

    rack r0         host n0         island n0/a     n0/gpu0, n0/gpu1        nvlink between these two
                                    island n0/b     n0/gpu2, n0/gpu3        within-host from n0/gpu0 to these
                    host n1         island n1/a     n1/gpu0, n1/gpu1        within-rack from n0/gpu0 to these
    rack r1         host n2         island n2/a     n2/gpu0, n2/gpu1        across-racks from n0/gpu0 to these

A cluster that states no tiers has :data:`HOST_TIERS`: links within a host and links across hosts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations

RankIds = tuple[int, ...]
"""Ranks that have something in common: the members of a stage, of a sum, in their order."""

Evidence = str
"""How a figure is known, best first: ``measured``, ``interpolated``, by the model of a ``family`` of layers, by models
of ``kernels`` that others measured on such a device, or ``datasheet``."""

MEASURED = "measured"
INTERPOLATED = "interpolated"
FAMILY = "family"
KERNELS = "kernels"
DATASHEET = "datasheet"

HOST = "host"
"""The level of groups that every device is in: its host."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A level of groups, and the name of the links inside of one that lead from one smaller group to another.

    Attributes:
        name: of the link in ``Cluster.links`` and of the tables in ``Cluster.collectives``.
        within: the level: ``host``, a key of ``DeviceSpec.groups``, or empty: all devices.
    """

    name: str
    within: str = ""


WITHIN_HOST = "within-host"
ACROSS_HOSTS = "across-hosts"

HOST_TIERS = (Tier(WITHIN_HOST, HOST), Tier(ACROSS_HOSTS))
"""Of a cluster that states none; innermost first, as always."""


def host_tier(hosts: Collection[str]) -> str:
    """The tier of :data:`HOST_TIERS` that devices on these hosts use."""
    return HOST_TIERS[len(set(hosts)) > 1].name


SHARED_MEMORY = "shared memory"
GLOO = "gloo"
MPI = "mpi"
NCCL = "nccl"
IN_PROCESS = "in process"
"""What moves messages between ranks: the names of transports."""

STANDING_BYTES = 1 << 20
"""Largest message for which a receive of gloo stands ready: a larger buffer would lie idle, and its time is that of
the data."""


PAIR_SUM_BYTES = 1 << 18
"""Up to here two ranks that sum over gloo exchange their terms and add, which takes half the time of its ring; larger
sums, and those of more ranks, are rings.  Pieces of larger sums that are exchanged have the same limit.  Receives of
what is exchanged stand ready, :data:`STANDING_BYTES` of all of them together.

Measured on two cores of one host, median of both ways: 4 KiB 0.16 against 0.35 ms, 256 KiB 0.18 against 0.38 ms,
1 MiB 0.70 against 0.67 ms, 64 MiB 74 against 37 ms.
"""


def transport_text(within: str, between: str) -> str:
    """What ranks exchange by, within their hosts and between them; empty where nothing is exchanged or known."""
    if within and between and within != between:
        return f"{within}, {between} between hosts"
    return within or between


ALL_REDUCE = "all_reduce"
"""A sum of gradients: every rank is ready, nothing else runs."""

STATISTICS = "statistics"

NORMALISATION = "normalisation"
PIECES = "pieces"
SITES = "sites"
PARTIAL_SUMS = "partial sums"
GRADIENT_SUMS = "gradient sums"
"""What a rank computes around an exchange of statistics, of parts of a tensor, of rows over shared sites, around a
small sum of what ranks have parts of, and around the sum of a bucket of gradients: collectives over a group of one."""

MEMORY = "memory"
"""Passes over memory (two numbers read, one written) by several ranks of a host at once, and by one of them alone."""

AROUND = (NORMALISATION, PIECES, SITES, PARTIAL_SUMS, GRADIENT_SUMS)
"""All of these; a profile that was made before one of them was measured lacks it."""
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
        groups: that it is in beside its host, by level; at a level that it does not name it is in no larger group than
            one level below.
        on_chip_bytes: a second memory, beside the multipliers (block RAM of an FPGA): it has the parameters, their
            gradients and the optimiser's state where all of those that the device holds fit; 0: there is none.
        on_chip_bytes_per_s: its bandwidth; None: it keeps up with any computation.
        streams: whether it sends what it makes, and computes on what comes, as it goes along (an FPGA); schedules that
            stream do so between two such devices.
    """

    name: str
    kind: str
    host: str
    memory_bytes: int
    peak_flop_per_s: Mapping[str, float] = field(default_factory=dict)
    memory_bytes_per_s: float | None = None
    core_share: float = field(default=1.0, metadata={"added": "0.1"})
    groups: Mapping[str, str] = field(default_factory=dict, metadata={"added": "0.1"})
    streams: bool = field(default=False, metadata={"added": "0.1"})
    on_chip_bytes: int = field(default=0, metadata={"added": "0.1"})
    on_chip_bytes_per_s: float | None = field(default=None, metadata={"added": "0.1"})

    @property
    def memories(self) -> tuple[int, ...]:
        """Bytes of each of its memories: of the main one, and of what is beside it."""
        return (self.memory_bytes, self.on_chip_bytes) if self.on_chip_bytes else (self.memory_bytes,)

    def group(self, level: str) -> str | None:
        """The group of that level that the device is in."""
        return self.host if level == HOST else self.groups.get(level)


@dataclass(frozen=True, slots=True)
class Link:
    """What moving a message costs.  All tables are (message bytes, seconds), by growing size.

    Attributes:
        latency_s: datasheet or fit; used where ``points`` is empty.
        bandwidth_bytes_per_s: of a long stream of messages: what is beyond ``points`` takes so long by the byte.
            Within a host no more than the two largest of ``points`` show, as caches hold the messages of a stream.
        points: measured on an idle link, from the call that sends to the arrival; interpolated in log-log.
        duplex: whether both directions run at full speed at once (receives posted first).
        burst_bytes: what passes at once after a silence, before ``bandwidth_bytes_per_s`` counts (a token bucket's).
        sending: how long the call that sends keeps its rank; empty: not at all.
        sender_core: by how much a computation on the sender's core is delayed while one message of that size moves,
            beyond ``sending``; empty: not at all.
        receiver_core: likewise on the receiver's core.
        transport: that it was measured with; empty: of a description, or of a profile of before (then it was gloo).
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
    transport: str = field(default="", metadata={"added": "0.1"})

    @property
    def in_background(self) -> bool:
        """Whether something moves messages while their ranks compute, such as gloo's thread or a GPU.

        In shared memory the calls of the ranks do all of it; MPI goes on in calls as well, unless it has a thread.
        """
        return self.transport not in (SHARED_MEMORY, MPI)


@dataclass(frozen=True, slots=True)
class PairLink:
    """The link from one host to another, or within one, where it differs from that of its tier."""

    src_host: str
    dst_host: str
    link: Link


@dataclass(frozen=True, slots=True)
class Collective:
    """What a collective over ``num_ranks`` ranks costs, measured: (bytes per rank, seconds) by growing size.

    Attributes:
        operation: :data:`ALL_REDUCE` and those below it.
        link: the tier that the ranks use.
        num_hosts: that the ranks are on; 0: one if ``link`` is within a host, else as many as ranks.
    """

    operation: str
    num_ranks: int
    link: str
    points: tuple[tuple[int, float], ...]
    num_hosts: int = field(default=0, metadata={"added": "0.1"})


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices by rank, the links by tier, and collectives measured on them.

    Attributes:
        pairs: links between hosts that are not as their tier says.
        tiers: innermost first, the last one for all devices; none: :data:`HOST_TIERS`.
    """

    devices: tuple[DeviceSpec, ...]
    links: Mapping[str, Link]
    collectives: tuple[Collective, ...] = ()
    pairs: tuple[PairLink, ...] = field(default=(), metadata={"added": "0.1"})
    tiers: tuple[Tier, ...] = field(default=(), metadata={"added": "0.1"})

    @property
    def nested_tiers(self) -> tuple[Tier, ...]:
        """The tiers, innermost first."""
        return self.tiers or HOST_TIERS

    def link_class(self, src: int, dst: int) -> str:
        """The tier of the link between two ranks: that of the smallest group that holds both."""
        return self._tier_of(self.devices[src], self.devices[dst])

    def link(self, src: int, dst: int) -> Link:
        """The link from one rank to another: that of their hosts if one is stated, else that of their tier."""
        pair = self.pair(src, dst)
        return pair.link if pair is not None else self.links[self.link_class(src, dst)]

    def pair(self, src: int, dst: int) -> PairLink | None:
        """The link that is stated for the hosts of two ranks; groups inside a host keep their own."""
        if self.pairs:
            ends = self.devices[src].host, self.devices[dst].host
            for pair in self.pairs:
                if (pair.src_host, pair.dst_host) == ends:
                    is_inside = ends[0] == ends[1] and self.link_class(src, dst) != self.pair_tier(pair)
                    return None if is_inside else pair
        return None

    def pair_tier(self, pair: PairLink) -> str:
        """The tier that a stated link belongs to."""
        if pair.src_host == pair.dst_host:
            return self.host_tier
        on = {device.host: device for device in self.devices}
        if pair.src_host not in on or pair.dst_host not in on:
            return self.nested_tiers[-1].name
        return self._tier_of(on[pair.src_host], on[pair.dst_host])

    def group_link_class(self, ranks: tuple[int, ...]) -> str:
        """The tier that a collective over ``ranks`` uses: that of the smallest group that holds them all."""
        return self._tier_of(*(self.devices[rank] for rank in ranks))

    def group_alike(self, ranks: tuple[int, ...]) -> tuple[object, ...]:
        """Equal for groups that pay the same for what they do together."""
        hosts = tuple(self.devices[rank].host for rank in ranks)
        return self.group_link_class(ranks), len(ranks), len(set(hosts)), hosts if self.pairs else ()

    def groups_of(self, rank: int) -> tuple[str, ...]:
        """The groups that a rank is in by level, innermost first, all devices left out."""
        return _path(self.devices[rank], self.nested_tiers)

    def tiers_used(self) -> tuple[str, ...]:
        """The tiers that two devices use, innermost first."""
        tiers = self.nested_tiers
        smaller: list[dict[str, set[str]]] = [{} for _ in tiers]
        for device in self.devices:
            inner = device.name
            for level, group in enumerate((*_path(device, tiers), "")):
                smaller[level].setdefault(group, set()).add(inner)
                inner = group
        return tuple(
            tier.name for tier, of in zip(tiers, smaller, strict=True) if any(len(inner) > 1 for inner in of.values())
        )

    def unlinked(self) -> tuple[str, int, int] | None:
        """A tier without a link, and two ranks that would use it; None if any two devices are linked."""
        if set(self.tiers_used()) <= set(self.links):
            return None
        return next(((self.link_class(*ends), *ends) for ends in self._unlinked()), None)

    def _unlinked(self) -> Iterator[tuple[int, int]]:
        alike: dict[tuple[str, ...], list[int]] = {}
        for rank in range(len(self.devices)):
            alike.setdefault(self.groups_of(rank), []).append(rank)
        some = [rank for ranks in alike.values() for rank in ranks[:2]]
        for a, b in combinations(some, 2):
            for ends in ((a, b), (b, a)):
                if self.link_class(*ends) not in self.links and self.pair(*ends) is None:
                    yield ends

    def without(self, names: Collection[str]) -> Cluster:
        """The cluster less some devices, and what is stated of hosts of which none is left."""
        devices = tuple(device for device in self.devices if device.name not in names)
        hosts = {device.host for device in devices}
        pairs = tuple(pair for pair in self.pairs if {pair.src_host, pair.dst_host} <= hosts)
        return replace(self, devices=devices, pairs=pairs)

    def on_host(self, device: DeviceSpec, host: str) -> DeviceSpec:
        """The same device on another host, whose smaller groups are its own."""
        if host == device.host:
            return device
        levels = [tier.within for tier in self.nested_tiers]
        smaller = levels[: levels.index(HOST)]
        groups = {
            level: f"{host}/{group.removeprefix(f'{device.host}/')}" if level in smaller else group
            for level, group in device.groups.items()
        }
        return replace(device, name=f"{host}/{device.name.rpartition('/')[2]}", host=host, groups=groups)

    @property
    def host_tier(self) -> str:
        """The tier of devices of one host that are in no smaller group together."""
        return next(tier.name for tier in self.nested_tiers if tier.within == HOST)

    def nic_bytes_per_s(self, host: str) -> float | None:
        """What the network card of a host carries in each direction: the most that a link from or to it does.

        None where the host has no link to another.
        """
        on = {device.host: device for device in self.devices}
        stated = {(pair.src_host, pair.dst_host): pair.link for pair in self.pairs}
        links = []
        for other in on.keys() - {host}:
            of_tier = self.links.get(self._tier_of(on[host], on[other]))
            links += [stated.get(ends, of_tier) for ends in ((host, other), (other, host))]
        return max((link.bandwidth_bytes_per_s for link in links if link is not None), default=None)

    def _tier_of(self, *devices: DeviceSpec) -> str:
        tiers = self.nested_tiers
        for tier in tiers[:-1]:
            group = devices[0].group(tier.within)
            if group is not None and all(device.group(tier.within) == group for device in devices):
                return tier.name
        return tiers[-1].name


def _path(device: DeviceSpec, tiers: tuple[Tier, ...]) -> tuple[str, ...]:
    groups = []
    inner = device.name
    for tier in tiers[:-1]:
        inner = device.group(tier.within) or f"{inner} alone"
        groups.append(inner)
    return tuple(groups)
