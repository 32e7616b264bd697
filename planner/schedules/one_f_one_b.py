"""1F1B: a few forwards, then backward and forward in turn, so that few activations are kept (PipeDream-flush).

    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2

Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML 2021, section 2.2 (DAPPLE's early backward,
PPoPP 2021, is the same).  The warm-up of a stage is the number of stages on the longest path from it to the end of the
pipeline, itself included: in a chain of p stages, stage s keeps min(m, p - s) micro-batches at most.

Free of deadlock on any DAG: F of micro-batch i waits, through B of i - w and the B of a successor (whose warm-up is
smaller), for forwards of micro-batches before i alone.
"""

from __future__ import annotations

from planner.ir.schedule import Action, Op, Pipeline, Schedule, StageGraph, Traits

NAME = "1f1b"
TRAITS = Traits(by_default=True)


def order(pipeline: Pipeline) -> Schedule:
    """Warm-up by the longest path downstream, then one backward, one forward."""
    stages = pipeline.stages
    return Schedule(tuple(_row(s, warm_up, stages.num_microbatches) for s, warm_up in enumerate(warm_ups(stages))))


def warm_ups(stages: StageGraph) -> tuple[int, ...]:
    """Forwards before the first backward, by stage: the stages on the longest path downstream."""
    depth = [1] * stages.num_stages
    for edge in sorted(stages.edges, key=lambda edge: edge.src, reverse=True):  # stages are in topological order
        depth[edge.src] = max(depth[edge.src], depth[edge.dst] + 1)
    return tuple(depth)


def _row(stage: int, warm_up: int, num_microbatches: int) -> tuple[Action, ...]:
    forwards = [Action(stage, Op.FORWARD, m) for m in range(num_microbatches)]
    backwards = [Action(stage, Op.BACKWARD, m) for m in range(num_microbatches)]
    steady = [action for pair in zip(backwards, forwards[warm_up:], strict=False) for action in pair]
    drain = backwards[len(forwards[warm_up:]) :]
    return (*forwards[:warm_up], *steady, *drain)
