"""A step of a program, simulated event by event.

Resources: a compute stream for each rank; a channel for each ordered pair of ranks, on which messages travel one after
another (one for both directions where the link is not duplex).  A send costs its rank the executor's overhead only; a
receive waits for the message; a reduction starts when its last member has arrived.  A message that blocks holds its
sender until it has left, and then its receiver for as long again (it is sent, then taken, by ranks that do nothing else
meanwhile).  What is prepared of a micro-batch occupies its rank or, beside an accelerator, a thread of the host: one
after another, from when the rank asks for it, and the forward waits (``costs.preparing``).  What must precede what
comes from ``dependencies``, checked when the program was compiled.  Ignored: links shared by several pairs of ranks,
and compute that slows down while data moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from planner.costs.compiled import (
    COMPUTE_STEP,
    PREPARE_STEP,
    PREPARED_STEP,
    RECEIVE_STEP,
    SEND_STEP,
    CompiledProgram,
    compile_program,
)
from planner.costs.memory import activations, resident, walk
from planner.costs.network import Network
from planner.costs.preparing import has_host_beside
from planner.costs.stage import StageCosts
from planner.ir.errors import IllegalProgramError
from planner.ir.program import Program
from planner.ir.schedule import format_grid
from planner.ir.timeline import MemorySample, Span, Timeline

_NOT_YET = -1.0
_NOBODY = -1


@dataclass(frozen=True, slots=True)
class Trace:
    """When everything happened, in seconds.

    Attributes:
        starts, stops: by rank and position; a step that waits starts when its rank reaches it, but compute that waits
            for what its host prepares when that is there.
        sent, arrived: by message: when it got hold of its channel, and when it was there.
        released: by reduction: when its last member arrived.
    """

    starts: list[list[float]]
    stops: list[list[float]]
    sent: list[float]
    arrived: list[float]
    released: list[float]

    @property
    def step_s(self) -> float:
        """The end of the last rank."""
        return max((stops[-1] for stops in self.stops if stops), default=0.0)


def simulate(program: Program, costs: StageCosts, network: Network) -> Timeline:
    """The predicted timeline of ``program``, memory included.

    Raises:
        IllegalProgramError: it can never end, or breaks the rule of what precedes what.
    """
    compiled = compile_program(program, costs.micro_batches)
    sizes = transfer_bytes(program, compiled)
    trace = execute(
        compiled,
        prices(compiled, costs),
        transfer_prices(compiled, sizes, network),
        resources(compiled, network),
        hosts_beside(compiled, costs),
    )
    return timeline(compiled, trace, costs, sizes)


def prices(compiled: CompiledProgram, costs: StageCosts) -> list[float]:
    """Seconds by action slot."""
    return [costs.action_s(slot.rank, slot.action, slot.accumulates) for slot in compiled.actions]


def transfer_bytes(program: Program, compiled: CompiledProgram) -> list[int]:
    """Bytes by transfer slot."""
    found = []
    for slot in compiled.transfers:
        ends = (slot.src, slot.dst) if slot.forward else (slot.dst, slot.src)
        message = next(m for m in program.messages[slot.route] if (m.src, m.dst) == ends)
        found.append(message.forward_bytes if slot.forward else message.backward_bytes)
    return found


def transfer_prices(compiled: CompiledProgram, sizes: Sequence[int], network: Network) -> list[float]:
    """Seconds by transfer slot."""
    return [network.transfer_s(slot.src, slot.dst, size) for slot, size in zip(compiled.transfers, sizes, strict=True)]


def resources(compiled: CompiledProgram, network: Network) -> list[int]:
    """The wire that each channel uses: its own, or one for both directions where the link is not duplex."""
    number = {pair: index for index, pair in enumerate(compiled.channels)}
    return [
        index if network.duplex(src, dst) else min(index, number.get((dst, src), index))
        for index, (src, dst) in enumerate(compiled.channels)
    ]


def hosts_beside(compiled: CompiledProgram, costs: StageCosts) -> tuple[bool, ...]:
    """By rank, whether its host prepares while it computes."""
    devices = costs.book.profile.cluster.devices
    return tuple(has_host_beside(devices[rank]) for rank in range(len(compiled.rows))) if compiled.num_prepared else ()


def execute(
    compiled: CompiledProgram,
    seconds: Sequence[float],
    transfer_s: Sequence[float],
    wires: Sequence[int],
    beside: Sequence[bool] = (),
) -> Trace:
    """Runs all rows to their end.

    Ranks are advanced as far as they get, in any order: with wires that only one rank feeds the result does not depend
    on it.  Where a wire is shared, the rank that is furthest behind moves first, one step at a time.

    Args:
        seconds: by action slot.
        transfer_s: by transfer slot.
        wires: by channel.
        beside: by rank, whether its host prepares while it computes; empty: nowhere.

    Raises:
        IllegalProgramError: nobody can move and somebody is not done.
    """
    rows = compiled.rows
    one_by_one = len(set(wires)) < len(wires)
    blocking = compiled.blocking
    message_s = [transfer_s[slot] for slot, _ in compiled.messages]
    message_wire = [wires[channel] for _, channel in compiled.messages]
    free = [0.0] * len(wires)
    sent, arrived = [_NOT_YET] * len(message_s), [_NOT_YET] * len(message_s)
    waiting = [_NOBODY] * len(message_s)
    members: list[list[int]] = [[] for _ in compiled.reductions]
    released = [_NOT_YET] * len(compiled.reductions)
    prepared = [_NOT_YET] * compiled.num_prepared
    host_free = [0.0] * len(rows)
    clock, position = [0.0] * len(rows), [0] * len(rows)
    starts: list[list[float]] = [[] for _ in rows]
    stops: list[list[float]] = [[] for _ in rows]
    ready = [(0.0, rank) for rank in range(len(rows))]
    heapify(ready)
    while ready:
        _, rank = heappop(ready)
        row, now, index = rows[rank], clock[rank], position[rank]
        my_starts, my_stops = starts[rank], stops[rank]
        while index < len(row):
            code, slot, numbers = row[index]
            stop = now
            if code == RECEIVE_STEP:
                missing = _NOBODY
                for message in numbers:
                    if arrived[message] < 0:
                        missing = message
                        break
                    stop = max(stop, arrived[message])
                if missing >= 0:
                    waiting[missing] = rank
                    break
                stop += seconds[slot]
                if blocking:
                    stop += sum(message_s[message] for message in numbers)
            elif code == COMPUTE_STEP:
                stop += seconds[slot]
            elif code == PREPARED_STEP:
                now = max(now, prepared[numbers[0]])
                stop = now + seconds[slot]
            elif code == PREPARE_STEP:
                begin = max(now, host_free[rank])
                stop = prepared[numbers[0]] = host_free[rank] = begin + seconds[slot]
                if beside and beside[rank]:
                    my_starts.append(begin)
                    my_stops.append(stop)
                    index += 1
                    if one_by_one:
                        break
                    continue
            elif code == SEND_STEP:
                stop += seconds[slot]
                for message in numbers:
                    wire = message_wire[message]
                    begin = max(stop, free[wire])
                    sent[message] = begin
                    arrived[message] = free[wire] = begin + message_s[message]
                    if blocking:
                        stop = arrived[message]
                    if waiting[message] >= 0:
                        heappush(ready, (max(clock[waiting[message]], arrived[message]), waiting[message]))
            else:
                reduction = numbers[0]
                if released[reduction] < 0:
                    members[reduction].append(rank)
                    if len(members[reduction]) < compiled.reductions[reduction]:
                        break
                    clock[rank] = now
                    released[reduction] = max(clock[member] for member in members[reduction])
                    for member in members[reduction][:-1]:
                        heappush(ready, (released[reduction], member))
                stop = released[reduction] + seconds[slot]
            my_starts.append(now)
            my_stops.append(stop)
            now = stop
            index += 1
            if one_by_one:
                break
        moved = index > position[rank]
        clock[rank], position[rank] = now, index
        if one_by_one and moved and index < len(row):
            heappush(ready, (now, rank))
    _require_done(compiled, position)
    return Trace(starts, stops, sent, arrived, released)


def timeline(compiled: CompiledProgram, trace: Trace, costs: StageCosts, sizes: Sequence[int]) -> Timeline:
    """The trace as a timeline, with memory beside it."""
    spans = tuple(
        Span(rank, str(action), start, stop)
        for rank, row in enumerate(compiled.grid)
        for action, start, stop in zip(row, trace.starts[rank], trace.stops[rank], strict=True)
    )
    kept = activations(costs, compiled, sizes)
    memory = []
    for rank, always in enumerate(resident(costs, compiled, sizes)):
        memory.append(MemorySample(rank, 0.0, always.total))
        for held in walk(compiled, rank, kept):
            starts, stops = trace.starts[rank][held.position], trace.stops[rank][held.position]
            memory.append(MemorySample(rank, starts, always.total + held.during + held.workspace))
            memory.append(MemorySample(rank, stops, always.total + held.after))
    return Timeline("predicted", trace.step_s, spans, tuple(memory))


def _require_done(compiled: CompiledProgram, position: Sequence[int]) -> None:
    stuck = [rank for rank, row in enumerate(compiled.rows) if position[rank] < len(row)]
    if not stuck:
        return
    culprit = compiled.grid[stuck[0]][position[stuck[0]]]
    waits = ", ".join(f"rank {rank} in {compiled.grid[rank][position[rank]]}" for rank in stuck)
    raise IllegalProgramError(
        "the program never ends: its ranks wait for one another",
        [f"waiting: {waits}", format_grid(compiled.grid, (stuck[0], culprit), width=4)],
    )
