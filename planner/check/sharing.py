"""How fast messages go that share network cards, and ranks whose cores they load, for the checker.

The model is that of ``planner.costs.simulator.prices``; here all rates rise together from nothing, level by level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.check.reading import delay_s, message_s
from planner.ir.cluster import Cluster

_SLOWEST = 0.1
_FULL = 1 + 1e-9
Card = tuple[str, str]
"""(host, ``out`` or ``in``)."""


@dataclass(slots=True, eq=False)
class Moving:
    """Something under way: a message, or the sum of a stage's gradients.

    Attributes:
        seconds: alone.
        bytes_per_s: on each of its cards, alone.
        losses: by rank, what it loses of its computing speed.
        left_s, since_s, speed, ends_s: as of the last change of its speed.
    """

    seconds: float
    bytes_per_s: float = 0.0
    cards: tuple[Card, ...] = ()
    losses: dict[int, float] = field(default_factory=dict)
    left_s: float = 0.0
    since_s: float = 0.0
    speed: float = 0.0
    ends_s: float = 0.0


def message(cluster: Cluster, src: int, dst: int, size: int) -> Moving:
    """A message between two ranks."""
    link, ends = cluster.link(src, dst), (cluster.devices[src], cluster.devices[dst])
    seconds = message_s(link, size)
    if seconds <= 0:
        return Moving(0.0)
    hosts = [device.host for device in ends]
    cards = ((hosts[0], "out"), (hosts[1], "in")) if hosts[0] != hosts[1] else ()
    called_s = delay_s(link.sending, size)
    behind_s = seconds - called_s if called_s < seconds else seconds
    lost = {
        src: delay_s(link.sender_core, size) / behind_s * ends[0].core_share,
        dst: delay_s(link.receiver_core, size) / seconds * ends[1].core_share,
    }
    return Moving(seconds, size / seconds, cards, {rank: loss for rank, loss in lost.items() if loss > 0})


def summed(cluster: Cluster, ranks: Sequence[int], seconds: float, bytes_per_s: float) -> Moving:
    """A sum over ranks: round a ring that crosses every card of its hosts once."""
    hosts = {cluster.devices[rank].host for rank in ranks}
    if len(hosts) < 2 or seconds <= 0 or bytes_per_s <= 0:
        return Moving(0.0)
    return Moving(seconds, bytes_per_s, tuple((host, way) for host in hosts for way in ("out", "in")))


def share(cluster: Cluster, under_way: Sequence[Moving]) -> list[float]:
    """The speeds of all that is under way, in its order."""
    on: dict[Card, list[Moving]] = {}
    for each in under_way:
        for card in each.cards:
            on.setdefault(card, []).append(each)
    room = {}
    for card, movers in on.items():
        nic = cluster.nic_bytes_per_s(card[0])
        own = [mover.bytes_per_s for mover in movers]
        room[card] = max(*own, nic) if nic is not None else sum(own)
        if sum(own) <= room[card] * _FULL:
            room[card] = sum(own) * 2
    rate: dict[Moving, float] = {}
    rising = [each for each in under_way if each.cards]
    while rising:
        limits = {
            card: (room[card] - sum(rate.get(m, 0.0) for m in movers)) / count
            for card, movers in on.items()
            if (count := sum(m not in rate for m in movers))
        }
        level = min([*limits.values(), *(each.bytes_per_s for each in rising)])
        full = {card for card, limit in limits.items() if limit <= level}
        for each in rising:
            if each.bytes_per_s <= level or full.intersection(each.cards):
                rate[each] = max(0.0, level)
        rising = [each for each in rising if each not in rate]
    return [min(1.0, rate[each] / each.bytes_per_s) if each.cards else 1.0 for each in under_way]


def computing_rate(rank: int, under_way: Sequence[Moving]) -> float:
    """The part of its speed that a rank computes at."""
    return max(_SLOWEST, 1 - sum(each.losses.get(rank, 0.0) * each.speed for each in under_way))
