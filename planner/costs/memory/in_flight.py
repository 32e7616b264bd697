"""How many micro-batches stages of a chain keep under a schedule, read off its order (``planner.passes.in_flight``)."""

from __future__ import annotations

import functools

from planner.ir.schedule import Pipeline, StageGraph
from planner.passes import in_flight
from planner.schedules import schedule as schedule_named


@functools.cache
def kept_by(schedule: str, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """The most micro-batches that the schedule keeps on each of a chain's stages."""
    rows = schedule_named(schedule)(Pipeline(StageGraph.chain(num_stages, num_microbatches))).rows
    return in_flight(rows, num_stages)


def fewest_kept(schedule: str, most_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """The fewest micro-batches that a stage ever keeps, by stages downstream (itself included) from 1.

    Of all chains of at most ``most_stages`` stages.
    """
    found = [num_microbatches] * most_stages
    for depth in range(1, most_stages + 1):
        kept = reversed(kept_by(schedule, depth, num_microbatches))
        found[:depth] = map(min, found, kept)
    return tuple(found)
