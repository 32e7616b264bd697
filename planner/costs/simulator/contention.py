"""A step of a program whose messages share network cards, or slow down the computing of their ranks.

What happens is as in :mod:`planner.costs.simulator.events`, but how fast messages, sums of gradients and computing go
changes with what else is under way (:mod:`planner.costs.simulator.traffic`), so that everything is done in the order of
time.  Between two events all speeds are constant.  A flow's end, and that of a computation, is an event at the time
that its speed now gives; when the speed changes what is left is counted and a new event takes the old one's place,
which is known by its time when it comes up and is passed over.  Which speeds a flow's start or end changes depends on
the set of flows alone: sets come again and again in a pipeline, so each change is worked out once.

Only computing (forward, backward, update, preparing on the rank itself) is slowed, by messages and, passes alone, by
what other ranks of the host compute meanwhile; a rank that goes on to its next action at once computes throughout.
Calls that send, and whatever an executor does beside, are not slowed, nor is a rank that waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

from planner.costs.simulator.prices import SlotPrices
from planner.costs.simulator.program import (
    PREPARE_STEP,
    PREPARED_STEP,
    RECEIVE_STEP,
    REDUCE_STEP,
    SEND_STEP,
    TIED_STEP,
    CompiledProgram,
    Step,
)
from planner.costs.simulator.rows import NOBODY, ProgramRows
from planner.costs.simulator.traffic import FlowSpeeds, Neighbours, NetworkTraffic
from planner.costs.timeline import Trace
from planner.passes.events import NOT_YET

_BEGINS, _ENDS, _CALLS, _LOOKS = range(4)
"""What a rank does when its time comes: begins the step, ends it, calls the next message's send, looks whether what it
awaits is there."""


def execute_shared(compiled: CompiledProgram, prices: SlotPrices, traffic: NetworkTraffic) -> Trace:
    """Runs all rows to their end.

    Raises:
        IllegalProgramError: nobody can move and somebody is not done.
    """
    rows = _SharedRows(compiled, prices, traffic)
    rows.run()
    return rows.trace()


def step_unless_longer(
    compiled: CompiledProgram,
    prices: SlotPrices,
    traffic: NetworkTraffic,
    known_s: float,
    least_left_s: Sequence[Sequence[float]],
) -> float:
    """The step; where it is longer than ``known_s``, a lower bound above that, at the moment at which this is sure.

    Args:
        least_left_s: by rank and position, what the program takes at least from the beginning of the step there.

    Raises:
        IllegalProgramError: nobody can move and somebody is not done.
    """
    rows = _SharedRows(compiled, prices, traffic)
    rows.known_s = known_s
    rows.least_left_s = least_left_s
    rows.run()
    return rows.bound_s if rows.bound_s > known_s else rows.trace().step_s


class _SharedRows(ProgramRows):
    """A step under way.  Events are (time, number): flows first, by number, then ranks."""

    def __init__(self, compiled: CompiledProgram, prices: SlotPrices, traffic: NetworkTraffic) -> None:
        super().__init__(compiled, prices)
        num_ranks = len(compiled.rows)
        num_flows = len(traffic.flows)
        num_messages = len(compiled.messages)
        self.flows = traffic.flows
        # the run ends where the step is surely longer than what is known
        self.known_s = inf
        self.bound_s = 0.0
        self.least_left_s: Sequence[Sequence[float]] = ()
        self.events: list[tuple[float, int, float]] = []
        # flows: what is left of them, since when, how fast, and the message or reduction that each is
        self.speeds = FlowSpeeds(traffic)
        self.left = [0.0] * num_flows
        self.since = [0.0] * num_flows
        self.speed = [1.0] * num_flows
        self.ends = [NOT_YET] * num_flows
        self.carries = [NOBODY] * num_flows
        # messages
        self.queues: list[deque[int]] = [deque() for _ in prices.wires]
        self.called = [False] * num_messages
        self.held_by = [NOBODY] * num_messages
        # ranks: what is left of their computing (negative: they do not compute), since when, how fast, when they move
        self.work = [NOT_YET] * num_ranks
        self.worked = [0.0] * num_ranks
        self.rate = [1.0] * num_ranks
        # how fast messages let them go, what they compute, and whether those on their hosts know that they do
        self.beside_messages = [1.0] * num_ranks
        self.slot_at = [0] * num_ranks
        self.computes = [False] * num_ranks
        self.num_computing = [0] * num_ranks  # by host
        self.wakes = [NOT_YET] * num_ranks
        self.does = [_BEGINS] * num_ranks
        self.next_call = [0] * num_ranks

    def run(self) -> None:
        """Until nothing happens any more."""
        events = self.events
        num_flows = len(self.flows)
        ends = self.ends
        wakes = self.wakes
        neighbours = self.prices.neighbours
        for rank in range(len(wakes)):
            self.wake(rank, 0.0)
        while events:
            _, number, at = heappop(events)
            if number >= num_flows:
                if wakes[number - num_flows] == at:
                    self._move(number - num_flows, at)
                    if neighbours is not None and events:  # none: nobody computes, or the step is known to be too long
                        self._tell_neighbours(neighbours, number - num_flows, at)
            elif ends[number] == at:
                self._ended(number, at)

    def wake(self, rank: int, at: float) -> None:
        """The rank moves at that time."""
        self.wakes[rank] = at
        heappush(self.events, (self.tick(at), len(self.flows) + rank, at))

    def _move(self, rank: int, now: float) -> None:
        """What the rank does at its time; it has another time afterwards, or somebody gives it one."""
        row = self.compiled.rows[rank]
        does = self.does[rank]
        self.wakes[rank] = NOT_YET
        if does == _ENDS:
            self.stops[rank].append(now)
            self.work[rank] = NOT_YET
            self.position[rank] += 1
            does = self.does[rank] = _BEGINS
        if self.position[rank] >= len(row):
            return
        code, slot, numbers = row[self.position[rank]]
        if self.least_left_s and does == _BEGINS:
            self.bound_s = now + self.least_left_s[rank][self.position[rank]]
            if self.bound_s > self.known_s:
                self.events.clear()
                return
        if code == RECEIVE_STEP:
            if does == _BEGINS:
                self.starts[rank].append(now)
            self._receive(rank, now, slot, numbers)
        elif code == SEND_STEP:
            self._send(rank, now, slot, numbers) if does == _BEGINS else self._call(rank, now, numbers)
        elif code == PREPARE_STEP and self.beside[rank]:
            self._prepare(rank, now, slot, numbers[0])
        elif code == REDUCE_STEP:
            self.starts[rank].append(now)
            self._reduce(rank, now, slot, numbers[0])
        else:
            self._compute(rank, now, row[self.position[rank]])

    def _compute(self, rank: int, now: float, step: Step) -> None:
        """Begins to compute, or waits for what the step needs beside its place in the row."""
        code, slot, numbers = step
        since = now
        if code == PREPARED_STEP:
            since = max(now, self.prepared[numbers[0]])
        elif code == TIED_STEP:
            since = self.meet_tied(rank, numbers, now)
        if since < 0:
            self.does[rank] = _LOOKS
        elif since > now:
            self.wake(rank, since)
        else:
            self.starts[rank].append(now)
            self._work(rank, now, slot)

    def _work(self, rank: int, now: float, slot: int) -> None:
        """Computes, at the rate that the messages at the rank and those on its host leave it."""
        seconds = self.prices.action_s[slot]
        self.work[rank] = seconds
        self.worked[rank] = now
        self.does[rank] = _ENDS
        self.slot_at[rank] = slot
        self.rate[rank] = self._rate(rank)
        self.wake(rank, now + seconds / self.rate[rank])

    def _rate(self, rank: int) -> float:
        """How fast the rank computes now what it computes."""
        neighbours = self.prices.neighbours
        if neighbours is None:
            return self.beside_messages[rank]
        others = self.num_computing[neighbours.hosts[rank]] - self.computes[rank]
        return self.beside_messages[rank] * neighbours.rate(rank, self.slot_at[rank], others)

    def _tell_neighbours(self, neighbours: Neighbours, rank: int, now: float) -> None:
        """If the rank has begun to compute, or has ended, others on its host go at another rate."""
        if self.computes[rank] == (self.work[rank] >= 0):
            return
        self.computes[rank] = not self.computes[rank]
        host = neighbours.hosts[rank]
        self.num_computing[host] += 1 if self.computes[rank] else -1
        for other, at in enumerate(neighbours.hosts):
            if at == host and other != rank and self.work[other] >= 0:
                self._change_rate(other, now)

    def _change_rate(self, rank: int, now: float) -> None:
        """The rank goes on with what it computes at the rate that it has now."""
        self.work[rank] = max(0.0, self.work[rank] - (now - self.worked[rank]) * self.rate[rank])
        self.worked[rank] = now
        self.rate[rank] = self._rate(rank)
        self.wake(rank, now + self.work[rank] / self.rate[rank])

    def _end(self, rank: int, at: float) -> None:
        """The step ends at a time that nothing changes."""
        self.does[rank] = _ENDS
        self.wake(rank, at)

    def _receive(self, rank: int, now: float, slot: int, numbers: tuple[int, ...]) -> None:
        for message in numbers:
            if self.arrived[message] < 0:
                self.awaited_by[message] = rank
                self.does[rank] = _LOOKS
                return
        self._end(rank, now + self.prices.action_s[slot] + self.blocked_s(numbers))

    def _send(self, rank: int, now: float, slot: int, numbers: tuple[int, ...]) -> None:
        """The messages get their places on their wires; then the first call begins."""
        self.starts[rank].append(now)
        for message in numbers:
            self.queues[self.wire_of[message]].append(message)
        self.does[rank] = _CALLS
        self.next_call[rank] = 0
        self.wake(rank, now + self.prices.action_s[slot])

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
                    self.wake(rank, now + held_s)
                    return
        self._end(rank, now)

    def _begin(self, wire: int, now: float) -> None:
        """The first message of a wire's queue starts, if it was called; one that takes no time is there at once."""
        queue = self.queues[wire]
        while queue and self.called[queue[0]] and self.sent[queue[0]] < 0:
            message = queue[0]
            flow = self.slot_of[queue[0]]
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
                self.wake(rank, now)

    def _prepare(self, rank: int, now: float, slot: int, number: int) -> None:
        """The rank's host begins to prepare; the rank goes on."""
        begin, stop = self.prepare(rank, now, slot, number)
        self.starts[rank].append(begin)
        self.stops[rank].append(stop)
        self.position[rank] += 1
        self.wake(rank, now)

    def _reduce(self, rank: int, now: float, slot: int, reduction: int) -> None:
        """The last member to arrive releases the others."""
        self.does[rank] = _ENDS
        if len(self.join(reduction, rank, now)) < self.compiled.reductions[reduction]:
            return
        self.released[reduction] = now
        flow = len(self.compiled.transfers) + self.compiled.reduced_stages[reduction]
        if self.flows[flow].cards:
            self._start(flow, reduction, now)
        else:
            self._release(reduction, now)

    def _release(self, reduction: int, now: float, less_s: float = 0.0) -> None:
        """Its members end, each after its price less what is over."""
        for rank in self.present[reduction]:
            slot = self.compiled.rows[rank][self.position[rank]][1]
            self.wake(rank, now + max(0.0, self.prices.action_s[slot] - less_s))

    def _start(self, flow: int, carries: int, now: float) -> None:
        self.carries[flow] = carries
        self.left[flow] = self.flows[flow].seconds
        self.since[flow] = now
        self.speed[flow] = 0.0  # it has done nothing so far
        self._change(flow, now)

    def _ended(self, flow: int, now: float) -> None:
        """A message is there, or a sum made."""
        self.ends[flow] = NOT_YET
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
        left = self.left
        since = self.since
        speeds = self.speed
        for each, speed in of_flows:
            left[each] = max(0.0, left[each] - (now - since[each]) * speeds[each])
            since[each] = now
            speeds[each] = speed
            at = self.ends[each] = now + left[each] / speed
            heappush(self.events, (self.tick(at), each, at))
        for rank, rate in of_ranks:
            self.beside_messages[rank] = rate
            if self.work[rank] >= 0:
                self._change_rate(rank, now)
