"""1F1B with 2BP: all backwards for the weights at the end, or as late as a limit on memory lets them be.

    0F0 0F1 0I0 0F2 0I1 0I2 0W0 0W1 0W2
    1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2

Rae et al., "2BP: 2-stage backpropagation", arXiv 2405.18047, 2024, figure 1.  What a W needs is kept until it has run,
so that without a limit every stage keeps all micro-batches in the end.  With windows, W_s is the most that stage s
keeps between F and W: a W that was put off runs before a forward that would be one more, and the warm-up is W_s where
that is less than 1F1B's.  Windows are lowered as in windowed 1F1B.
"""

from __future__ import annotations

from planner.ir.schedule import Pipeline, Schedule, Traits
from planner.schedules._rows import by_position, clamped, depths, in_turn, split

NAME = "1f1b-2bp"
TRAITS = Traits(splits_backward=True, windowed=True)


def order(pipeline: Pipeline) -> Schedule:
    """1F1B with every W as late as its window lets it be."""
    stages = pipeline.stages
    limits = pipeline.windows or (stages.num_microbatches,) * stages.num_stages
    warm_ups = clamped(map(min, limits, depths(stages)), stages)
    rows = [
        split(in_turn(s, warm_up, stages.num_microbatches), held=max(limit, warm_up))
        for s, (warm_up, limit) in enumerate(zip(warm_ups, limits, strict=True))
    ]
    return Schedule(by_position(NAME, pipeline, rows))
