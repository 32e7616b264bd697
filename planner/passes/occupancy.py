"""How many micro-batches a schedule or program keeps, read off its order alone.

A micro-batch is in flight on a stage from its forward to its backward, B or W (a backward in halves needs its
activations until W).  A stage that is never run backward keeps none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from planner.ir.schedule import Action, Op

Rows = Iterable[Iterable[Action]]

_GIVES_BACK = frozenset({Op.BACKWARD, Op.BACKWARD_WEIGHT})


def in_flight(rows: Rows, num_stages: int) -> tuple[int, ...]:
    """The most micro-batches in flight at once, by stage (on any rank)."""
    most = [0] * num_stages
    for row in rows:
        for forward, count in _counts(tuple(row)):
            most[forward.stage] = max(most[forward.stage], count)
    return tuple(most)


def first_over(rows: Rows, limits: Sequence[int]) -> Iterator[tuple[int, int, Action, int]]:
    """Forwards that begin more micro-batches than ``limits`` says, by stage: (stage, row, forward, how many then)."""
    for number, row in enumerate(rows):
        for forward, count in _counts(tuple(row)):
            if count > limits[forward.stage]:
                yield forward.stage, number, forward, count


def peaks(rows: Rows, kept: Sequence[float]) -> tuple[float, ...]:
    """The most that each row keeps at once, all its stages together.

    Args:
        kept: by stage, what one micro-batch takes between its forward and its backward, in any unit.
    """
    found = []
    for row in map(tuple, rows):
        trained = {action.stage for action in row if action.op in _GIVES_BACK}
        held = most = 0.0
        for action in row:
            if action.op is Op.FORWARD and action.stage in trained:
                held += kept[action.stage]
                most = max(most, held)
            elif action.op in _GIVES_BACK:
                held -= kept[action.stage]
        found.append(most)
    return tuple(found)


def _counts(row: tuple[Action, ...]) -> Iterator[tuple[Action, int]]:
    """Each forward that a backward follows, and how many micro-batches its stage then has in flight."""
    held = dict.fromkeys((action.stage for action in row if action.op in _GIVES_BACK), 0)
    for action in row:
        if action.op is Op.FORWARD and action.stage in held:
            held[action.stage] += 1
            yield action, held[action.stage]
        elif action.op in _GIVES_BACK:
            held[action.stage] -= 1
