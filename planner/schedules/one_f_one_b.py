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

from planner.ir.schedule import Pipeline, Schedule, Traits
from planner.schedules._rows import by_position, depths, in_turn

NAME = "1f1b"
TRAITS = Traits(by_default=True)


def order(pipeline: Pipeline) -> Schedule:
    """Warm-up by the longest path downstream, then one backward, one forward."""
    stages = pipeline.stages
    rows = [in_turn(s, warm_up, stages.num_microbatches) for s, warm_up in enumerate(depths(stages))]
    return Schedule(by_position(NAME, pipeline, rows))
