"""1F1B-SNO: 1F1B on devices that cannot compute while they send or receive (synchronous, not overlapped).

    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2

BaPipe (Zhao et al., arXiv 2012.12544, 2020), its scheduling for devices that do not overlap.  The order is that of
1F1B; its messages hold both of their ranks for as long as they travel: the sender first, then the receiver.  The
lowered actions say so (``0SEND_F0>1!``), so that the simulator prices it from the program alone.
"""

from __future__ import annotations

from planner.ir.schedule import Pipeline, Schedule, Traits
from planner.schedules._rows import by_position, depths, in_turn

NAME = "1f1b-sno"
TRAITS = Traits(blocking=True)


def order(pipeline: Pipeline) -> Schedule:
    """1F1B with messages that block."""
    stages = pipeline.stages
    rows = [in_turn(s, warm_up, stages.num_microbatches) for s, warm_up in enumerate(depths(stages))]
    return Schedule(by_position(NAME, pipeline, rows), blocking=True)
