from __future__ import annotations

from collections.abc import Sequence

from planner.ir.schedule import ADDS_GRADIENTS, Op
from planner.passes.versions import Rows


def peaks(rows: Rows, kept: Sequence[float]) -> tuple[float, ...]:
    """The most that each row keeps at once, all its stages together.

    Args:
        kept: by stage, what one micro-batch takes between its forward and its backward, in any unit.
    """
    found = []
    for row in map(tuple, rows):
        trained = {action.stage for action in row if action.op in ADDS_GRADIENTS}
        held = most = 0.0
        for action in row:
            if action.op is Op.FORWARD and action.stage in trained:
                held += kept[action.stage]
                most = max(most, held)
            elif action.op in ADDS_GRADIENTS:
                held -= kept[action.stage]
        found.append(most)
    return tuple(found)
