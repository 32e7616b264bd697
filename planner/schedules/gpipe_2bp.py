"""GPipe with 2BP: all forwards, all backwards for the inputs, then all backwards for the weights.

    0F0 0F1 0F2 0I0 0I1 0I2 0W0 0W1 0W2
    1F0 1F1 1F2 1I0 1I1 1I2 1W0 1W1 1W2

Rae et al., "2BP: 2-stage backpropagation", arXiv 2405.18047, 2024, figure 1.  The gradients travel back at the pace of
I alone, and W fills the time in which the stages upstream are still at it.  It keeps what GPipe keeps, only longer.
"""

from __future__ import annotations

from planner.ir.schedule import Pipeline, Schedule, Traits
from planner.schedules._rows import by_position, in_turn, split

NAME = "gpipe-2bp"
TRAITS = Traits(splits_backward=True)


def order(pipeline: Pipeline) -> Schedule:
    """GPipe with every W at the end."""
    count = pipeline.stages.num_microbatches
    rows = [split(in_turn(s, count, count)) for s in range(pipeline.stages.num_stages)]
    return Schedule(by_position(NAME, pipeline, rows))
