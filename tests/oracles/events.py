"""The length of a step, plainly: every rank is a coroutine that says what it waits for.

The model is that of ``planner.costs.simulator.events`` and ``planner.costs.simulator.contention``; the form is not.
There is one clock, and whatever comes next on it is looked for among all ranks and all that is under way.  How fast
messages go that share network cards, and ranks whose cores they load, is as in
``planner.costs.simulator.traffic``; here all rates rise together from nothing, level by level.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from planner.costs.communication.links import NetworkPrices
from planner.costs.stages.input_pipeline import has_host_beside
from planner.ir.cluster import Cluster
from planner.ir.program import Message, Program, sent_by
from planner.ir.schedule import ALONE, COMPUTE, RECEIVE, SEND, Action, Op

_DIGITS = 11
_SLOWEST = 0.1
NOWHERE = -1
"""The place of an action that is asked for on its own: it finds no gradients to add to."""
_PASSES = (Op.FORWARD, Op.BACKWARD)
_FULL = 1 + 1e-9
Key = tuple[object, ...]
Transfer = tuple[Key, int, int, int, int]
"""(name of the message, source rank, destination rank, bytes, bytes of the message that it joins: 0 if it is one)."""
Spans = Sequence[Sequence[tuple[float, float]]]
"""When an action began and ended, by rank and place in its row."""
Card = tuple[str, str]
"""(host, ``out`` or ``in``)."""


@dataclass(frozen=True, slots=True)
class Until:
    """Wait for a time."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Work:
    """Compute for so long, if nothing slows it."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Arrival:
    """Wait for a message."""

    key: Key


@dataclass(frozen=True, slots=True)
class Together:
    """Wait for the members of a reduction of ``stage``, then for the sum; what the rank pays beside comes after it."""

    stage: int
    microbatch: int | None

    @property
    def key(self) -> Key:
        """Its name."""
        return self.stage, self.microbatch


@dataclass(frozen=True, slots=True)
class Computing:
    """A computation: what was left of it at a time, how fast it goes since, and when it will end."""

    left_s: float
    since_s: float
    rate: float
    ends_s: float


Row = Generator[Until | Work | Arrival | Together, float, None]


class Step:
    """A step of a program.

    Args:
        action_s: seconds of an action of a rank, given its place in the row; of a send or receive beside its messages.
        sum_of: (seconds, bytes/s) of the sum of a stage's gradients; (0, 0) where it is not known what it moves.
        meetings: ranks that wait for one another before their first update, to sum gradients over stages.
        next_step: by rank, seconds of preparing the next step, whether a core beside does it, and what the rank loses
            to that in any case; empty: nobody does.

    Attributes:
        left_s: by rank, what was left of that behind its row.
    """

    def __init__(
        self,
        network: NetworkPrices,
        program: Program,
        action_s: Callable[[int, Action, int], float],
        sum_of: Callable[[int], tuple[float, float]],
        next_step: Sequence[tuple[float, bool, float]] = (),
        meetings: Sequence[frozenset[int]] = (),
    ) -> None:
        self.network = network
        self.program = program
        self.action_s = action_s
        self.sum_of = sum_of
        self.next_step = next_step
        self.left_s = [0.0 for _ in program.rows]
        self.meetings: dict[Key, frozenset[int]] = {("meeting", n): ranks for n, ranks in enumerate(meetings)}
        self.coming_to: dict[Key, set[int]] = {key: set(ranks) for key, ranks in self.meetings.items()}
        self.cluster = network.cluster
        self.how = program.streams
        self.joined = program.joined()
        self.arrived: set[Key] = set()
        self.called: set[Key] = set()
        self.wires: dict[object, list[Transfer]] = {}
        self.under_way: dict[Key, Moving] = {}
        self.members: dict[Key, list[int]] = {}
        self.joined_s: dict[tuple[int, int | None], float] = {}  # when the last member was there
        self.work: dict[int, Computing] = {}
        self.ends = [0.0 for _ in program.rows]
        self.spans: list[list[tuple[float, float]]] = [[] for _ in program.rows]  # from, to: by rank and action
        self.rows = [self._row(rank) for rank in range(len(program.rows))]
        self.waits = {rank: next(row) for rank, row in enumerate(self.rows)}
        links = [*self.cluster.links.values(), *(pair.link for pair in self.cluster.pairs)]
        self.in_ticks = not all(link.duplex for link in links)

    def seconds(self) -> float:
        """From start to end.

        Raises:
            ValueError: it never ends.
        """
        while self.waits:
            moves = ((self._tick(moving.ends_s), 0, n) for n, moving in enumerate(self.under_way.values()))
            ranks = ((self._tick(at_s), 1, r) for r in self.waits if (at_s := self._due_s(r)) is not None)
            _, is_rank, number = min((*moves, *ranks), default=(0.0, 0, -1))  # of what is at once, messages come first
            if number < 0:
                raise ValueError("the program never ends")
            if is_rank:
                self._resume(number)
            else:
                self._over(list(self.under_way)[number])
        return max(self.ends, default=0.0)

    def _tick(self, at_s: float) -> float:
        """Where directions share a wire, rounding is not to decide who is first."""
        return round(at_s, _DIGITS) if self.in_ticks else at_s

    def _due_s(self, rank: int) -> float | None:
        """When the rank goes on; None if that is not known yet."""
        wait = self.waits[rank]
        if isinstance(wait, Work):
            return self.work[rank].ends_s
        return wait.at_s if isinstance(wait, Until) else None

    def _resume(self, rank: int) -> None:
        now_s = self._due_s(rank) or 0.0
        self.work.pop(rank, None)
        try:
            wait = self.rows[rank].send(now_s)
        except StopIteration:
            self.ends[rank] = now_s
            del self.waits[rank]
            return
        self.waits[rank] = wait
        if isinstance(wait, Work):
            rate = computing_rate(rank, list(self.under_way.values()))
            self.work[rank] = Computing(wait.seconds, now_s, rate, now_s + wait.seconds / rate)
        elif isinstance(wait, Together):
            self._join(wait, rank, now_s)

    def _row(self, rank: int) -> Row:
        now_s = yield Until(0.0)
        host_free_s = 0.0
        ready_s = dict[tuple[int, int | None], float]()
        to_prepare_s, has_core, lost_s = self.next_step[rank] if self.next_step else (0.0, True, 0.0)
        for index, action in enumerate(self.program.rows[rank]):
            seconds = self.action_s(rank, action, index)
            since_s = now_s
            moves = [self._transfer(action, each) for each in self.program.messages_of(rank, action)]
            if action.op in RECEIVE:
                for key, *_ in moves:
                    now_s = now_s if key in self.arrived else (yield Arrival(key))
                to_prepare_s -= 0.0 if has_core else now_s - since_s
                now_s = yield Until(now_s + seconds + (self._alone_s(moves) if action.blocking else 0.0))
            elif action.op in SEND:
                for move in moves:
                    self.wires.setdefault(self._wire(move), []).append(move)
                now_s = yield Until(now_s + seconds)
                for move in moves:
                    now_s = yield from self._call(move, now_s, action.blocking)
            elif action.op is Op.REDUCE_GRAD:
                now_s = yield Together(action.stage, action.microbatch)
                to_prepare_s -= 0.0 if has_core else self.joined_s[action.stage, action.microbatch] - since_s
                now_s = yield Until(now_s + max(0.0, seconds - self._sum(action.stage).seconds))
            elif action.op is Op.PREPARE and has_host_beside(self.cluster.devices[rank]):
                host_free_s = max(now_s, host_free_s) + seconds
                ready_s[action.stage, action.microbatch] = host_free_s
                self.spans[rank].append((now_s, now_s))  # nobody's time
                continue
            else:
                seconds = max(seconds, self._streamed_s(rank, action))
                if action.op is Op.UPDATE and action.microbatch is None:
                    since_s = now_s = yield from self._meet(rank, now_s)
                from_s = ready_s.get((action.stage, action.microbatch), 0.0) if action.op is Op.FORWARD else 0.0
                since_s = now_s = (yield Until(from_s)) if from_s > now_s else now_s
                now_s = yield Work(seconds)
            self.spans[rank].append((since_s, now_s))
        if self.spans[rank]:
            self.left_s[rank] = lost_s + max(0.0, to_prepare_s - (now_s if has_core else 0.0))
        yield Until(now_s + self.left_s[rank])

    def _meet(self, rank: int, now_s: float) -> Generator[Until | Arrival, float, float]:
        """Says to all that wait for it that the rank is there; when all are whom it waits for."""
        mine = [key for key, ranks in self.meetings.items() if rank in ranks]
        for key in mine:
            self.coming_to[key].discard(rank)
            if not self.coming_to[key] and key not in self.arrived:
                self._arrive(key, now_s)
        for key in mine:
            now_s = now_s if key in self.arrived else (yield Arrival(key))
        return now_s

    def _transfer(self, action: Action, sent: Message) -> Transfer:
        """What ``action`` sends or receives of a message."""
        forward = action.op in (Op.SEND_FORWARD, Op.RECV_FORWARD)
        src, dst = (sent.src, sent.dst) if forward else (sent.dst, sent.src)
        size = sent.forward_bytes if forward else sent.backward_bytes
        send = action if action.op in SEND else sent_by(action)
        ahead = sum(self.program.leg_bytes((src, each, dst)) for each in self.joined.get((src, send, dst), ()))
        return (frozenset((action.stage, action.peer)), forward, action.microbatch, src, dst), src, dst, size, ahead

    def _call(self, move: Transfer, now_s: float, blocking: bool) -> Generator[Until | Arrival, float, float]:
        """One call that sends; when it is over."""
        key, src, dst, size, ahead = move
        self.called.add(key)
        self._begin(self._wire(move), now_s)
        if blocking:
            return now_s if key in self.arrived else (yield Arrival(key))
        held_s = 0.0 if self._streams(src, dst) else called_s(self.network, src, dst, size, ahead)
        return (yield Until(now_s + held_s)) if held_s > 0 else now_s

    def _streams(self, src: int, dst: int) -> bool:
        devices = self.cluster.devices
        return bool(self.how) and devices[src].streams and devices[dst].streams

    def _streamed_s(self, rank: int, action: Action) -> float:
        """The least that a pass lasts for what it sends, or receives, as it goes along.

        Of a forward and a backward that run at once, its part of the message's time: as of their work.
        """
        if not self.how or action.op not in COMPUTE or action.op is Op.BACKWARD_WEIGHT:
            return 0.0
        is_forward = action.op is Op.FORWARD
        stages = self.program.stages
        before = [edge.src for edge in stages.into(action.stage)]
        behind = [edge.dst for edge in stages.out_of(action.stage)]
        ops = (Op.RECV_FORWARD, Op.SEND_FORWARD) if is_forward else (Op.SEND_BACKWARD, Op.RECV_BACKWARD)
        pairs = [(ops[0], peer) for peer in before] + [(ops[1], peer) for peer in behind]
        on: dict[tuple[int, int], float] = {}
        for op, peer in pairs:
            message_action = Action(action.stage, op, action.microbatch, peer)
            for sent in self.program.messages_of(rank, message_action):
                _, src, dst, size, _ = self._transfer(message_action, sent)
                if self._streams(src, dst):
                    on[src, dst] = on.get((src, dst), 0.0) + self.network.transfer_s(src, dst, size)
        longest = max(on.values(), default=0.0)
        if longest <= 0 or self.how == ALONE:
            return longest
        forward_s, backward_s = (
            self.action_s(rank, Action(action.stage, op, action.microbatch), NOWHERE) for op in _PASSES
        )
        mine = forward_s if is_forward else backward_s
        return longest * (mine / (forward_s + backward_s) if forward_s + backward_s > 0 else 0.5)

    def _wire(self, move: Transfer) -> object:
        _, src, dst, *_ = move
        return (src, dst) if self.cluster.link(src, dst).duplex else frozenset((src, dst))

    def _alone_s(self, moves: list[Transfer]) -> float:
        return sum(self.network.transfer_s(src, dst, size) for _, src, dst, size, _ in moves)

    def _begin(self, wire: object, now_s: float) -> None:
        """The first message in line travels, unless it does already or was not called yet."""
        line = self.wires[wire]
        while line and line[0][0] in self.called and line[0][0] not in self.under_way:
            key, src, dst, *sizes = line[0]
            moving = Moving(0.0) if self._streams(src, dst) else message(self.network, src, dst, *sizes)
            if moving.seconds > 0:
                self._start(key, moving, now_s)
                return
            line.pop(0)
            self._arrive(key, now_s)

    def _arrive(self, key: Key, now_s: float) -> None:
        self.arrived.add(key)
        for rank, wait in self.waits.items():
            if isinstance(wait, Arrival) and wait.key == key:
                self.waits[rank] = Until(now_s)

    def _sum(self, stage: int) -> Moving:
        return summed(self.cluster, self.program.ranks[stage], *self.sum_of(stage))

    def _join(self, wait: Together, rank: int, now_s: float) -> None:
        """One more member of a reduction; the last one starts it."""
        members = self.members.setdefault(wait.key, [])
        members.append(rank)
        if len(members) == len(self.program.ranks[wait.stage]):
            self.joined_s[wait.stage, wait.microbatch] = now_s
            moving = self._sum(wait.stage)
            if moving.cards:
                self._start(("sum", *wait.key), moving, now_s)
            else:
                self._release(wait.key, now_s)

    def _release(self, key: Key, now_s: float) -> None:
        for rank in self.members[key]:
            self.waits[rank] = Until(now_s)

    def _start(self, key: Key, moving: Moving, now_s: float) -> None:
        moving.left_s = moving.seconds
        moving.since_s = now_s
        self.under_way[key] = moving
        self._pace(now_s)

    def _over(self, key: Key) -> None:
        """A message is there, or a sum made."""
        moved = self.under_way.pop(key)
        now_s = moved.ends_s
        self._pace(now_s)
        if key[0] == "sum":
            self._release(key[1:], now_s)
            return
        wire = next(wire for wire, line in self.wires.items() if line and line[0][0] == key)
        self.wires[wire].pop(0)
        self._begin(wire, now_s)
        self._arrive(key, now_s)

    def _pace(self, now_s: float) -> None:
        """What is under way has changed: what is left of each is counted, and its end found anew."""
        under_way = list(self.under_way.values())
        for each, speed in zip(under_way, share(self.cluster, under_way), strict=True):
            if speed != each.speed:
                each.left_s = max(0.0, each.left_s - (now_s - each.since_s) * each.speed)
                each.since_s = now_s
                each.speed = speed
                each.ends_s = now_s + each.left_s / speed
        for rank, mine in self.work.items():
            rate = computing_rate(rank, under_way)
            if rate != mine.rate:
                left_s = max(0.0, mine.left_s - (now_s - mine.since_s) * mine.rate)
                self.work[rank] = Computing(left_s, now_s, rate, now_s + left_s / rate)


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


def called_s(network: NetworkPrices, src: int, dst: int, size: int, ahead: int = 0) -> float:
    """How long a call that sends takes, or is longer for what joins ``ahead`` bytes."""
    whole_s = network.sending_s(src, dst, ahead + size)
    return max(0.0, whole_s - network.sending_s(src, dst, ahead)) if ahead else whole_s


def message(network: NetworkPrices, src: int, dst: int, size: int, ahead: int = 0) -> Moving:
    """A message between two ranks, or by how much ``size`` bytes make one of ``ahead`` bytes longer."""
    ends = (network.cluster.devices[src], network.cluster.devices[dst])
    seconds = network.transfer_s(src, dst, ahead + size)
    cores_s = list(network.core_s(src, dst, ahead + size))
    if ahead:
        seconds -= network.transfer_s(src, dst, ahead)
        less_s = network.core_s(src, dst, ahead)
        cores_s = [max(0.0, whole - less) for whole, less in zip(cores_s, less_s, strict=True)]
    if seconds <= 0:
        return Moving(0.0)
    hosts = [device.host for device in ends]
    cards = ((hosts[0], "out"), (hosts[1], "in")) if hosts[0] != hosts[1] else ()
    held_s = called_s(network, src, dst, size, ahead)
    behind_s = seconds - held_s if held_s < seconds else seconds
    lost = {src: cores_s[0] / behind_s * ends[0].core_share, dst: cores_s[1] / seconds * ends[1].core_share}
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
