"""ZB-H1: 1F1B with the backward split, and W put off to where 1F1B would idle, in the memory of 1F1B.

    0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 2.  In a chain of p stages, stage s puts
off at most s of its W: with its p - s micro-batches in flight it keeps no more than p, which is what the first stage
of 1F1B keeps.  On a DAG, p is the longest path of all and p - s the longest path downstream.  W concerns its own stage
alone, hence this is free of deadlock where 1F1B is.
"""

from __future__ import annotations

from planner.ir.schedule import Pipeline, Schedule, Traits
from planner.schedules._rows import by_position, depths, in_turn, split

NAME = "zb-h1"
TRAITS = Traits(splits_backward=True)


def order(pipeline: Pipeline) -> Schedule:
    """1F1B, with as many W put off as there are stages upstream on the longest path."""
    stages = pipeline.stages
    downstream = depths(stages)
    longest = max(downstream)
    rows = [
        split(in_turn(s, depth, stages.num_microbatches), backlog=longest - depth) for s, depth in enumerate(downstream)
    ]
    return Schedule(by_position(NAME, pipeline, rows))
