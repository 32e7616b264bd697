"""GPipe: all forwards, then all backwards (Huang et al., NeurIPS 2019, figure 2c).

    0F0 0F1 0F2 0B0 0B1 0B2
    1F0 1F1 1F2 1B0 1B1 1B2

Every stage keeps the activations of all micro-batches at once.  Backwards run in the order of the forwards, not in the
paper's reverse one: so the last stage hands the first gradient back a whole sweep of backwards earlier, and with
unequal micro-batches the order in which running gradients are summed is that of one device.
"""

from __future__ import annotations

from planner.ir.schedule import Pipeline, Schedule, Traits
from planner.schedules._rows import by_position, in_turn

NAME = "gpipe"
TRAITS = Traits(by_default=True)


def order(pipeline: Pipeline) -> Schedule:
    """All forwards, then all backwards, on every stage."""
    count = pipeline.stages.num_microbatches
    return Schedule(by_position(NAME, pipeline, [in_turn(s, count, count) for s in range(pipeline.stages.num_stages)]))
