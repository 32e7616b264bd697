"""Whether a program ends: it is run without clocks, every rank as far as it gets.

What is assumed:

- messages of one edge and direction between two ranks arrive in the order they were sent, and a receive can only take
  the first of them (messages of different edges or directions have tags of their own and may overtake);
- forward, backward, reduction and update of a stage on several ranks start when all of them have arrived, since a
  normalisation inside, or an optimiser that they divide, may need all of them;
- *rendezvous*: a send ends only when its receive has been posted.  A rank has posted the next ``window`` receives of
  its row, counted from those it has done, and the one it waits in.

A send that does not block hands its message over and its rank goes on.  Then rendezvous asks for nothing more.  Proof:
a message is waited for at one place alone, in its receive, and there it is posted; so it moves as soon as it is sent,
whatever the window, as if sends ended at once.  And the step ends: a rank that is done has posted all its receives.

A send that blocks holds its rank until its receive has been posted.  Here the window matters, and the program is run
with that of the runtime (``Program.receive_window``).

One run proves it for all durations: what lets an action start (what was sent, posted, arrived) is never taken away
again, so ranks cannot get further by being slower or faster, or by being advanced in another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.ir.schedule import MESSAGE, SEND, Action, Op
from planner.passes.lowering import Numbering

TOGETHER = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.REDUCE_GRAD, Op.UPDATE})

_ALONE, _SEND, _RECEIVE, _MEET = range(-1, 3)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A rank that never gets past the step at ``index`` of its row, and why."""

    rank: int
    index: int
    why: str


_Step = tuple[int, tuple[int, ...], int, int, int]
"""(what it is, channels of the messages sent or awaited, their micro-batch, number of the action, index in the row)."""


def stuck(numbering: Numbering, held_sends: bool, windows: Sequence[int] = ()) -> tuple[Waiting, ...]:
    """The ranks that never end; none if the program is free of deadlock.

    Args:
        held_sends: a send holds its rank until its receive has been posted.
        windows: by rank, receives posted ahead; the runtime's if not given.
    """
    return _Run(numbering, held_sends, windows).stuck()


