"""The order of token slices: that of micro-batches, a longer warm-up, backwards turned round."""

from __future__ import annotations

from dataclasses import replace

from planner import schedules
from planner.ir.errors import UsageError
from planner.ir.schedule import Action, Op, Pipeline, Schedule
from planner.schedules import Order


def in_slices(name: str, order: Order, pipeline: Pipeline) -> Schedule:
    """The schedule ``order`` of token slices in place of micro-batches: a longer warm-up, backwards turned round.

    The j-th backward of the row is that of slice j counted from the end of its micro-batch, and comes after K - 1 more
    forwards, those of the slices that read it (windows of 1F1B, for 2 micro-batches of 2 slices on 2 stages):

        0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3   ->   0F0 0F1 0F2 0B1 0F3 0B0 0B3 0B2
        1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3   ->   1F0 1F1 1B1 1F2 1B0 1F3 1B3 1B2

    Free of deadlock as ``order`` is: all rows are turned alike, and all warm-ups are longer by as much (``clamped``).

    Raises:
        UsageError: the schedule, which is called ``name``, cannot order slices.
    """
    if not can_slice(name):
        text = "a slice's backward comes after those of the slices behind it, which changes what the schedule is"
        raise UsageError(f"{name} cannot order token slices", [text], ["--schedule gpipe", "--schedule 1f1b"])
    slices = pipeline.stages.parts
    whole = order(replace(pipeline, stages=replace(pipeline.stages, parts=1)))
    return replace(whole, rows=tuple(_turned(row, slices) for row in whole.rows))


def _turned(row: tuple[Action, ...], slices: int) -> tuple[Action, ...]:
    """One row; a backward for the weights stays after the same forwards and backwards as before."""
    forwards = [action for action in row if action.op is Op.FORWARD]
    turned_row: list[Action] = []
    num_before = num_made = 0
    for action in row:
        if action.op is Op.FORWARD:
            num_before += 1
            continue
        if action.op is not Op.BACKWARD_WEIGHT:
            turned_row += forwards[num_made : num_before + slices - 1]
            num_made = max(num_made, min(len(forwards), num_before + slices - 1))
        m = action.microbatch or 0
        turned_row.append(replace(action, microbatch=m - 2 * (m % slices) + slices - 1))
    return (*turned_row, *forwards[num_made:])


def can_slice(name: str) -> bool:
    """Whether the schedule ``name`` can order token slices: synchronous, one stage a position, not made from times.

    Raises:
        UnknownNameError: there is none.
    """
    own = schedules.traits(name)
    is_plain = own.synchronous and not own.timed and not own.bidirectional
    return is_plain and (own.stages_per_position == 1 or not own.trains)
