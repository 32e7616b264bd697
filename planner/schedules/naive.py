"""Naive: one micro-batch after another, forward and back, before the next begins.

    0F0 0B0 0F1 0B1 0F2 0B2
    1F0 1B0 1F1 1B1 1F2 1B2

What model parallelism does without a pipeline (Huang et al., GPipe, NeurIPS 2019, figure 2b): at any time one stage
works, and each keeps one micro-batch.
"""

from __future__ import annotations

from planner.ir.schedule import Pipeline, Schedule, Traits
from planner.schedules._rows import by_position, in_turn

NAME = "naive"
TRAITS = Traits()


def order(pipeline: Pipeline) -> Schedule:
    """Forward and backward in turn on every stage."""
    stages = pipeline.stages
    rows = [in_turn(s, 1, stages.num_microbatches) for s in range(stages.num_stages)]
    return Schedule(by_position(NAME, pipeline, rows))
