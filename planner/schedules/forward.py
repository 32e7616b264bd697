"""Forward only: micro-batches stream through the stages, nothing comes back (inference).

    0F0 0F1 0F2 0F3
    1F0 1F1 1F2 1F3

A position that runs several stages takes them as a wave would reach it: by stage plus micro-batch, the later stage
first.  All rows follow one order of all forwards in which no stage precedes those upstream: free of deadlock on any DAG
and any positions.  A step is sum of f + (m - 1) max of f; one micro-batch alone is the latency.
"""

from __future__ import annotations

from planner.ir.schedule import Action, Op, Pipeline, Schedule, Traits
from planner.schedules._rows import stages_by_position

NAME = "forward"
TRAITS = Traits(trains=False, stages_per_position=0)


def order(pipeline: Pipeline) -> Schedule:
    """Forwards in the order of a wave."""
    batches = range(pipeline.stages.num_microbatches)
    waves = (
        sorted((stage + m, -stage, m) for stage in stages for m in batches) for stages in stages_by_position(pipeline)
    )
    return Schedule(tuple(tuple(Action(-stage, Op.FORWARD, m) for _, stage, m in wave) for wave in waves))
