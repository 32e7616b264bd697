"""Errors of a step, told with where they happened: rank, device, stage, step, micro-batch and direction."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass

from planner.ir.errors import HalopipeError, StageFailedError
from planner.ir.program import Program
from planner.ir.schedule import Action, format_grid
from runtime.memory import out_of_memory
from runtime.monitor.waits import WORDS

GRID_WIDTH = 4
"""Actions shown on each side of the one that failed."""


@dataclass(frozen=True, slots=True)
class Context:
    """What an error of ``rank`` is told with.

    Attributes:
        device: name of the rank's device.
        others: what the other ranks do, as one line; asked when something failed.
    """

    program: Program
    rank: int
    device: str
    others: Callable[[], str]

    def of_action(self, error: Exception, step: int, action: Action) -> HalopipeError:
        """The error of an action, with the grid around it; what is not ours becomes a StageFailedError."""
        microbatch = "" if action.microbatch is None else f"micro-batch {action.microbatch}, "
        grid = format_grid(self.program.rows, (self.rank, action), GRID_WIDTH)
        known = error if isinstance(error, HalopipeError) else out_of_memory(error) or _stage_failed(error)
        return self.of(known, step, f"{microbatch}{WORDS[action.op]}", f", stage {action.stage}", grid)

    def of(self, error: HalopipeError, step: int, doing: str, stage: str = "", grid: str = "") -> HalopipeError:
        """An error of the same kind that says where it happened and what the others do."""
        others = self.others()
        details = [*error.details, *([f"the others: {others}"] if others else []), *([grid] if grid else [])]
        title = f"rank {self.rank} ({self.device}{stage}) stopped at step {step}, {doing}: {error.title}"
        return type(error)(title, details, error.remedies)


def _stage_failed(error: Exception) -> StageFailedError:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return StageFailedError(f"{type(error).__name__}: {error}", [f"raised at {frame.filename}:{frame.lineno}"])
