"""When everything in a simulated step happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.costs.simulator.program import CompiledProgram
from planner.ir.errors import IllegalProgramError
from planner.ir.schedule import format_grid

TICK_DIGITS = 11
"""Where both directions share a wire, times (in seconds) that agree to this many decimal places are the same,
and the lower rank is first: rounding does not decide who is."""


@dataclass(frozen=True, slots=True)
class Trace:
    """When everything happened, in seconds.

    Attributes:
        starts, stops: by rank and position; a step that waits starts when its rank reaches it, but compute that waits
            for what its host prepares, or for ranks that use the same parameters, when these are there.
        sent, arrived: by message: when it got hold of its channel, and when it was there.
        released: by reduction: when its last member arrived.
        left_s: by rank: of what is prepared of the next step, what is done after the row's end; empty: nothing.
    """

    starts: list[list[float]]
    stops: list[list[float]]
    sent: list[float]
    arrived: list[float]
    released: list[float]
    left_s: Sequence[float] = ()

    @property
    def step_s(self) -> float:
        """The end of the last rank."""
        left_s = self.left_s or [0.0] * len(self.stops)
        return max((stops[-1] + more_s for stops, more_s in zip(self.stops, left_s, strict=True) if stops), default=0.0)


def require_done(compiled: CompiledProgram, position: Sequence[int]) -> None:
    """Whether every rank is at the end of its row.

    Raises:
        IllegalProgramError: one is not, with the grid.
    """
    stuck = [rank for rank, row in enumerate(compiled.rows) if position[rank] < len(row)]
    if not stuck:
        return
    culprit = compiled.grid[stuck[0]][position[stuck[0]]]
    waits = ", ".join(f"rank {rank} in {compiled.grid[rank][position[rank]]}" for rank in stuck)
    raise IllegalProgramError(
        "the program never ends: its ranks wait for one another",
        [f"waiting: {waits}", format_grid(compiled.grid, (stuck[0], culprit), width=4)],
    )
