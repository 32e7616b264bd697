"""Pipelines without a flush, which change the optimisation: PipeDream and PipeDream-2BW."""

from __future__ import annotations

from planner.ir.schedule import Pipeline, Schedule, Traits
from planner.schedules._registry import registered
from planner.schedules._rows import by_position, depths, in_turn, updating


def missed(pipeline: Pipeline) -> tuple[int, ...]:
    """By stage, the most updates that the weights of a micro-batch lack."""
    return tuple(min(depth, pipeline.stages.num_microbatches) - 1 for depth in depths(pipeline.stages))


def _newest(microbatch: int, num_updates: int) -> int:
    return num_updates


@registered("pipedream", Traits(synchronous=False), staleness=missed)
def pipedream(pipeline: Pipeline) -> Schedule:
    """PipeDream: 1F1B without a flush; each stage updates after every backward and stashes the weights it still needs.

        0F0 0F1 0B0 0UPDATE0 0F2@1 0B1 0UPDATE1 0F3@2 0B2@1 0UPDATE2 0B3@2 0UPDATE3
        1F0 1B0 1UPDATE0 1F1@1 1B1@1 1UPDATE1 1F2@2 1B2@2 1UPDATE2 1F3@3 1B3@3 1UPDATE3

    Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP 2019, sections 3.2 and 3.3.

    **This changes the optimisation**: every micro-batch is a minibatch of its own, with an update of its own.  The
    forward takes the newest weights, the backward those of its forward (weight stashing; not vertical sync, so the
    stages of one micro-batch may differ).  With w = 1F1B's warm-up, a micro-batch misses the last w - 1 updates: p -
    s - 1 on stage s of a chain, which keeps up to p - s versions.  Between steps the pipeline is empty: the first
    micro-batches of a step miss fewer.
    """
    stages = pipeline.stages
    rows = [
        updating(in_turn(s, depth, stages.num_microbatches), every=1, version=_newest)
        for s, depth in enumerate(depths(stages))
    ]
    return Schedule(by_position("pipedream", pipeline, rows))


def missed_2bw(pipeline: Pipeline) -> tuple[int, ...]:
    """By stage, the most updates that the weights of a micro-batch lack."""
    late = max(depths(pipeline.stages)) < pipeline.stages.num_microbatches
    return (int(late),) * pipeline.stages.num_stages


@registered("pipedream-2bw", Traits(synchronous=False), staleness=missed_2bw)
def pipedream_2bw(pipeline: Pipeline) -> Schedule:
    """PipeDream-2BW: 1F1B without a flush; an update every p micro-batches, on weights one update old; two versions.

        0F0 0F1 0B0 0F2 0B1 0UPDATE1 0F3 0B2 0F4@1 0B3 0UPDATE3 0F5@1 0B4@1 0B5@1 0UPDATE5
        1F0 1B0 1F1 1B1 1UPDATE1 1F2 1B2 1F3 1B3 1UPDATE3 1F4@1 1B4@1 1F5@1 1B5@1 1UPDATE5

    Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML 2021, section 3.1, figure 2.

    **This changes the optimisation**: gradients are summed over as many micro-batches as there are stages on the
    longest path (the fewest for which two versions are enough), and the sum is taken at the weights before the last
    update, on every stage alike: W(t + 1) = W(t) - step * gradient(W(t - 1)).  Between steps the pipeline is empty:
    the first two updates of a step are both taken at the weights it began with.  The last update counts what remains.
    """
    stages = pipeline.stages
    downstream = depths(stages)
    every = max(downstream)
    rows = [
        updating(in_turn(s, depth, stages.num_microbatches), every, lambda m, _: max(0, m // every - 1))
        for s, depth in enumerate(downstream)
    ]
    return Schedule(by_position("pipedream-2bw", pipeline, rows))
