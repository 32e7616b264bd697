"""Clusters of unlike GPUs: pools of alike hosts in one zone each, and the links between pools.

    stages        one after another from the last one on, each in the next free GPUs of its pool; ranks of a tensor
                  group, and of a stage where it fits, share a host
    message       within a host, if both stages are on one; else over the cards of both ends: the slower end counts, and
                  between pools the link that joins them; the tensor ranks that receive parts gather them

Exchanges of a stage stay in its pool: they are those of a cluster of alike GPUs
(:mod:`planner.extras.transformers.cluster`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain, combinations, islice, permutations
from math import inf

from planner.extras.kernels.estimates import NOTHING, Estimate
from planner.extras.kernels.links import EFFICIENCY, AlphaBeta
from planner.extras.transformers.cluster import GpuCluster, by_data_sheet
from planner.extras.transformers.passes import Timed
from planner.extras.transformers.shape import ParallelDegrees, Sends, Transformer
from planner.ir.cluster import HOST, Cluster, Link
from planner.ir.errors import UsageError


@dataclass(frozen=True, slots=True)
class GpuPool:
    """Alike hosts of one zone.

    Attributes:
        cluster: of such hosts; its name is the pool's.
        devices: in all.
        ranks: theirs in the cluster that the pool is of, host by host; empty: they have none.
    """

    cluster: GpuCluster
    devices: int
    ranks: tuple[int, ...] = ()

    def after(self, used: int, tensor: int, copies: int) -> tuple[int, int]:
        """The GPUs of the next stage: from the first one on, up to the last, exclusive; ``used`` are before it."""
        size = tensor * copies
        per_host = self.cluster.per_host
        unit = size if per_host % size == 0 else per_host
        start = -(-used // unit) * unit
        return start, start + size


@dataclass(frozen=True, slots=True)
class Pools:
    """Pools that a pipeline may go through.

    Attributes:
        between: what joins a host of one pool to one of another, by their names.
        whole: all pools as one cluster, by the slowest link between hosts, if their hosts are alike.
    """

    name: str
    pools: tuple[GpuPool, ...]
    between: Mapping[tuple[str, str], AlphaBeta]
    whole: GpuCluster | None = None

    @property
    def device(self) -> str:
        """How many of which kind."""
        return ", ".join(f"{pool.devices} {pool.cluster.name}" for pool in self.pools)

    @property
    def devices(self) -> int:
        """Of all pools."""
        return sum(pool.devices for pool in self.pools)

    @property
    def width(self) -> int:
        """Bytes of a number that is kept or sent."""
        return self.pools[0].cluster.width

    def pool(self, name: str) -> GpuPool:
        """The pool of that name."""
        return next(pool for pool in self.pools if pool.cluster.name == name)

    def at(self, ways: ParallelDegrees, stage: int) -> GpuCluster:
        """Where a stage is."""
        return self.whole if self.whole and not ways.pools else self.pool(ways.pools[stage]).cluster

    def places(self, ways: ParallelDegrees) -> list[GpuRange]:
        """The GPUs of each stage."""
        used = dict.fromkeys(ways.pools, 0)
        places: list[GpuRange] = []
        for name, tensor in reversed(list(zip(ways.pools, ways.degrees, strict=True))):
            pool = self.pool(name)
            start, used[name] = pool.after(used[name], tensor, ways.copies)
            places.append(GpuRange(pool.cluster, tensor, start, used[name]))
        return places[::-1]

    def hop(self, ways: ParallelDegrees, num_bytes: float, one: GpuRange, other: GpuRange) -> Estimate:
        """A message of a replica between two stages."""
        return message(ways, num_bytes, one, other, self.between.get((one.cluster.name, other.cluster.name)))

    def least_hop_s(self, ways: ParallelDegrees, num_bytes: float, cluster: GpuCluster, tensor: int) -> float:
        """What a stage of that degree in that pool waits for a message at least."""
        if ways.sends is Sends.OVERLAPPED:
            return 0.0
        gathered_s = 0.0
        if not ways.sequence_parallel:
            gathered_s = cluster.exchange("all_gather", num_bytes, tensor).seconds
        sent_s = cluster.card_s(num_bytes / tensor, min(cluster.joined, tensor * ways.copies))
        if (tensor + 1) * ways.copies <= cluster.joined:
            sent_s = min(sent_s, cluster.send(num_bytes / tensor, 1).seconds)
        return sent_s + gathered_s

    def sum_of_two(self, shape: Transformer, ways: ParallelDegrees, first: GpuRange, last: GpuRange) -> Estimate:
        """The embedding's gradient, which the first stage and the last add up, replica by replica."""
        num_bytes = shape.vocab * shape.hidden * (4 if ways.fp32_gradients else 2)
        # Of two ranks each sends half and receives half, twice; what is summed stays cut.
        return self.hop(replace(ways, sequence_parallel=True), num_bytes, first, last)

    def alone(self, ways: ParallelDegrees) -> GpuCluster | Pools:
        """Where all stages are, if devices are alike there and the stages have one degree: a pool, or all of them."""
        return self if ways.tensors or len(set(ways.pools)) > 1 else self.at(ways, 0)

    def joined(self) -> Pools:
        """Pools that are alike, and as near to one another as their own hosts are, as one of the first's name."""
        pools = list(self.pools)
        for one, other in combinations(self.pools, 2):
            if other in pools and one in pools and self._is_alike(one, other):
                at = pools.index(one)
                pools[at] = GpuPool(one.cluster, one.devices + other.devices, one.ranks + other.ranks)
                pools.remove(other)
                return Pools(self.name, tuple(pools), self.between).joined()
        return self

    def _is_alike(self, one: GpuPool, other: GpuPool) -> bool:
        names = one.cluster.name, other.cluster.name
        clusters = [_kind(pool.cluster) for pool in (one, other)]
        if clusters[0] != clusters[1] or self.between[names] != _network(one.cluster):
            return False
        others = {pool.cluster.name for pool in self.pools} - set(names)
        return all(
            self.between[names[0], third] == self.between[names[1], third]
            and self.between[third, names[0]] == self.between[third, names[1]]
            for third in others
        )


