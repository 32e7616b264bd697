"""A step of a program, simulated event by event.

Resources: a compute stream for each rank; a channel for each ordered pair of ranks, on which messages travel one after
another (one for both directions where the link is not duplex). A send keeps its rank, message by message, for the call
that sends (``Link.sending``); a message starts with its call. A receive waits for the message, and keeps its rank for
what the action behind it takes longer after a wait; a reduction starts when its last member has arrived, and the first
update of ranks that use parameters of other stages when all of these have come to theirs. A message that
blocks holds its sender until it has left, and then its receiver for as long again (it is sent, then taken, by ranks
that do nothing else meanwhile). What is prepared of a micro-batch occupies its rank or, beside an accelerator, a thread
of the host: one after another, from when the rank asks for it, and the forward waits (``costs.stages.input_pipeline``);
what is prepared of the next step fills a rank's waits (:mod:`planner.costs.simulator.next_step`).
What must precede what comes from ``dependencies``, checked when the program was compiled.

:func:`execute` runs a program whose messages share nothing but their channels;
:mod:`planner.costs.simulator.contention` one whose messages share network cards or slow the computing of their ranks
(:mod:`planner.costs.simulator.prices`, which says what is ignored).  Where every channel has a wire of its own the
first is a lower bound of the second: both take every row's steps, and every wire's messages, in the same order, each
step begins when those before it are over, and no step or message of the second takes less than it does in the first; so
by induction over that order nothing ends earlier. (Where directions share a wire their order depends on times: the
bound has a wire for each direction.)
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from planner.costs.memory.lifetimes import usages
from planner.costs.memory.messages import Carried
from planner.costs.simulator.contention import execute_shared
from planner.costs.simulator.next_step import with_next_step
from planner.costs.simulator.prices import Prices
from planner.costs.simulator.program import (
    COMPUTE_STEP,
    PREPARE_STEP,
    PREPARED_STEP,
    RECEIVE_STEP,
    SEND_STEP,
    TIED_STEP,
    CompiledProgram,
)
from planner.costs.stages.action_costs import StageCosts
from planner.costs.timeline import TICK_DIGITS, Trace, require_done
from planner.ir.timeline import MemorySample, Span, Timeline

_NOT_YET = -1.0
_NOBODY = -1


def run(compiled: CompiledProgram, prices: Prices) -> Trace:
    """The step, by the engine that it needs.

    Raises:
        IllegalProgramError: the program never ends.
    """
    if prices.traffic is not None:
        trace = execute_shared(compiled, prices, prices.traffic)
    else:
        trace = execute(compiled, prices.action_s, prices.transfer_s, prices.wires, prices.beside, prices.sending_s)
    return with_next_step(compiled, trace, prices.next_step)


def least_s(compiled: CompiledProgram, prices: Prices) -> float:
    """No step of the program is shorter (that of :func:`run` if nothing is shared): quick.

    Raises:
        IllegalProgramError: the program never ends.
    """
    wires = prices.wires if prices.traffic is None else range(len(prices.wires))
    return execute(compiled, prices.action_s, prices.transfer_s, wires, prices.beside, prices.sending_s).step_s


def execute(
    compiled: CompiledProgram,
    seconds: Sequence[float],
    transfer_s: Sequence[float],
    wires: Sequence[int],
    beside: Sequence[bool] = (),
    sending_s: Sequence[float] = (),
) -> Trace:
    """Runs all rows to their end; messages share nothing but wires.

    Ranks are advanced as far as they get, in any order: with wires that only one rank feeds the result does not depend
    on it.  Where a wire is shared, the rank that is furthest behind moves first, one step at a time (``TICK_DIGITS``).

    Args:
        seconds: by action slot.
        transfer_s: by transfer slot.
        wires: by channel.
        beside: by rank, whether its host prepares while it computes; empty: nowhere.
        sending_s: by transfer slot, how long the call keeps its rank; empty: not at all.

    Raises:
        IllegalProgramError: nobody can move and somebody is not done.
    """
    engine = _Rows(compiled, seconds, transfer_s, wires, beside, sending_s)
    engine.run()
    require_done(compiled, engine.position)
    return Trace(engine.starts, engine.stops, engine.sent, engine.arrived, engine.released)


def timeline(
    compiled: CompiledProgram, trace: Trace, costs: StageCosts, sizes: Sequence[int], carried: Sequence[Carried] = ()
) -> Timeline:
    """The trace as a timeline, with memory beside it.

    ``sizes`` and ``carried`` as of :func:`planner.costs.memory.lifetimes.usages`.
    """
    spans = tuple(
        Span(rank, str(action), start, stop)
        for rank, row in enumerate(compiled.grid)
        for action, start, stop in zip(row, trace.starts[rank], trace.stops[rank], strict=True)
    )
    memory = []
    for rank, usage in enumerate(usages(costs, compiled, sizes, carried)):
        memory.append(MemorySample(rank, 0.0, usage.always if usage else 0))
        for position, during, after in usage.samples() if usage else ():
            memory.append(MemorySample(rank, trace.starts[rank][position], during))
            memory.append(MemorySample(rank, trace.stops[rank][position], after))
    return Timeline("predicted", trace.step_s, spans, tuple(memory))


class _Rows:
    """The rows of a program while they run."""

    def __init__(
        self,
        compiled: CompiledProgram,
        seconds: Sequence[float],
        transfer_s: Sequence[float],
        wires: Sequence[int],
        beside: Sequence[bool],
        sending_s: Sequence[float],
    ) -> None:
        num_ranks, num_messages = len(compiled.rows), len(compiled.messages)
        self.compiled, self.seconds, self.beside = compiled, seconds, beside or (False,) * num_ranks
        self.one_by_one, self.blocking = len(set(wires)) < len(wires), compiled.blocking
        self.message_s = [transfer_s[slot] for slot, _ in compiled.messages]
        self.message_wire = [wires[channel] for _, channel in compiled.messages]
        self.sending_s = [sending_s[slot] for slot, _ in compiled.messages] if sending_s else []
        self.free = [0.0] * len(wires)
        self.sent, self.arrived = [_NOT_YET] * num_messages, [_NOT_YET] * num_messages
        self.waiting = [_NOBODY] * num_messages
        self.members: list[list[int]] = [[] for _ in compiled.reductions]
        self.released = [_NOT_YET] * len(compiled.reductions)
        self.tied: list[dict[int, float]] = [{} for _ in compiled.ties]
        self.prepared, self.host_free = [_NOT_YET] * compiled.num_prepared, [0.0] * num_ranks
        self.clock, self.position = [0.0] * num_ranks, [0] * num_ranks
        self.starts: list[list[float]] = [[] for _ in compiled.rows]
        self.stops: list[list[float]] = [[] for _ in compiled.rows]
        self.ready = [(0.0, rank) for rank in range(num_ranks)]
        heapify(self.ready)

    def run(self) -> None:
        """Until nobody can move; of a rank all steps until one has to wait, or one alone where a wire is shared."""
        ready, position, clock, rows = self.ready, self.position, self.clock, self.compiled.rows
        seconds, arrived, waiting = self.seconds, self.arrived, self.waiting
        one_by_one, blocking = self.one_by_one, self.blocking
        while ready:
            _, rank = heappop(ready)
            row, now, index = rows[rank], clock[rank], position[rank]
            starts, stops = self.starts[rank], self.stops[rank]
            while index < len(row):
                code, slot, numbers = row[index]
                stop = now
                if code == RECEIVE_STEP:
                    missing = _NOBODY
                    for message in numbers:
                        at = arrived[message]
                        if at < 0:
                            missing = message
                            break
                        stop = at if at > stop else stop
                    if missing >= 0:
                        waiting[missing] = rank
                        break
                    stop += seconds[slot]
                    if blocking:
                        stop += sum(self.message_s[message] for message in numbers)
                elif code == COMPUTE_STEP:
                    stop += seconds[slot]
                elif code == SEND_STEP:
                    stop = self._send(stop + seconds[slot], numbers)
                elif code == PREPARED_STEP:
                    now = max(now, self.prepared[numbers[0]])
                    stop = now + seconds[slot]
                elif code == PREPARE_STEP:
                    begin, stop = self._prepare(rank, now, slot, numbers[0])
                    starts.append(begin)
                    stops.append(stop)
                    index, now = index + 1, now if self.beside[rank] else stop
                    if one_by_one:
                        break
                    continue
                elif code == TIED_STEP:
                    begin = self._meet(rank, numbers, now)
                    if begin < 0:
                        break
                    now, stop = begin, begin + seconds[slot]
                else:
                    released = self._reduce(rank, numbers[0], now)
                    if released < 0:
                        break
                    stop = released + seconds[slot]
                starts.append(now)
                stops.append(stop)
                now = stop
                index += 1
                if one_by_one:
                    break
            moved = index > position[rank]
            clock[rank], position[rank] = now, index
            if one_by_one and moved and index < len(row):
                heappush(ready, (round(now, TICK_DIGITS), rank))

    def _send(self, now: float, numbers: tuple[int, ...]) -> float:
        """Sends messages, one call after another from ``now`` on; when the last call is over."""
        free, arrived, waiting = self.free, self.arrived, self.waiting
        for message in numbers:
            wire = self.message_wire[message]
            begin = free[wire]
            self.sent[message] = begin = begin if begin > now else now
            arrived[message] = free[wire] = at = begin + self.message_s[message]
            if self.blocking:
                now = at
            elif self.sending_s:
                now += self.sending_s[message]
            rank = waiting[message]
            if rank >= 0:
                at = max(self.clock[rank], at)
                heappush(self.ready, (round(at, TICK_DIGITS) if self.one_by_one else at, rank))
        return now

    def _prepare(self, rank: int, now: float, slot: int, number: int) -> tuple[float, float]:
        """When the rank, or its host, begins to prepare, and when it is done."""
        begin = max(now, self.host_free[rank])
        stop = self.prepared[number] = self.host_free[rank] = begin + self.seconds[slot]
        return begin, stop

    def _meet(self, rank: int, ties: tuple[int, ...], now: float) -> float:
        """When all ranks of its ties are there; negative if that is not known yet."""
        begin, missing = now, False
        for number in ties:
            there, everyone = self.tied[number], self.compiled.ties[number]
            if rank not in there:
                there[rank] = now
                if len(there) == len(everyone):
                    for other in everyone:
                        if other != rank:
                            heappush(self.ready, (round(now, TICK_DIGITS) if self.one_by_one else now, other))
            missing = missing or len(there) < len(everyone)
            begin = max(begin, *there.values())
        return _NOT_YET if missing else begin

    def _reduce(self, rank: int, reduction: int, now: float) -> float:
        """When the reduction starts; negative if that is not known yet."""
        released, members, clock = self.released, self.members[reduction], self.clock
        if released[reduction] < 0:
            members.append(rank)
            if len(members) < self.compiled.reductions[reduction]:
                return _NOT_YET
            clock[rank] = now
            released[reduction] = max(clock[member] for member in members)
            for member in members[:-1]:
                heappush(self.ready, (round(now, TICK_DIGITS) if self.one_by_one else now, member))
        return released[reduction]
