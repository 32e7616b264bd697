"""Windowed 1F1B: the plan says how many forwards each stage runs before its first backward (W_s).

    0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3
    2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

(Windows 3, 4, 1: the second is lowered to the first.)  With W_s = p - s this is 1F1B, with 2 (p - s) - 1 it is 1F1B-SO
(BaPipe), with the number of micro-batches it is GPipe; between them W_s is what bounds both the
activations that stage s keeps and the period, since a micro-batch comes back after its round trip: a period is at
least round trip / W_s.  A window larger than that of a stage upstream is lowered to it, which makes any DAG free of
deadlock (proof in ``_rows.clamped``).  Without windows it is 1F1B.
"""

from __future__ import annotations

from planner.ir.schedule import Pipeline, Schedule, Traits
from planner.schedules._rows import by_position, clamped, depths, in_turn

NAME = "1f1b-windowed"
TRAITS = Traits(windowed=True, by_default=True)


def order(pipeline: Pipeline) -> Schedule:
    """The given number of forwards, then one backward, one forward."""
    stages = pipeline.stages
    windows = clamped(pipeline.windows or depths(stages), stages)
    rows = [in_turn(s, window, stages.num_microbatches) for s, window in enumerate(windows)]
    return Schedule(by_position(NAME, pipeline, rows))
