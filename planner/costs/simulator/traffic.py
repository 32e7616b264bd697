"""What messages and sums of gradients share: network cards, and the cores of the ranks that they move between.

A flow is a message, or the sum of a stage's gradients.  Alone it runs at speed 1 and puts its bytes / its seconds on
the cards that it passes: the sending side of the host that it leaves, the receiving side of the one that it reaches; a
sum over n ranks of several hosts 2 (n - 1) / n of its bytes / its seconds on both sides of each of them, as a ring that
visits host after host does.  Where a card would carry more than it can, its flows share it max-min fairly (Bertsekas
and Gallager 1992, section 6.5.2), none faster than it is alone.  A card can carry what the host's links do, or the
fastest of the flows on it, if that is more: alone, nothing is slowed (a burst).

A message delays computing at its ends by ``NetworkPrices.core_s`` in all, evenly while it moves (at the sender: after
its call), so that what a core loses goes with the message's speed; several add.  ``DeviceSpec.core_share`` says how
much of that a device feels.

Ranks of one host share its memory: a pass takes longer by what the profile's ``slowdowns`` say of its layers, as long
as all others there compute too, and in proportion to how many do (``Neighbours``).

Ignored: exchanges within a stage (statistics, halos), sums of gradients while their ranks still compute
(``costs.stages.gradient_overlap``), those of layers with layouts of their own and those over several stages, gathers of
updated parameters; switches and cables narrower than cards; that a card's buffer, or a token bucket's burst, is used
up; and that sums of gradients cost cores anything beside their members' waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from planner.costs.communication.links import NetworkPrices, joined_price
from planner.costs.simulator.program import CompiledProgram, TransferSlot
from planner.costs.stages.action_costs import StageCosts

LEAST_RATE = 0.1
"""Of its own speed: no rank's compute is slower than this, whatever moves."""

_ROUNDING = 1e-9
SpeedChange = tuple[list[tuple[int, float]], list[tuple[int, float]]]
"""What is new: (flow, speed) and (rank, rate of its computing)."""


@dataclass(frozen=True, slots=True)
class NetworkFlow:
    """What moves.

    Attributes:
        seconds: alone.
        bytes_per_s: on each of its cards, alone.
        cards: by number.
        losses: (rank, part of its computing speed that is lost while this runs at speed 1).
        copies: of it, itself included, that run on its cards at the same times.
    """

    seconds: float
    bytes_per_s: float = 0.0
    cards: tuple[int, ...] = ()
    losses: tuple[tuple[int, float], ...] = ()
    copies: int = 1


