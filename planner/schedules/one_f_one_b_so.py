"""1F1B-SO: 1F1B with a doubled warm-up, so that messages travel while others compute (synchronous, overlapped).

    0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3

BaPipe (Zhao et al., arXiv 2012.12544, 2020), its scheduling for devices that overlap.  In a chain of p stages, stage s
runs 2 (p - s) - 1 forwards before its first backward: for every hop downstream one more micro-batch is under way, which
hides transfers c up to (F + B) / 2.  With DAGs, p - s is the number of stages on the longest path downstream, as in
1F1B, and it is free of deadlock for the same reason.
"""

from __future__ import annotations

from planner.ir.schedule import Pipeline, Schedule, Traits
from planner.schedules._rows import by_position, depths, in_turn

NAME = "1f1b-so"
TRAITS = Traits(by_default=True)


def order(pipeline: Pipeline) -> Schedule:
    """Twice the longest path downstream less one, then one backward, one forward."""
    stages = pipeline.stages
    rows = [in_turn(s, 2 * depth - 1, stages.num_microbatches) for s, depth in enumerate(depths(stages))]
    return Schedule(by_position(NAME, pipeline, rows))
