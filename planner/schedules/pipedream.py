"""PipeDream: 1F1B without a flush; each stage updates after every backward and stashes the weights it still needs.

    0F0 0F1 0B0 0UPDATE0 0F2@1 0B1 0UPDATE1 0F3@2 0B2@1 0UPDATE2 0B3@2 0UPDATE3
    1F0 1B0 1UPDATE0 1F1@1 1B1@1 1UPDATE1 1F2@2 1B2@2 1UPDATE2 1F3@3 1B3@3 1UPDATE3

Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP 2019, sections 3.2 and 3.3.

**This changes the optimisation**: every micro-batch is a minibatch of its own, with an update of its own.  The forward
takes the newest weights, the backward those of its forward (weight stashing; not vertical sync, so the stages of one
micro-batch may differ).  With w = 1F1B's warm-up, a micro-batch misses the last w - 1 updates: p - s - 1 on stage s of
a chain, which keeps up to p - s versions.  Between steps the pipeline is empty: the first micro-batches of a step miss
fewer.
"""

from __future__ import annotations

from planner.ir.schedule import Pipeline, Schedule, Traits
from planner.schedules._rows import by_position, depths, in_turn, updating

NAME = "pipedream"
TRAITS = Traits(synchronous=False)


def order(pipeline: Pipeline) -> Schedule:
    """1F1B, with an update after every backward."""
    stages = pipeline.stages
    rows = [
        updating(in_turn(s, depth, stages.num_microbatches), every=1, version=_newest)
        for s, depth in enumerate(depths(stages))
    ]
    return Schedule(by_position(NAME, pipeline, rows))


def staleness(pipeline: Pipeline) -> tuple[int, ...]:
    """By stage, the most updates that the weights of a micro-batch lack."""
    return tuple(min(depth, pipeline.stages.num_microbatches) - 1 for depth in depths(pipeline.stages))


def _newest(microbatch: int, num_updates: int) -> int:
    return num_updates
