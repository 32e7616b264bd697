"""ZB-H2: a doubled warm-up and twice the W put off, which leaves no bubble where F = I = W, for twice the memory.

    0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3

Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 2.  In a chain of p stages, stage s runs
2 (p - s) - 1 forwards before its first backward and puts off at most 2 s of its W: it keeps at most 2 p - 1
micro-batches.  On a DAG, p is the longest path of all and p - s the longest path downstream.
"""

from __future__ import annotations

from planner.ir.schedule import Pipeline, Schedule, Traits
from planner.schedules._rows import by_position, depths, in_turn, split

NAME = "zb-h2"
TRAITS = Traits(splits_backward=True)


def order(pipeline: Pipeline) -> Schedule:
    """1F1B-SO, with twice as many W put off as there are stages upstream on the longest path."""
    stages = pipeline.stages
    downstream = depths(stages)
    longest = max(downstream)
    rows = [
        split(in_turn(s, 2 * depth - 1, stages.num_microbatches), backlog=2 * (longest - depth))
        for s, depth in enumerate(downstream)
    ]
    return Schedule(by_position(NAME, pipeline, rows))
