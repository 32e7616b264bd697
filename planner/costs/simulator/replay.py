"""A simulated step once more with other durations, many at a time: every time is a vector, an entry a draw.

The order of everything is that of the trace: rows, messages on their wires, who awaits what.  A message travels as long
as it did in the trace, sharing included, and a step lasts as long times its factor; begins and waits follow.  With all
factors 1 the trace itself comes out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.costs.simulator.prices import SlotPrices
from planner.costs.simulator.program import (
    PREPARE_STEP,
    PREPARED_STEP,
    RECEIVE_STEP,
    REDUCE_STEP,
    SEND_STEP,
    TIED_STEP,
    CompiledProgram,
)
from planner.costs.timeline import Trace

Draws = NDArray[np.float64]


def replayed(
    compiled: CompiledProgram,
    prices: SlotPrices,
    trace: Trace,
    factors: Mapping[tuple[int, int], Draws],
    num_draws: int,
) -> Draws:
    """Seconds of the step, by draw.

    Args:
        factors: of the time that a compute action takes, by (rank, position); 1 where there is none.
    """
    replay = _Replay(compiled, prices, trace, factors, num_draws)
    ready = list(range(len(compiled.rows)))
    while ready:
        ready += replay.advance(ready.pop())
    ends = [replay.end(rank) for rank, row in enumerate(compiled.rows) if row]
    step_s: Draws = np.max(ends, axis=0) if ends else np.zeros(num_draws)
    return step_s


class _Replay:
    """A step under way; ranks go as far as what they need is known."""

    def __init__(
        self,
        compiled: CompiledProgram,
        prices: SlotPrices,
        trace: Trace,
        factors: Mapping[tuple[int, int], Draws],
        num_draws: int,
    ) -> None:
        self.compiled = compiled
        self.prices = prices
        self.trace = trace
        self.factors = factors
        self.beside = prices.beside or (False,) * len(compiled.rows)
        self.before = _before(compiled, prices, trace)
        self.clock = [np.zeros(num_draws) for _ in compiled.rows]
        self.position = [0] * len(compiled.rows)
        self.arrived: list[Draws | None] = [None] * len(compiled.messages)
        self.waiting: dict[int, list[int]] = {}
        self.members: list[list[int]] = [[] for _ in compiled.reductions]
        self.released: list[Draws | None] = [None] * len(compiled.reductions)
        self.tied: list[set[int]] = [set() for _ in compiled.ties]
        self.came: dict[int, Draws] = {}  # when ranks came to their ties
        self.prepared: dict[int, Draws] = {}
        self.host_free = [np.zeros(num_draws) for _ in compiled.rows]
        self.waited_s = [np.zeros(num_draws) for _ in compiled.rows]

    def end(self, rank: int) -> Draws:
        """Of a rank whose row is done, with what is left of preparing the next step."""
        now = self.clock[rank]
        if not self.prices.next_step:
            return now
        return now + self.prices.next_step[rank].left_s(self.waited_s[rank], now)

    def advance(self, rank: int) -> list[int]:
        """Takes a rank as far as it gets; the ranks that can go on now."""
        row = self.compiled.rows[rank]
        woken = list[int]()
        while self.position[rank] < len(row):
            position = self.position[rank]
            code, slot, numbers = row[position]
            now = self.clock[rank]
            lasts_s = self.trace.stops[rank][position] - self.trace.starts[rank][position]
            if code == RECEIVE_STEP:
                if self._missing(numbers, rank):
                    break
                now = self._received(rank, position, numbers)
            elif code == SEND_STEP:
                if self._missing([self.before[number] for number in numbers if number in self.before], rank):
                    break
                now = self._sent(now + self.prices.action_s[slot], numbers, woken)
            elif code == REDUCE_STEP:
                released = self._reduced(rank, numbers[0], woken)
                if released is None:
                    break
                self.waited_s[rank] = self.waited_s[rank] + np.maximum(0.0, released - now)
                now = released + (self.trace.stops[rank][position] - self.trace.released[numbers[0]])
            elif code == PREPARE_STEP:
                stop = np.maximum(now, self.host_free[rank]) + lasts_s
                self.prepared[numbers[0]] = self.host_free[rank] = stop
                now = now if self.beside[rank] else stop
            elif code == TIED_STEP:
                if not self._met(rank, numbers, woken):
                    break
                others = {other for number in numbers for other in self.tied[number]}
                now = np.max([self.came[other] for other in others], axis=0) + lasts_s
            else:
                if code == PREPARED_STEP:
                    now = np.maximum(now, self.prepared[numbers[0]])
                factor = self.factors.get((rank, position))
                now = now + (lasts_s if factor is None else lasts_s * factor)
            self.clock[rank] = now
            self.position[rank] += 1
        return woken

    def _missing(self, numbers: Sequence[int], rank: int) -> bool:
        """Whether one of these messages is not there yet; ``rank`` then waits for it."""
        for number in numbers:
            if self.arrived[number] is None:
                self.waiting.setdefault(number, []).append(rank)
                return True
        return False

    def _received(self, rank: int, position: int, numbers: tuple[int, ...]) -> Draws:
        now = self.clock[rank]
        there_s = self.trace.starts[rank][position]
        for number in numbers:
            arrived = self.arrived[number]
            if arrived is not None:
                now = np.maximum(now, arrived)
            there_s = max(there_s, self.trace.arrived[number])
        self.waited_s[rank] = self.waited_s[rank] + (now - self.clock[rank])
        return now + (self.trace.stops[rank][position] - there_s)

    def _sent(self, now: Draws, numbers: tuple[int, ...], woken: list[int]) -> Draws:
        for number in numbers:
            earlier = self.arrived[self.before[number]] if number in self.before else None
            begin = now if earlier is None else np.maximum(now, earlier)
            self.arrived[number] = there = begin + (self.trace.arrived[number] - self.trace.sent[number])
            if self.compiled.blocking:
                now = there
            elif self.prices.sending_s:
                now = now + self.prices.sending_s[self.compiled.messages[number][0]]
            woken += self.waiting.pop(number, [])
        return now

    def _met(self, rank: int, ties: tuple[int, ...], woken: list[int]) -> bool:
        """Whether all ranks of its ties are there; the last one takes the others along."""
        self.came.setdefault(rank, self.clock[rank])
        for number in ties:
            there = self.tied[number]
            everyone = self.compiled.ties[number]
            if rank not in there:
                there.add(rank)
                woken += [other for other in everyone if other != rank] if len(there) == len(everyone) else []
        return all(len(self.tied[number]) == len(self.compiled.ties[number]) for number in ties)

    def _reduced(self, rank: int, reduction: int, woken: list[int]) -> Draws | None:
        """When the sum began; None until the last member is there, who takes the others along."""
        members = self.members[reduction]
        if self.released[reduction] is None:
            members.append(rank)
            if len(members) == self.compiled.reductions[reduction]:
                self.released[reduction] = np.max([self.clock[member] for member in members], axis=0)
                woken += members[:-1]
        return self.released[reduction]


def _before(compiled: CompiledProgram, prices: SlotPrices, trace: Trace) -> dict[int, int]:
    """The message that was on the wire before each message, if one was."""
    in_rows = [number for row in compiled.rows for code, _, numbers in row if code == SEND_STEP for number in numbers]
    last: dict[int, int] = {}
    before = {}
    for number in sorted(in_rows, key=lambda number: (trace.sent[number], trace.arrived[number])):
        wire = prices.wires[compiled.messages[number][1]]
        if wire in last:
            before[number] = last[wire]
        last[wire] = number
    return before
