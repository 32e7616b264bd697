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
from planner.passes.events import RankRows
from planner.passes.numbering import Numbering

TOGETHER = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.REDUCE_GRAD, Op.UPDATE})

_ALONE, _SEND, _RECEIVE, _MEET = range(-1, 3)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A rank that never gets past the step at ``index`` of its row, and why."""

    rank: int
    index: int
    why: str


_NumberedStep = tuple[int, tuple[int, ...], int, int, int]
"""(what it is, channels of the messages sent or awaited, their micro-batch, number of the action, index in the row)."""


def stuck(numbering: Numbering, held_sends: bool, windows: Sequence[int] = ()) -> tuple[Waiting, ...]:
    """The ranks that never end; none if the program is free of deadlock.

    Args:
        held_sends: a send holds its rank until its receive has been posted.
        windows: by rank, receives posted ahead; the runtime's if not given.
    """
    return _UntimedRows(numbering, held_sends, windows).stuck()


class _UntimedRows(RankRows):
    """One run; lives while it lasts.  Only what concerns other ranks is a step: messages, and what several ranks do."""

    def __init__(self, numbering: Numbering, held_sends: bool, windows: Sequence[int]) -> None:
        super().__init__(len(numbering.rows))
        self.numbering = numbering
        self.program = numbering.program
        self.held_sends = held_sends
        ranks = range(len(numbering.rows))
        self.channel_of: dict[tuple[int, int, int, int, bool], int] = {}
        self.ends: list[tuple[int, int]] = []  # (sending rank, receiving rank) of each channel
        self.sent: list[list[int]] = []  # micro-batches by channel, as they were sent
        self.num_taken: list[int] = []  # how many of them were received
        self.codes = [self._code(kind) for kind in range(len(numbering.kinds))]
        self.steps = [list(self._steps(rank)) for rank in ranks]
        self.ready = list(ranks)
        self.asleep = set[int]()
        self.windows: Sequence[int] = ()
        self.num_received = [0] * len(self.steps)
        self.place: dict[tuple[int, int], int] = {}  # of a receive among those of its rank, by channel and micro-batch
        if held_sends:
            self.windows = windows or [self.program.receive_window(rank) for rank in ranks]
            self._place_receives()

    def stuck(self) -> tuple[Waiting, ...]:
        """Advances everybody until nobody can."""
        while self.ready:
            rank = self.ready.pop()
            before = self.position[rank]
            row = self.steps[rank]
            while self.position[rank] < len(row) and self._pass(rank, row[self.position[rank]]):
                self.position[rank] += 1
            if self.held_sends and self.position[rank] > before:  # somebody may wait for it to post a receive
                for other in tuple(self.asleep):
                    self.wake(other)
            if self.position[rank] < len(row):
                self.asleep.add(rank)
        return tuple(self._waiting(rank) for rank in sorted(self.asleep))

    def wake(self, rank: int, at: float = 0.0) -> None:
        """Looks at the rank again if it is asleep."""
        if rank in self.asleep:
            self.asleep.discard(rank)
            self.ready.append(rank)

    def _pass(self, rank: int, step: _NumberedStep) -> bool:
        """Whether the next step of ``rank`` can be run, and now has been."""
        code, channels, microbatch, number, _ = step
        if code == _MEET:
            return self.meet(number, rank, len(self.program.ranks[self._stage(number)]), 0.0) >= 0
        if code == _RECEIVE:
            if any(self._next(channel) != microbatch for channel in channels):
                return False
            for channel in channels:
                self.num_taken[channel] += 1
            self.num_received[rank] += 1
            return True
        if self.held_sends and not all(self._is_posted(channel, microbatch) for channel in channels):
            return False
        for channel in channels:
            self.sent[channel].append(microbatch)
            self.wake(self.ends[channel][1])
        return True

    def _next(self, channel: int) -> int | None:
        """The micro-batch of the first message that waits in the channel."""
        queue = self.sent[channel]
        num_taken = self.num_taken[channel]
        return queue[num_taken] if num_taken < len(queue) else None

    def _stage(self, number: int) -> int:
        return self.numbering.kinds[number // self.numbering.span][0]

    def _steps(self, rank: int) -> Iterator[_NumberedStep]:
        numbering = self.numbering
        span = self.numbering.span
        channels_of: dict[tuple[int, int], tuple[int, ...]] = {}  # by kind and identity of who exchanges with whom
        for index, number in enumerate(numbering.rows[rank]):
            kind, m = divmod(number, span)
            code = self.codes[kind]
            if code == _MEET:
                yield code, (), m, number, index
            elif code >= 0:
                peers = numbering.moves[kind][m]
                channels = channels_of.get((kind, id(peers)))
                if channels is None:
                    channels = channels_of[kind, id(peers)] = self._channels(rank, kind, peers.get(rank, ()))
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
        channel = self.channel_of.setdefault((first, last, src, dst, forward), len(self.sent))
        if channel == len(self.sent):
            self.sent.append([])
            self.num_taken.append(0)
            self.ends.append((src, dst))
        return channel

    def _place_receives(self) -> None:
        for steps in self.steps:
            receives = [(channels, m) for code, channels, m, *_ in steps if code == _RECEIVE]
            for place, (channels, m) in enumerate(receives):
                self.place.update(dict.fromkeys(((channel, m) for channel in channels), place))

    def _is_posted(self, channel: int, microbatch: int) -> bool:
        receiver = self.ends[channel][1]
        place = self.place.get((channel, microbatch))
        done = self.num_received[receiver]
        if place is None or place < done + self.windows[receiver]:
            return place is not None
        steps = self.steps[receiver]
        at = self.position[receiver]
        return place == done and at < len(steps) and steps[at][0] == _RECEIVE

    def _waiting(self, rank: int) -> Waiting:
        """What the rank waits in, and what it finds instead."""
        code, channels, microbatch, number, index = self.steps[rank][self.position[rank]]
        why = str(self.numbering.action(number))
        for channel in channels if code == _RECEIVE else ():
            src = self.ends[channel][0]
            first = self._next(channel)
            if first is None:
                return Waiting(rank, index, f"{why} (nothing has come from rank {src})")
            if first != microbatch:
                send = self._send(channel, first)
                return Waiting(rank, index, f"{why} (the next message from rank {src} is that of {send})")
        for channel in channels if code == _SEND else ():
            if not self._is_posted(channel, microbatch):
                return Waiting(rank, index, f"{why} (rank {self.ends[channel][1]} has not posted its receive)")
        return Waiting(rank, index, why)

    def _send(self, channel: int, microbatch: int) -> Action:
        """The send of a message of the channel."""
        first, last, *_, forward = next(key for key, number in self.channel_of.items() if number == channel)
        return Action(first, Op.SEND_FORWARD if forward else Op.SEND_BACKWARD, microbatch, last)
