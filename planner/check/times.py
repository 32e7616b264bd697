"""Where the time of each rank goes in a step, for the checker.

The rules of ``planner.costs.simulator.breakdown``, by loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from planner.ir.program import Program
from planner.ir.schedule import COMPUTE, RECEIVE, SEND, Action, Op

Spans = Sequence[Sequence[tuple[float, float]]]
"""When an action began and ended, by rank and place in its row."""


@dataclass(frozen=True, slots=True)
class Times:
    """The four parts of a rank's step, as in :class:`planner.ir.plan.RankPrediction`."""

    compute_s: float
    communication_s: float
    bubble_s: float
    idle_s: float
    is_used: bool


def times_of(program: Program, spans: Spans, step_s: float, exchanged_s: Callable[[Action], float]) -> Iterator[Times]:
    """The parts by rank.

    Args:
        exchanged_s: of a forward or backward, how long ranks exchange parts of tensors in it.
    """
    began: dict[Action, list[float]] = {}
    for row, times in zip(program.rows, spans, strict=True):
        for action, (start_s, _) in zip(row, times, strict=True):
            if action.op in SEND or action.op is Op.REDUCE_GRAD:
                began.setdefault(action, []).append(start_s)
    for row, times in zip(program.rows, spans, strict=True):
        compute_s = communication_s = bubble_s = end_s = 0.0
        for action, (start_s, stop_s) in zip(row, times, strict=True):
            bubble_s += max(0.0, start_s - end_s)
            end_s = stop_s
            if action.op in RECEIVE or action.op is Op.REDUCE_GRAD:
                ready_s = _ready_s(action, began, stop_s)
                waited_s = 0.0 if ready_s is None else min(max(ready_s, start_s), stop_s) - start_s
                bubble_s += waited_s
                communication_s += stop_s - start_s - waited_s
            elif action.op in SEND:
                communication_s += stop_s - start_s
            else:
                moved_s = min(exchanged_s(action), stop_s - start_s) if action.op in COMPUTE else 0.0
                compute_s += stop_s - start_s - moved_s
                communication_s += moved_s
        yield Times(compute_s, communication_s, bubble_s, max(0.0, step_s - end_s), bool(row))


def _ready_s(action: Action, began: dict[Action, list[float]], stop_s: float) -> float | None:
    """When what is waited for began: the last member of a sum, the last sender that began in time."""
    if action.op is Op.REDUCE_GRAD:
        return max(began[action])
    op = Op.SEND_FORWARD if action.op is Op.RECV_FORWARD else Op.SEND_BACKWARD
    if action.peer is None:
        return None
    in_time = [
        at_s for at_s in began.get(Action(action.peer, op, action.microbatch, action.stage), ()) if at_s <= stop_s
    ]
    return max(in_time, default=None)


def sum_of_gradients_s(row: Sequence[Action], spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """How long a rank is in sums of gradients that are made once a step: the longest, and the last."""
    pairs = zip(row, spans, strict=True)
    sums = [b - a for action, (a, b) in pairs if action.op is Op.REDUCE_GRAD and action.microbatch is None]
    return max(sums, default=0.0), sums[-1] if sums else 0.0


def adding_to_gradients(row: Sequence[Action]) -> Iterator[int]:
    """Places of the backwards that add to gradients of an earlier micro-batch."""
    made = set()
    for index, action in enumerate(row):
        if action.op is Op.UPDATE:
            made.discard(action.stage)
        elif action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            if action.stage in made:
                yield index
            made.add(action.stage)
