"""What a schedule lets a stage do before its first backward and after its last forward, read off its order."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from planner.ir.schedule import Action, Op, Pipeline, StageGraph
from planner.schedules import schedule as schedule_named


@dataclass(frozen=True, slots=True)
class Window:
    """Forwards before the first backward, and backwards after the last forward, of one stage."""

    early: int
    late: int


@functools.lru_cache(maxsize=4096)
def windows(schedule: str, num_stages: int, num_microbatches: int) -> tuple[Window, ...] | None:
    """The window of each stage of a chain; None if the schedule splits backwards or leaves the order."""
    rows = schedule_named(schedule)(Pipeline(StageGraph.chain(num_stages, num_microbatches))).rows
    found = [_window(row, num_microbatches) for row in rows]
    known = tuple(window for window in found if window is not None)
    return known if len(known) == len(found) else None


def range_of(schedule: str, fewest: int, most: int, num_microbatches: int) -> tuple[Window, Window] | None:
    """The least and the greatest window of a stage with ``fewest`` to ``most`` stages downstream, itself included."""
    chains = [windows(schedule, depth, num_microbatches) for depth in range(fewest, max(fewest, most) + 1)]
    firsts = [chain[0] for chain in chains if chain is not None]
    if len(firsts) < len(chains):
        return None
    early, late = [window.early for window in firsts], [window.late for window in firsts]
    return Window(min(early), min(late)), Window(max(early), max(late))


def most_in_flight(schedule: str, depth: int, num_microbatches: int) -> int:
    """The most micro-batches that the schedule keeps on the first of ``depth`` stages."""
    held = most = 0
    for action in schedule_named(schedule)(Pipeline(StageGraph.chain(depth, num_microbatches))).rows[0]:
        held += {Op.FORWARD: 1, Op.BACKWARD: -1, Op.BACKWARD_WEIGHT: -1}.get(action.op, 0)
        most = max(most, held)
    return most


def splits_backwards(schedule: str) -> bool:
    """Whether the schedule has backwards in two halves, so that the way back is no bound."""
    rows = schedule_named(schedule)(Pipeline(StageGraph.chain(2, 2))).rows
    return any(action.op is Op.BACKWARD_INPUT for row in rows for action in row)


def _window(row: tuple[Action, ...], num_microbatches: int) -> Window | None:
    forwards = [(index, action.microbatch) for index, action in enumerate(row) if action.op is Op.FORWARD]
    backwards = [(index, action.microbatch) for index, action in enumerate(row) if action.op is Op.BACKWARD]
    in_order = [m for _, m in forwards] == [m for _, m in backwards] == list(range(num_microbatches))
    if not in_order or len(row) != 2 * num_microbatches:
        return None
    early = sum(index < backwards[0][0] for index, _ in forwards)
    late = sum(index > forwards[-1][0] for index, _ in backwards)
    return Window(early, late)
