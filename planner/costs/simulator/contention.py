"""A step of a program whose messages share network cards, or slow down the computing of their ranks.

What happens is as in :mod:`planner.costs.simulator.events`, but how fast messages, sums of gradients and computing go
changes with what else is under way (:mod:`planner.costs.simulator.prices`), so that everything is done in the order of
time.  Between two events all speeds are constant.  A flow's end, and that of a computation, is an event at the time
that its speed now gives; when the speed changes what is left is counted and a new event takes the old one's place,
which is known by its time when it comes up and is passed over.  Which speeds a flow's start or end changes depends on
the set of flows alone: sets come again and again in a pipeline, so each change is worked out once.

Only computing (forward, backward, update, preparing on the rank itself) is slowed; calls that send, and whatever an
executor does beside, are not, nor is a rank that waits.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from planner.costs.simulator.prices import Prices, Speeds, Traffic
from planner.costs.simulator.program import (
    COMPUTE_STEP,
    PREPARE_STEP,
    PREPARED_STEP,
    RECEIVE_STEP,
    SEND_STEP,
    TIED_STEP,
    CompiledProgram,
)
from planner.costs.timeline import TICK_DIGITS, Trace, require_done

_NOT_YET = -1.0
_NOBODY = -1

_BEGINS, _ENDS, _CALLS, _LOOKS = range(4)
"""What a rank does when its time comes: begins the step, ends it, calls the next message's send, looks whether what it
awaits is there."""


def execute_shared(compiled: CompiledProgram, prices: Prices, traffic: Traffic) -> Trace:
    """Runs all rows to their end.

    Raises:
        IllegalProgramError: nobody can move and somebody is not done.
    """
    engine = _Engine(compiled, prices, traffic)
    engine.run()
    require_done(compiled, engine.position)
    return Trace(engine.starts, engine.stops, engine.sent, engine.arrived, engine.released)


class _Engine:
    """A step under way.  Events are (time, number): flows first, by number, then ranks."""

    def __init__(self, compiled: CompiledProgram, prices: Prices, traffic: Traffic) -> None:
        num_ranks, num_messages, num_flows = len(compiled.rows), len(compiled.messages), len(traffic.flows)
        self.compiled, self.prices, self.flows = compiled, prices, traffic.flows
        self.beside = prices.beside or (False,) * num_ranks
        self.slot_of = [slot for slot, _ in compiled.messages]
        self.wire_of = [prices.wires[channel] for _, channel in compiled.messages]
        self.digits = TICK_DIGITS if len(set(prices.wires)) < len(prices.wires) else None
        self.events: list[tuple[float, int, float]] = []
        # flows: what is left of them, since when, how fast, and the message or reduction that each is
        self.speeds = Speeds(traffic)
        self.left, self.since, self.speed = [0.0] * num_flows, [0.0] * num_flows, [1.0] * num_flows
        self.ends, self.carries = [_NOT_YET] * num_flows, [_NOBODY] * num_flows
        # messages
        self.queues: list[deque[int]] = [deque() for _ in prices.wires]
        self.called = [False] * num_messages
        self.sent, self.arrived = [_NOT_YET] * num_messages, [_NOT_YET] * num_messages
        self.awaited_by = [_NOBODY] * num_messages
        self.held_by = [_NOBODY] * num_messages
        # reductions and what is prepared
        self.members: list[list[int]] = [[] for _ in compiled.reductions]
        self.released = [_NOT_YET] * len(compiled.reductions)
        self.tied: list[set[int]] = [set() for _ in compiled.ties]
        self.prepared, self.host_free = [_NOT_YET] * compiled.num_prepared, [0.0] * num_ranks
        # ranks: what is left of their computing (negative: they do not compute), since when, how fast, when they move
        self.work, self.worked, self.rate = [_NOT_YET] * num_ranks, [0.0] * num_ranks, [1.0] * num_ranks
        self.wakes, self.does, self.next_call = [_NOT_YET] * num_ranks, [_BEGINS] * num_ranks, [0] * num_ranks
        self.position = [0] * num_ranks
        self.starts: list[list[float]] = [[] for _ in compiled.rows]
        self.stops: list[list[float]] = [[] for _ in compiled.rows]

    def run(self) -> None:
        """Until nothing happens any more."""
        events, num_flows, ends, wakes = self.events, len(self.flows), self.ends, self.wakes
        for rank in range(len(wakes)):
            self._wake(rank, 0.0)
        while events:
            _, number, at = heappop(events)
            if number >= num_flows:
                if wakes[number - num_flows] == at:
                    self._move(number - num_flows, at)
            elif ends[number] == at:
                self._ended(number, at)

    def _wake(self, rank: int, at: float) -> None:
        self.wakes[rank] = at
        key = at if self.digits is None else round(at, self.digits)
        heappush(self.events, (key, len(self.flows) + rank, at))

    def _move(self, rank: int, now: float) -> None:
        """What the rank does at its time; it has another time afterwards, or somebody gives it one."""
        row, does = self.compiled.rows[rank], self.does[rank]
        self.wakes[rank] = _NOT_YET
        if does == _ENDS:
            self.stops[rank].append(now)
            self.work[rank] = _NOT_YET
            self.position[rank] += 1
            does = self.does[rank] = _BEGINS
        if self.position[rank] >= len(row):
            return
        code, slot, numbers = row[self.position[rank]]
        if code == COMPUTE_STEP:
            self.starts[rank].append(now)
            self._work(rank, now, slot)
        elif code == RECEIVE_STEP:
            if does == _BEGINS:
                self.starts[rank].append(now)
            self._receive(rank, now, slot, numbers)
        elif code == SEND_STEP:
            self._send(rank, now, slot, numbers) if does == _BEGINS else self._call(rank, now, numbers)
        elif code == PREPARE_STEP:
            self._prepare(rank, now, slot, numbers[0])
        elif code == PREPARED_STEP:
            if self.prepared[numbers[0]] > now:
                self._wake(rank, self.prepared[numbers[0]])
            else:
                self.starts[rank].append(now)
                self._work(rank, now, slot)
        elif code == TIED_STEP:
            if self._meet(rank, now, numbers):
                self.starts[rank].append(now)
                self._work(rank, now, slot)
            else:
                self.does[rank] = _LOOKS
        else:
            self.starts[rank].append(now)
            self._reduce(rank, now, slot, numbers[0])

    def _work(self, rank: int, now: float, slot: int) -> None:
        """Computes, at the rate that the messages at the rank leave it."""
        seconds = self.prices.action_s[slot]
        self.work[rank], self.worked[rank], self.does[rank] = seconds, now, _ENDS
        self._wake(rank, now + seconds / self.rate[rank])

    def _end(self, rank: int, at: float) -> None:
        """The step ends at a time that nothing changes."""
        self.does[rank] = _ENDS
        self._wake(rank, at)

    def _receive(self, rank: int, now: float, slot: int, numbers: tuple[int, ...]) -> None:
        for message in numbers:
            if self.arrived[message] < 0:
                self.awaited_by[message] = rank
                self.does[rank] = _LOOKS
                return
        stop = now + self.prices.action_s[slot]
        if self.compiled.blocking:
            stop += sum(self.prices.transfer_s[self.slot_of[message]] for message in numbers)
        self._end(rank, stop)

    def _send(self, rank: int, now: float, slot: int, numbers: tuple[int, ...]) -> None:
        """The messages get their places on their wires; then the first call begins."""
        self.starts[rank].append(now)
        for message in numbers:
            self.queues[self.wire_of[message]].append(message)
        self.does[rank], self.next_call[rank] = _CALLS, 0
        self._wake(rank, now + self.prices.action_s[slot])

    def _call(self, rank: int, now: float, numbers: tuple[int, ...]) -> None:
        """The next message's call, and those after it if it takes no time."""
        while self.next_call[rank] < len(numbers):
            message = numbers[self.next_call[rank]]
            self.next_call[rank] += 1
            self.called[message] = True
            self._begin(self.wire_of[message], now)
            if self.compiled.blocking:
                if self.arrived[message] < 0:
                    self.held_by[message] = rank
                    return
            elif self.prices.sending_s:
                held_s = self.prices.sending_s[self.slot_of[message]]
                if held_s > 0:
                    self._wake(rank, now + held_s)
                    return
        self._end(rank, now)

    def _begin(self, wire: int, now: float) -> None:
        """The first message of a wire's queue starts, if it was called; one that takes no time is there at once."""
        queue = self.queues[wire]
        while queue and self.called[queue[0]] and self.sent[queue[0]] < 0:
            message, flow = queue[0], self.slot_of[queue[0]]
            self.sent[message] = now
            if self.flows[flow].seconds > 0:
                self._start(flow, message, now)
                return
            queue.popleft()
            self._arrive(message, now)

    def _arrive(self, message: int, now: float) -> None:
        self.arrived[message] = now
        for rank in (self.awaited_by[message], self.held_by[message]):
            if rank >= 0:
                self._wake(rank, now)

    def _prepare(self, rank: int, now: float, slot: int, number: int) -> None:
        begin = max(now, self.host_free[rank])
        self.starts[rank].append(begin)
        if not self.beside[rank]:
            self._work(rank, begin, slot)
            return
        stop = self.prepared[number] = self.host_free[rank] = begin + self.prices.action_s[slot]
        self.stops[rank].append(stop)
        self.position[rank] += 1
        self._wake(rank, now)

    def _meet(self, rank: int, now: float, ties: tuple[int, ...]) -> bool:
        """Whether all ranks of its ties are there; the last one wakes the others."""
        for number in ties:
            there, everyone = self.tied[number], self.compiled.ties[number]
            if rank not in there:
                there.add(rank)
                if len(there) == len(everyone):
                    for other in everyone:
                        if other != rank:
                            self._wake(other, now)
        return all(len(self.tied[number]) == len(self.compiled.ties[number]) for number in ties)

    def _reduce(self, rank: int, now: float, slot: int, reduction: int) -> None:
        """The last member to arrive releases the others."""
        members = self.members[reduction]
        members.append(rank)
        self.does[rank] = _ENDS
        if len(members) < self.compiled.reductions[reduction]:
            return
        self.released[reduction] = now
        flow = len(self.compiled.transfers) + self.compiled.reduced_stages[reduction]
        if self.flows[flow].cards:
            self._start(flow, reduction, now)
        else:
            self._release(reduction, now)

    def _release(self, reduction: int, now: float, less_s: float = 0.0) -> None:
        """Its members end, each after its price less what is over."""
        for rank in self.members[reduction]:
            slot = self.compiled.rows[rank][self.position[rank]][1]
            self._wake(rank, now + max(0.0, self.prices.action_s[slot] - less_s))

    def _start(self, flow: int, carries: int, now: float) -> None:
        self.carries[flow], self.left[flow], self.since[flow] = carries, self.flows[flow].seconds, now
        self.speed[flow] = 0.0  # it has done nothing so far
        self._change(flow, now)

    def _ended(self, flow: int, now: float) -> None:
        """A message is there, or a sum made."""
        self.ends[flow] = _NOT_YET
        self._change(flow, now)
        if flow < len(self.compiled.transfers):
            message = self.carries[flow]
            self.queues[self.wire_of[message]].popleft()
            self._begin(self.wire_of[message], now)
            self._arrive(message, now)
        else:
            self._release(self.carries[flow], now, self.flows[flow].seconds)

    def _change(self, flow: int, now: float) -> None:
        """A flow starts or ends: new speeds for all that it slowed, or let go."""
        of_flows, of_ranks = self.speeds.toggled(flow)
        left, since, speeds = self.left, self.since, self.speed
        for each, speed in of_flows:
            left[each] = max(0.0, left[each] - (now - since[each]) * speeds[each])
            since[each], speeds[each] = now, speed
            at = self.ends[each] = now + left[each] / speed
            heappush(self.events, (at if self.digits is None else round(at, self.digits), each, at))
        for rank, rate in of_ranks:
            if self.work[rank] >= 0:
                self.work[rank] = max(0.0, self.work[rank] - (now - self.worked[rank]) * self.rate[rank])
                self.worked[rank] = now
                self._wake(rank, now + self.work[rank] / rate)
            self.rate[rank] = rate