@dataclass(frozen=True, slots=True)
class NetworkTraffic:
    """The flows of a program.

    Attributes:
        flows: of each transfer slot, then of the sum of each stage's gradients.
        capacities: bytes/s by card: of each host the sending side, then the receiving side.
    """

    flows: tuple[NetworkFlow, ...]
    capacities: tuple[float, ...]

    def speeds(self, active: Sequence[int]) -> dict[int, float]:
        """Speeds of flows that run at once, by number: max-min fair in bytes/s, at most 1."""
        flows = self.flows
        loads: dict[int, list[int]] = {}
        for number in active:
            for card in flows[number].cards:
                loads.setdefault(card, []).append(number)
        speeds = dict.fromkeys(active, 1.0)
        left = {}
        for card, numbers in loads.items():
            capacity = max(self.capacities[card], *(flows[number].bytes_per_s for number in numbers))
            load = sum(flows[number].bytes_per_s * flows[number].copies for number in numbers)
            if load > capacity * (1 + _ROUNDING):
                left[card] = capacity
        if left:
            self._fill(speeds, loads, left)
        return speeds

    def _fill(self, speeds: dict[int, float], loads: dict[int, list[int]], left: dict[int, float]) -> None:
        """All rates rise together; a flow stops at its own, or when a card that it passes is full."""
        flows = self.flows
        open_on = {card: set(loads[card]) for card in left}
        waiting = set().union(*open_on.values())
        by_rate = sorted(((flows[number].bytes_per_s, number) for number in waiting), reverse=True)
        while waiting:
            while by_rate[-1][1] not in waiting:
                by_rate.pop()
            least, number = by_rate[-1]
            share, fullest = min(
                (left[card] / sum(flows[each].copies for each in numbers), card)
                for card, numbers in open_on.items()
                if numbers
            )
            rate, stopped = (least, [number]) if least <= share else (share, sorted(open_on[fullest]))
            for each in stopped:
                speeds[each] = min(1.0, rate / flows[each].bytes_per_s)
                waiting.discard(each)
                for card in flows[each].cards:
                    if card in left:
                        left[card] = max(0.0, left[card] - rate * flows[each].copies)
                        open_on[card].discard(each)

    def rates(self, speeds: dict[int, float]) -> dict[int, float]:
        """Computing speeds of ranks that lose something to these flows, by rank."""
        lost: dict[int, float] = {}
        for number, speed in speeds.items():
            for rank, loss in self.flows[number].losses:
                lost[rank] = lost.get(rank, 0.0) + loss * speed
        return {rank: max(LEAST_RATE, 1 - loss) for rank, loss in lost.items()}


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Ranks of one host, each of which computes more slowly the more of the others do.

    Attributes:
        hosts: by rank, the number of its host.
        longer: by action slot, by what part it is longer beside as many others as were measured.
        most: by rank, how many these were; more of them count no more, fewer in proportion.
        copies: how many ranks on its host each stands for, itself included.
    """

    hosts: tuple[int, ...]
    longer: tuple[float, ...]
    most: tuple[int, ...]
    copies: int = 1

    def rate(self, rank: int, slot: int, others: int) -> float:
        """Of its own speed, by how many other ranks of this program compute on its host."""
        beside = self.copies * (others + 1) - 1
        return 1 / (1 + self.longer[slot] * min(1.0, beside / self.most[rank]))


def neighbours_of(compiled: CompiledProgram, costs: StageCosts, action_s: Sequence[float]) -> Neighbours | None:
    """None where no rank loses anything: each is alone on its host, or the profile knows of no slow-down."""
    profile = costs.cost_model.profile
    if not profile.slowdowns:
        return None
    devices = profile.cluster.devices[: len(compiled.rows)]
    working = [device.host for device, row in zip(devices, compiled.rows, strict=True) if row]
    if compiled.copies * max(Counter(working).values(), default=0) < 2:
        return None
    measured = {kind: max(one.num_devices for one in slowed) for kind, slowed in profile.slowdowns.items() if slowed}
    longer = tuple(
        costs.slowed_s(one.rank, one.action, one.accumulates) / seconds if seconds > 0 else 0.0
        for one, seconds in zip(compiled.actions, action_s, strict=True)
    )
    if not any(longer):
        return None
    hosts = {host: number for number, host in enumerate(dict.fromkeys(device.host for device in devices))}
    return Neighbours(
        tuple(hosts[device.host] for device in devices),
        longer,
        tuple(max(1, measured.get(device.kind, 2) - 1) for device in devices),
        compiled.copies,
    )


class FlowSpeeds:
    """The speeds of flows and ranks while flows start and end.

    A start or an end changes the speeds of flows that share a card with it, or with one of these, and no others; what
    it changes depends on the flows under way alone, and is worked out once for each set of them.
    """

    __slots__ = (
        "_active",
        "_at_rank",
        "_by_kind",
        "_changes",
        "_kinds",
        "_on_card",
        "_ranks",
        "_rates",
        "_speeds",
        "traffic",
    )

    def __init__(self, traffic: NetworkTraffic) -> None:
        self.traffic = traffic
        self._ranks = [tuple(dict.fromkeys(rank for rank, _ in flow.losses)) for flow in traffic.flows]
        self._active = 0  # a bit for each flow under way
        self._speeds: dict[int, float] = {}
        self._rates: dict[int, float] = {}
        self._on_card: dict[int, set[int]] = {}
        self._at_rank: dict[int, set[int]] = {}
        self._changes: dict[tuple[int, int], SpeedChange] = {}
        kinds: dict[tuple[float, tuple[int, ...], int], int] = {}
        self._kinds = [
            kinds.setdefault((flow.bytes_per_s, flow.cards, flow.copies), len(kinds)) for flow in traffic.flows
        ]
        self._by_kind: dict[tuple[int, ...], dict[int, float]] = {}

    def toggled(self, flow: int) -> SpeedChange:
        """What changes when ``flow`` starts, or ends if it is under way."""
        key = self._active, flow
        self._active ^= 1 << flow
        self._speeds.pop(flow, None)
        for places, held in ((self.traffic.flows[flow].cards, self._on_card), (self._ranks[flow], self._at_rank)):
            for place in places:
                held.setdefault(place, set()).symmetric_difference_update((flow,))
        change = self._changes.get(key)
        if change is None:
            change = self._changes[key] = self._change(flow)
        of_flows, of_ranks = change
        self._speeds.update(of_flows)
        self._rates.update(of_ranks)
        return change

    def _fair(self, active: list[int]) -> dict[int, float]:
        """The speeds of flows that run at once; those of a kind have one, worked out once for each number of each."""
        kinds = [self._kinds[flow] for flow in active]
        key = tuple(sorted(kinds))
        by_kind = self._by_kind.get(key)
        if by_kind is None:
            speeds = self.traffic.speeds(active)
            by_kind = self._by_kind[key] = {kind: speeds[flow] for kind, flow in zip(kinds, active, strict=True)}
        return {flow: by_kind[kind] for flow, kind in zip(active, kinds, strict=True)}

    def _change(self, flow: int) -> SpeedChange:
        flows = self.traffic.flows
        touched = {flow} if self._active >> flow & 1 else set[int]()
        cards = set[int]()
        waiting = [flow]
        while waiting:
            for card in flows[waiting.pop()].cards:
                if card not in cards:
                    cards.add(card)
                    waiting += self._on_card[card] - touched
                    touched |= self._on_card[card]
        new = self._fair(sorted(touched))
        of_flows = [(each, speed) for each, speed in new.items() if self._speeds.get(each) != speed]
        ranks = {rank for each in (flow, *(each for each, _ in of_flows)) for rank in self._ranks[each]}
        slow: dict[int, float] = {}
        for rank in ranks:
            here = {each: new.get(each, self._speeds.get(each, 1.0)) for each in sorted(self._at_rank[rank])}
            slow[rank] = self.traffic.rates(here).get(rank, 1.0)
        return of_flows, [(rank, slow[rank]) for rank in sorted(ranks) if slow[rank] != self._rates.get(rank, 1.0)]


def traffic_of(
    compiled: CompiledProgram, costs: StageCosts, transfer_bytes: Sequence[int], transfer_s: Sequence[float]
) -> NetworkTraffic:
    """The flows of a program.

    Args:
        transfer_bytes: by transfer slot.
        transfer_s: seconds by transfer slot.
    """
    network = costs.cost_model.network
    cluster = network.cluster
    hosts = {host: number for number, host in enumerate(dict.fromkeys(device.host for device in cluster.devices))}
    number_of = [hosts[device.host] for device in cluster.devices]
    flows = []
    for slot, num_bytes, seconds in zip(compiled.transfers, transfer_bytes, transfer_s, strict=True):
        src = number_of[slot.src]
        dst = number_of[slot.dst]
        cards = (2 * src, 2 * dst + 1) if src != dst else ()
        if seconds <= 0:
            flows.append(NetworkFlow(0.0))
            continue
        losses = _losses(network, slot, (num_bytes, slot.bytes_ahead(num_bytes, transfer_bytes)), seconds)
        flows.append(NetworkFlow(seconds, num_bytes / seconds, cards, losses, compiled.copies))
    flows += _sums(compiled, costs, number_of)
    return NetworkTraffic(tuple(flows), network.card_bytes_per_s)


def _losses(
    network: NetworkPrices, slot: TransferSlot, moved: tuple[int, int | None], seconds: float
) -> tuple[tuple[int, float], ...]:
    """(rank, what it loses of its computing speed) at both ends of a message; ``moved`` as of :func:`joined_price`."""
    num_bytes, ahead = moved
    sender_s, receiver_s = network.core_s(slot.src, slot.dst, num_bytes + (ahead or 0))
    if ahead is not None:
        before_s = network.core_s(slot.src, slot.dst, ahead)
        sender_s = max(0.0, sender_s - before_s[0])
        receiver_s = max(0.0, receiver_s - before_s[1])
    if not sender_s and not receiver_s:
        return ()
    after_call_s = seconds - joined_price(partial(network.sending_s, slot.src, slot.dst), *moved)
    devices = network.cluster.devices
    both = (
        (slot.src, sender_s / (after_call_s if after_call_s > 0 else seconds) * devices[slot.src].core_share),
        (slot.dst, receiver_s / seconds * devices[slot.dst].core_share),
    )
    return tuple((rank, lost) for rank, lost in both if lost > 0)


def _sums(compiled: CompiledProgram, costs: StageCosts, number_of: Sequence[int]) -> Iterator[NetworkFlow]:
    """The sums of gradients, by stage, as far as their ranks wait for them."""
    network = costs.cost_model.network
    summed = set(compiled.reduced_stages)
    for number, stage in enumerate(costs.stages):
        hosts = sorted({number_of[rank] for rank in stage.ranks if compiled.rows[rank]})
        is_across = len({number_of[rank] for rank in stage.ranks}) > 1
        if number not in summed or not is_across or stage.once is not None:
            yield NetworkFlow(0.0)
            continue
        whole_s = network.all_reduce_s(stage.ranks, stage.own_bytes)
        waited_s = costs.waited_s(number)
        if waited_s <= 0 or whole_s <= 0:
            yield NetworkFlow(0.0)
            continue
        bytes_per_s = 2 * (len(stage.ranks) - 1) / len(stage.ranks) * stage.own_bytes / whole_s
        yield NetworkFlow(waited_s, bytes_per_s, tuple(card for host in hosts for card in (2 * host, 2 * host + 1)))


def is_shared(compiled: CompiledProgram, traffic: NetworkTraffic) -> bool:
    """Whether a core loses anything, or a card could have more on it than it carries.

    Messages of one channel follow one another; of each the fastest counts.
    """
    num_transfers = len(compiled.transfers)
    fastest: dict[int, dict[tuple[int, ...], tuple[float, int]]] = {}
    for number, flow in enumerate(traffic.flows):
        if flow.losses:
            return True
        if flow.cards:
            is_message = number < num_transfers
            key = (compiled.transfers[number].src, compiled.transfers[number].dst) if is_message else (number,)
            for card in flow.cards:
                rates = fastest.setdefault(card, {})
                rates[key] = max(rates.get(key, (0.0, 1)), (flow.bytes_per_s, flow.copies))
    return any(
        sum(rate * copies for rate, copies in rates.values())
        > max(traffic.capacities[card], *(rate for rate, _ in rates.values())) * (1 + _ROUNDING)
        for card, rates in fastest.items()
    )
