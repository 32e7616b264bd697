"""A step of a program, simulated event by event.

Resources: a compute stream for each rank; a channel for each ordered pair of ranks, on which messages travel one after
another (one for both directions where the link is not duplex). A send keeps its rank, message by message, for the call
that sends (``Link.sending``); a message starts with its call. A receive waits for the message, and keeps its rank for
what the next action takes longer after a wait; a reduction starts when its last member has arrived, and the first
update of ranks that use parameters of other stages when all of these have come to theirs. A message that
blocks holds its sender until it has left, and then its receiver for as long again (it is sent, then taken, by ranks
that do nothing else meanwhile). What is prepared of a micro-batch occupies its rank or, beside an accelerator, a thread
of the host: one after another, from when the rank asks for it, and the forward waits (``costs.stages.input_pipeline``);
what is prepared of the next step fills a rank's waits (:mod:`planner.costs.simulator.next_step`).
What must precede what comes from ``dependencies``, checked when the program was compiled.

:func:`execute` runs a program whose messages share nothing but their channels;
:mod:`planner.costs.simulator.contention` one whose messages share network cards or slow the computing of their ranks
(:mod:`planner.costs.simulator.traffic`, which says what is ignored).  Where every channel has a wire of its own the
first is a lower bound of the second: both take every row's steps, and every wire's messages, in the same order, each
step begins when those before it are over, and no step or message of the second takes less than it does in the first; so
by induction over that order nothing ends earlier. (Where directions share a wire their order depends on times: the
bound has a wire for each direction.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from math import inf

from planner.costs.memory.lifetimes import usages
from planner.costs.memory.messages import CoalescedMessage
from planner.costs.simulator import contention
from planner.costs.simulator.next_step import with_next_step
from planner.costs.simulator.prices import SlotPrices
from planner.costs.simulator.program import (
    COMPUTE_STEP,
    PREPARE_STEP,
    PREPARED_STEP,
    RECEIVE_STEP,
    SEND_STEP,
    TIED_STEP,
    CompiledProgram,
)
from planner.costs.simulator.rows import NOBODY, ProgramRows
from planner.costs.stages.action_costs import StageCosts
from planner.costs.timeline import Trace
from planner.ir.timeline import MemorySample, Span, Timeline


def run(compiled: CompiledProgram, prices: SlotPrices) -> Trace:
    """The step, by the engine that it needs.

    Raises:
        IllegalProgramError: the program never ends.
    """
    trace = (
        contention.execute_shared(compiled, prices, prices.traffic)
        if prices.traffic is not None
        else execute(compiled, prices)
    )
    return with_next_step(compiled, trace, prices.next_step)


def least_s(compiled: CompiledProgram, prices: SlotPrices) -> float:
    """No step of the program is shorter (that of :func:`run` if nothing is shared): quick.

    Raises:
        IllegalProgramError: the program never ends.
    """
    if prices.traffic is not None:
        prices = replace(prices, wires=range(len(prices.wires)))
    return execute(compiled, prices).step_s


def step_unless_longer(compiled: CompiledProgram, prices: SlotPrices, known_s: float) -> float:
    """The step as of :func:`run`, or a lower bound of it that is longer than ``known_s``.

    Of a program whose messages share anything no more is run than it takes to know that.

    Raises:
        IllegalProgramError: the program never ends.
    """
    if prices.traffic is None or prices.next_step or known_s == inf:
        return run(compiled, prices).step_s
    left_s = least_left_s(compiled, prices)
    return contention.step_unless_longer(compiled, prices, prices.traffic, known_s, left_s)


def least_left_s(compiled: CompiledProgram, prices: SlotPrices) -> list[list[float]]:
    """By rank and position, what a program takes at least from the beginning of the step there to its end.

    A step takes what it takes alone; after it come the rest of its row, and after a send what follows the receipt of
    its messages.  Waits are left out, so that this holds whatever is shared.  Rows are taken from their ends; one waits
    until it is known what follows the receipt of a message.
    """
    seconds = prices.action_s
    rows = compiled.rows
    left_s = [[0.0] * len(row) for row in rows]
    position = [len(row) for row in rows]
    after_receipt: dict[int, float] = {}
    waiting: dict[int, int] = {}
    ready = list(range(len(rows)))
    while ready:
        rank = ready.pop()
        row = rows[rank]
        own = left_s[rank]
        after = own[position[rank]] if position[rank] < len(row) else 0.0
        while position[rank]:
            code, slot, numbers = row[position[rank] - 1]
            if code == SEND_STEP:
                missing = next((message for message in numbers if message not in after_receipt), NOBODY)
                if missing >= 0:
                    waiting[missing] = rank
                    break
                called = seconds[slot]
                arrives = 0.0
                for message in numbers:
                    transfer = compiled.messages[message][0]
                    arrives = max(arrives, called + prices.transfer_s[transfer] + after_receipt[message])
                    called += prices.sending_s[transfer] if prices.sending_s and not compiled.blocking else 0.0
                after = max(called + after, arrives)
            elif code == RECEIVE_STEP:
                after += seconds[slot]
                for message in numbers:
                    after_receipt[message] = after
                    if message in waiting:
                        ready.append(waiting.pop(message))
            elif code != PREPARE_STEP:
                after += seconds[slot]
            position[rank] -= 1
            own[position[rank]] = after
    return left_s


def execute(compiled: CompiledProgram, prices: SlotPrices) -> Trace:
    """Runs all rows to their end; messages share nothing but wires.

    Ranks are advanced as far as they get, in any order: with wires that only one rank feeds the result does not depend
    on it.  Where a wire is shared, the rank whose clock is least moves first, one step at a time (``TICK_DIGITS``).

    Raises:
        IllegalProgramError: nobody can move and somebody is not done.
    """
    rows = _UnsharedRows(compiled, prices)
    rows.run()
    return rows.trace()


def timeline(
    compiled: CompiledProgram,
    trace: Trace,
    costs: StageCosts,
    transfer_bytes: Sequence[int],
    carried: Sequence[CoalescedMessage] = (),
) -> Timeline:
    """The trace as a timeline, with memory beside it.

    ``transfer_bytes`` and ``carried`` as of :func:`planner.costs.memory.lifetimes.usages`.
    """
    spans = tuple(
        Span(rank, str(action), start, stop)
        for rank, row in enumerate(compiled.grid)
        for action, start, stop in zip(row, trace.starts[rank], trace.stops[rank], strict=True)
    )
    memory = []
    for rank, usage in enumerate(usages(costs, compiled, transfer_bytes, carried)):
        memory.append(MemorySample(rank, 0.0, usage.always if usage else 0))
        for position, during, after in usage.samples() if usage else ():
            memory.append(MemorySample(rank, trace.starts[rank][position], during))
            memory.append(MemorySample(rank, trace.stops[rank][position], after))
    return Timeline("predicted", trace.step_s, spans, tuple(memory))


class _UnsharedRows(ProgramRows):
    """Rows whose actions and messages last as long as they do alone: each rank is taken as far as it gets."""

    def __init__(self, compiled: CompiledProgram, prices: SlotPrices) -> None:
        super().__init__(compiled, prices)
        self.message_s = [prices.transfer_s[slot] for slot in self.slot_of]
        self.sending_s = [prices.sending_s[slot] for slot in self.slot_of] if prices.sending_s else []
        self.free = [0.0] * len(prices.wires)  # by wire
        self.clock = [0.0] * len(compiled.rows)
        self.ready = [(0.0, rank) for rank in range(len(compiled.rows))]
        heapify(self.ready)

    def wake(self, rank: int, at: float) -> None:
        """Looks at the rank again."""
        heappush(self.ready, (self.tick(at), rank))

    def run(self) -> None:
        """Until nobody can move; of a rank all steps until one has to wait, or one alone where a wire is shared."""
        ready = self.ready
        position = self.position
        clock = self.clock
        rows = self.compiled.rows
        seconds = self.prices.action_s
        arrived = self.arrived
        blocking = self.compiled.blocking
        one_by_one = self.digits is not None
        while ready:
            _, rank = heappop(ready)
            row = rows[rank]
            now = clock[rank]
            index = position[rank]
            starts = self.starts[rank]
            stops = self.stops[rank]
            while index < len(row):
                code, slot, numbers = row[index]
                begin = now
                if code == RECEIVE_STEP:
                    stop = now
                    missing = NOBODY
                    for message in numbers:
                        at = arrived[message]
                        if at < 0:
                            missing = message
                            break
                        stop = at if at > stop else stop
                    if missing >= 0:
                        self.awaited_by[missing] = rank
                        break
                    stop += seconds[slot]
                    if blocking:
                        stop += self.blocked_s(numbers)
                elif code == COMPUTE_STEP:
                    stop = now + seconds[slot]
                elif code == SEND_STEP:
                    stop = self._send(now + seconds[slot], numbers)
                elif code == PREPARE_STEP:
                    begin, stop = self.prepare(rank, now, slot, numbers[0])
                else:
                    if code == PREPARED_STEP:
                        begin = since = max(now, self.prepared[numbers[0]])
                    elif code == TIED_STEP:
                        begin = since = self.meet_tied(rank, numbers, now)
                    else:
                        since = self.meet(numbers[0], rank, self.compiled.reductions[numbers[0]], now)
                        self.released[numbers[0]] = since
                    if since < 0:
                        break
                    stop = since + seconds[slot]
                starts.append(begin)
                stops.append(stop)
                index += 1
                if code != PREPARE_STEP or not self.beside[rank]:
                    now = stop
                if one_by_one:
                    break
            clock[rank] = now
            if one_by_one and position[rank] < index < len(row):
                self.wake(rank, now)
            position[rank] = index

    def _send(self, now: float, numbers: tuple[int, ...]) -> float:
        """Sends messages, one call after another from ``now`` on; when the last call is over."""
        free = self.free
        arrived = self.arrived
        blocking = self.compiled.blocking
        for message in numbers:
            wire = self.wire_of[message]
            begin = free[wire]
            self.sent[message] = begin = begin if begin > now else now
            arrived[message] = free[wire] = at = begin + self.message_s[message]
            if blocking:
                now = at
            elif self.sending_s:
                now += self.sending_s[message]
            rank = self.awaited_by[message]
            if rank >= 0:
                self.wake(rank, max(self.clock[rank], at))
        return now
