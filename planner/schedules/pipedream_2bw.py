"""PipeDream-2BW: 1F1B without a flush; an update every p micro-batches, on weights one update old, two versions kept.

    0F0 0F1 0B0 0F2 0B1 0UPDATE1 0F3 0B2 0F4@1 0B3 0UPDATE3 0F5@1 0B4@1 0B5@1 0UPDATE5
    1F0 1B0 1F1 1B1 1UPDATE1 1F2 1B2 1F3 1B3 1UPDATE3 1F4@1 1B4@1 1F5@1 1B5@1 1UPDATE5

Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML 2021, section 3.1,
figure 2.

**This changes the optimisation**: gradients are summed over as many micro-batches as there are stages on the longest
path (the fewest for which two versions are enough), and the sum is taken at the weights before the last update, on
every stage alike: W(t + 1) = W(t) - step * gradient(W(t - 1)).  Between steps the pipeline is empty: the first two
updates of a step are both taken at the weights it began with.  The last update counts what remains.
"""

from __future__ import annotations

from functools import partial

from planner.ir.schedule import Pipeline, Schedule, Traits
from planner.schedules._rows import by_position, depths, in_turn, updating

NAME = "pipedream-2bw"
TRAITS = Traits(synchronous=False)


def order(pipeline: Pipeline) -> Schedule:
    """1F1B, with an update every p micro-batches."""
    stages = pipeline.stages
    downstream = depths(stages)
    every = max(downstream)
    rows = [
        updating(in_turn(s, depth, stages.num_microbatches), every, partial(_one_before, every))
        for s, depth in enumerate(downstream)
    ]
    return Schedule(by_position(NAME, pipeline, rows))


def staleness(pipeline: Pipeline) -> tuple[int, ...]:
    """By stage, the most updates that the weights of a micro-batch lack."""
    late = max(depths(pipeline.stages)) < pipeline.stages.num_microbatches
    return (int(late),) * pipeline.stages.num_stages


def _one_before(every: int, microbatch: int, num_updates: int) -> int:
    return max(0, microbatch // every - 1)