class _Run:
    """One run; lives while it lasts.  Only what concerns other ranks is a step: messages, and what several ranks do."""

    def __init__(self, numbering: Numbering, held_sends: bool, windows: Sequence[int]) -> None:
        self.numbering, self.program, self.held_sends = numbering, numbering.program, held_sends
        ranks = range(len(numbering.rows))
        self.channel_of: dict[tuple[int, int, int, int, bool], int] = {}
        self.ends: list[tuple[int, int]] = []  # (sending rank, receiving rank) of each channel
        self.sent: list[list[int]] = []  # micro-batches by channel, as they were sent
        self.taken: list[int] = []  # how many of them were received
        self.steps = [list(self._steps(rank)) for rank in ranks]
        self.at = [0] * len(self.steps)
        self.woken: set[int] = set()  # ranks that may have something to do again
        self.meeting: dict[int, set[int]] = {}  # ranks that have come to a step of several, by number of the action
        self.windows: Sequence[int] = ()
        self.num_received = [0] * len(self.steps)
        self.place: dict[tuple[int, int], int] = {}  # of a receive among those of its rank, by channel and micro-batch
        if held_sends:
            self.windows = windows or [self.program.receive_window(rank) for rank in ranks]
            self._place_receives()

    def stuck(self) -> tuple[Waiting, ...]:
        """Advances everybody until nobody can."""
        at, steps_of = self.at, self.steps
        ready = list(range(len(steps_of)))
        waits = [False] * len(steps_of)  # whether the rank is asleep
        while ready:
            rank = ready.pop()
            waits[rank] = False
            before, steps = at[rank], steps_of[rank]
            while at[rank] < len(steps) and self._pass(rank, steps[at[rank]]):
                continue
            waits[rank] = at[rank] < len(steps)
            woken = self.woken
            if self.held_sends and at[rank] > before:  # somebody may wait for it to post a receive
                woken = {other for other, asleep in enumerate(waits) if asleep and other != rank}
            for other in woken:
                if waits[other]:
                    waits[other] = False
                    ready.append(other)
            self.woken.clear()
        return tuple(self._waiting(rank) for rank, steps in enumerate(steps_of) if at[rank] < len(steps))

    def _pass(self, rank: int, step: _Step) -> bool:
        """Runs the next step of ``rank`` if it can."""
        code, channels, microbatch, number, _ = step
        if code == _RECEIVE:
            sent, taken = self.sent, self.taken
            for channel in channels:
                queue, first = sent[channel], taken[channel]
                if first == len(queue) or queue[first] != microbatch:
                    return False
            for channel in channels:
                taken[channel] += 1
            self.num_received[rank] += 1
        elif code == _SEND:
            if self.held_sends and not all(self._is_posted(channel, microbatch) for channel in channels):
                return False
            for channel in channels:
                self.sent[channel].append(microbatch)
                self.woken.add(self.ends[channel][1])
        else:
            members, there = self._members(number), self.meeting.setdefault(number, set())
            there.add(rank)
            if len(there) < len(members):
                return False
            for member in members:
                self.at[member] += 1
            self.woken.update(members)
            return True
        self.at[rank] += 1
        return True

    def _steps(self, rank: int) -> Iterator[_Step]:
        numbering, span = self.numbering, self.numbering.span
        known: dict[tuple[int, int], tuple[int, ...]] = {}  # channels, by kind and identity of who exchanges with whom
        code_of = [self._code(kind) for kind in range(len(numbering.kinds))]
        for index, number in enumerate(numbering.rows[rank]):
            kind, m = divmod(number, span)
            code = code_of[kind]
            if code == _MEET:
                yield code, (), m, number, index
            elif code >= 0:
                peers = numbering.moves(kind)[m]
                channels = known.get((kind, id(peers)))
                if channels is None:
                    channels = known[kind, id(peers)] = self._channels(rank, kind, peers.get(rank, ()))
                yield code, channels, m, number, index

    def _code(self, kind: int) -> int:
        stage, op, _ = self.numbering.kinds[kind]
        if op in MESSAGE:
            return _SEND if op in SEND else _RECEIVE
        return _MEET if op in TOGETHER and len(self.program.ranks[stage]) > 1 else _ALONE

    def _channels(self, rank: int, kind: int, others: Sequence[int]) -> tuple[int, ...]:
        stage, op, peer = self.numbering.kinds[kind]
        other_stage = -1 if peer is None else peer
        forward = op in (Op.SEND_FORWARD, Op.RECV_FORWARD)
        if op in SEND:
            return tuple(self._channel(stage, other_stage, rank, other, forward) for other in others)
        return tuple(self._channel(other_stage, stage, other, rank, forward) for other in others)

    def _channel(self, first: int, last: int, src: int, dst: int, forward: bool) -> int:
        found = self.channel_of.setdefault((first, last, src, dst, forward), len(self.sent))
        if found == len(self.sent):
            self.sent.append([])
            self.taken.append(0)
            self.ends.append((src, dst))
        return found

    def _place_receives(self) -> None:
        for steps in self.steps:
            receives = [(channels, m) for code, channels, m, *_ in steps if code == _RECEIVE]
            for place, (channels, m) in enumerate(receives):
                self.place.update(dict.fromkeys(((channel, m) for channel in channels), place))

    def _is_posted(self, channel: int, microbatch: int) -> bool:
        receiver = self.ends[channel][1]
        place, done = self.place.get((channel, microbatch)), self.num_received[receiver]
        if place is None or place < done + self.windows[receiver]:
            return place is not None
        steps, at = self.steps[receiver], self.at[receiver]
        return place == done and at < len(steps) and steps[at][0] == _RECEIVE

    def _members(self, number: int) -> tuple[int, ...]:
        """The ranks that do something together."""
        return self.program.ranks[self.numbering.kinds[number // self.numbering.span][0]]

    def _waiting(self, rank: int) -> Waiting:
        """What the rank waits in, and what it finds instead."""
        code, channels, microbatch, number, index = self.steps[rank][self.at[rank]]
        why = str(self.numbering.action(number))
        for channel in channels if code == _RECEIVE else ():
            src, found = self.ends[channel][0], self._first(channel)
            if found is None:
                return Waiting(rank, index, f"{why} (nothing has come from rank {src})")
            if found.microbatch != microbatch:
                return Waiting(rank, index, f"{why} (the next message from rank {src} is that of {found})")
        for channel in channels if code == _SEND else ():
            if not self._is_posted(channel, microbatch):
                return Waiting(rank, index, f"{why} (rank {self.ends[channel][1]} has not posted its receive)")
        return Waiting(rank, index, why)

    def _first(self, channel: int) -> Action | None:
        """The send of the first message that waits in the channel."""
        if self.taken[channel] == len(self.sent[channel]):
            return None
        first, last, *_, forward = next(key for key, number in self.channel_of.items() if number == channel)
        op = Op.SEND_FORWARD if forward else Op.SEND_BACKWARD
        return Action(first, op, self.sent[channel][self.taken[channel]], last)
