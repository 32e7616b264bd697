"""A compiled program under way: what has been sent, arrived and begun, whichever engine runs it."""

from __future__ import annotations

from planner.costs.simulator.prices import SlotPrices
from planner.costs.simulator.program import CompiledProgram
from planner.costs.timeline import TICK_DIGITS, Trace, require_done
from planner.passes.events import NOT_YET, RankRows

NOBODY = -1


class ProgramRows(RankRows):
    """The rows of a program while they run.

    Attributes:
        slot_of, wire_of: by message.
        awaited_by: by message, the rank that waits for it.
        prepared: by what is prepared, when it is done; ``host_free``: by rank, when its host can prepare again.
        digits: as of ``TICK_DIGITS``; None where no wire is shared.
    """

    def __init__(self, compiled: CompiledProgram, prices: SlotPrices) -> None:
        num_ranks = len(compiled.rows)
        num_messages = len(compiled.messages)
        super().__init__(num_ranks)
        self.compiled = compiled
        self.prices = prices
        self.beside = prices.beside or (False,) * num_ranks
        self.digits = TICK_DIGITS if len(set(prices.wires)) < len(prices.wires) else None
        self.slot_of = [slot for slot, _ in compiled.messages]
        self.wire_of = [prices.wires[channel] for _, channel in compiled.messages]
        self.sent = [NOT_YET] * num_messages
        self.arrived = [NOT_YET] * num_messages
        self.awaited_by = [NOBODY] * num_messages
        self.released = [NOT_YET] * len(compiled.reductions)
        self.prepared = [NOT_YET] * compiled.num_prepared
        self.host_free = [0.0] * num_ranks
        self.starts: list[list[float]] = [[] for _ in compiled.rows]
        self.stops: list[list[float]] = [[] for _ in compiled.rows]

    def trace(self) -> Trace:
        """When everything happened.

        Raises:
            IllegalProgramError: somebody is not at the end of its row.
        """
        require_done(self.compiled, self.position)
        return Trace(self.starts, self.stops, self.sent, self.arrived, self.released)

    def tick(self, at: float) -> float:
        """The time by which events are put in order."""
        return at if self.digits is None else round(at, self.digits)

    def blocked_s(self, numbers: tuple[int, ...]) -> float:
        """For how long these messages hold their receiver, once they are there."""
        if not self.compiled.blocking:
            return 0.0
        return sum(self.prices.transfer_s[self.slot_of[number]] for number in numbers)

    def prepare(self, rank: int, now: float, slot: int, number: int) -> tuple[float, float]:
        """When the rank, or its host, begins to prepare, and when it is done."""
        begin = max(now, self.host_free[rank])
        stop = self.prepared[number] = self.host_free[rank] = begin + self.prices.action_s[slot]
        return begin, stop

    def meet_tied(self, rank: int, ties: tuple[int, ...], now: float) -> float:
        """When all ranks of its ties are there; ``NOT_YET`` while one is missing."""
        times = [self.meet(("tie", number), rank, len(self.compiled.ties[number]), now) for number in ties]
        return NOT_YET if min(times) < 0 else max(times)