@dataclass(frozen=True, slots=True)
class GpuRange:
    """The GPUs of a stage in its pool, ``stop`` exclusive."""

    cluster: GpuCluster
    tensor: int
    start: int
    stop: int

    def shares_host(self, other: GpuRange) -> bool:
        """Whether all GPUs of both are on one host, or on hosts that NVLink joins."""
        filled = self.cluster.filled(self.stop - self.start)
        hosts = [end // filled for end in (self.start, self.stop - 1, other.start, other.stop - 1)]
        return self.cluster.name == other.cluster.name and len(set(hosts)) == 1


def message(
    ways: ParallelDegrees, num_bytes: float, one: GpuRange, other: GpuRange, wire: AlphaBeta | None = None
) -> Estimate:
    """A message of a replica between two stages, of ``num_bytes`` in all; ``wire`` joins their pools."""
    gathered = NOTHING
    if not ways.sequence_parallel:
        parts = [end.cluster.exchange("all_gather", num_bytes, end.tensor) for end in (one, other)]
        gathered = max(parts, key=lambda part: part.seconds)
    if one.shares_host(other):
        return one.cluster.send(num_bytes / min(one.tensor, other.tensor), 1) + gathered
    ends = [(end, min(end.cluster.joined, end.tensor * ways.copies)) for end in (one, other)]
    times = [end.cluster.card_s(num_bytes / end.tensor, at_once) for end, at_once in ends]
    if wire is not None:
        times.append(wire.alpha_s + max(at_once * num_bytes / end.tensor for end, at_once in ends) / wire.bytes_per_s)
    return by_data_sheet(max(times)) + gathered


def _kind(cluster: GpuCluster) -> tuple[object, ...]:
    """What a pool's cost depends on."""
    timed = cluster.timed.layers if cluster.timed is not None else None
    passes = cluster.device if timed is None else tuple(sorted(timed.items(), key=lambda item: item[0]))
    return passes, cluster.usable_bytes, replace(cluster, name="", device="", timed=None, memory_bytes=0.0)


def _network(cluster: GpuCluster) -> AlphaBeta:
    """What joins two hosts of a pool."""
    return AlphaBeta(cluster.across.alpha_s, cluster.of_network * cluster.across.bytes_per_s)


def pools_of(name: str, machines: Cluster, timed: Mapping[str, Timed] | None = None, dtype: str = "float16") -> Pools:
    """The pools of a cluster file: hosts of one kind of device, as many on each, in one group beyond the host.

    Args:
        timed: measured passes by kind; then those count in place of kernels, in numbers of ``dtype``.

    Raises:
        UsageError: a host has devices of several kinds, or a link is missing.
    """
    if machines.unlinked() is not None:
        raise UsageError(f"{name} has no links", [], ["links: {within-host: NVLink-3, across-hosts: InfiniBand-HDR}"])
    hosts: dict[str, list[int]] = {}
    for rank, spec in enumerate(machines.devices):
        hosts.setdefault(spec.host, []).append(rank)
    by_kind: dict[tuple[object, ...], list[list[int]]] = {}
    for host, ranks in hosts.items():
        specs = [machines.devices[rank] for rank in ranks]
        if len({(spec.kind, spec.memory_bytes) for spec in specs}) > 1:
            kinds = ", ".join(sorted({spec.kind for spec in specs}))
            raise UsageError(
                f"{name}: hosts and devices are not alike",
                [f"host {host} has devices of several kinds: {kinds}"],
                [
                    "hosts of one kind each",
                    f"halopipe profile MODEL --on {name}, and halopipe plan, in place of ways: they take any devices",
                ],
            )
        within = machines.link(*ranks[:2]) if len(ranks) > 1 else None
        key = (specs[0].kind, specs[0].memory_bytes, len(ranks), _zone(machines, ranks[0]), within)
        by_kind.setdefault(key, []).append(ranks)
    names = _names(machines, [members[0][0] for members in by_kind.values()])
    members_of = dict(zip(names, by_kind.values(), strict=True))
    pools = []
    for own, members in members_of.items():
        spec = machines.devices[members[0][0]]
        across = _worst(machines, members, members) or machines.links.get(_near_tier(machines))
        within = machines.link(*members[0][:2]) if len(members[0]) > 1 else across
        cluster = GpuCluster(
            own, spec.kind, len(members[0]), _wire(within or across), _wire(across or within), dtype,
            of_network=1.0, memory_bytes=spec.memory_bytes, timed=timed[spec.kind] if timed else None,
        )  # fmt: skip
        pools.append(GpuPool(cluster, sum(map(len, members)), tuple(chain(*members))))
    between = {
        (one, other): _wire(_worst(machines, members_of[one], members_of[other]))
        for one, other in permutations(names, 2)
    }
    joined = Pools(name, tuple(pools), between).joined()
    return replace(joined, whole=_whole(joined))


def _whole(pools: Pools) -> GpuCluster | None:
    """All hosts as those of one cluster, whose slowest link counts, if they are alike."""
    first = replace(pools.pools[0].cluster, name=pools.name)
    wires = [*(pool.cluster.across for pool in pools.pools), *pools.between.values()]
    slowest = AlphaBeta(max(wire.alpha_s for wire in wires), min(wire.bytes_per_s for wire in wires))
    kinds = [_kind(replace(pool.cluster, across=slowest)) for pool in pools.pools]
    return replace(first, across=slowest) if all(kind == kinds[0] for kind in kinds) else None


def _near_tier(machines: Cluster) -> str:
    """That of two hosts of one zone."""
    tiers = machines.nested_tiers
    return tiers[[tier.within for tier in tiers].index(HOST) + 1].name


def _zone(machines: Cluster, rank: int) -> tuple[str, ...]:
    """The groups of a host, beyond itself."""
    levels = [tier.within for tier in machines.nested_tiers]
    return machines.groups_of(rank)[levels.index(HOST) + 1 :]


def _names(machines: Cluster, first: list[int]) -> list[str]:
    """Of pools by a rank of each: their kind, and where that is not enough their zone and hosts."""
    kinds = [machines.devices[rank].kind for rank in first]
    zones = [" in ".join([kind, *_zone(machines, rank)[:1]]) for kind, rank in zip(kinds, first, strict=True)]
    hosts = [f"{kind} from {machines.devices[rank].host}" for kind, rank in zip(kinds, first, strict=True)]
    return next(names for names in (kinds, zones, hosts) if len(set(names)) == len(names))


def _worst(machines: Cluster, ours: list[list[int]], theirs: list[list[int]]) -> Link | None:
    """The slowest link of a host of one pool to a host of another, or of one pool to another of its hosts."""
    ends = ((one[0], other[0]) for one in ours for other in theirs if one is not other)
    links = (machines.link(*pair) for pair in (ends if machines.pairs else islice(ends, 1)))  # else all are of a tier
    return min(links, key=lambda link: link.bandwidth_bytes_per_s, default=None)


def _wire(link: Link | None) -> AlphaBeta:
    """What messages get of a link; of none, where nothing is sent, all."""
    if link is None:
        return AlphaBeta(0.0, inf)
    return AlphaBeta(link.latency_s, link.bandwidth_bytes_per_s * EFFICIENCY)
