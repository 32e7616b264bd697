"""One sweep after another: naive model parallelism, GPipe and its split backward, forward alone."""

from __future__ import annotations

from planner.ir.schedule import Action, Op, Pipeline, Schedule, Traits
from planner.schedules._registry import registered
from planner.schedules._rows import by_position, in_turn, split, stages_by_position, turns


def _one(pipeline: Pipeline) -> tuple[int, ...]:
    return (1,) * pipeline.stages.num_stages


def _all(pipeline: Pipeline) -> tuple[int, ...]:
    return (pipeline.stages.num_microbatches,) * pipeline.stages.num_stages


@registered("naive", max_in_flight=_one)
def naive(pipeline: Pipeline) -> Schedule:
    """Naive: one micro-batch after another, forward and back, before the next begins.

        0F0 0B0 0F1 0B1 0F2 0B2
        1F0 1B0 1F1 1B1 1F2 1B2

    What model parallelism does without a pipeline (Huang et al., GPipe, NeurIPS 2019, figure 2b): at any time one stage
    works, and each keeps one micro-batch.
    """
    return Schedule(turns("naive", pipeline))


@registered("gpipe", Traits(by_default=True), max_in_flight=_all)
def gpipe(pipeline: Pipeline) -> Schedule:
    """GPipe: all forwards, then all backwards (Huang et al., NeurIPS 2019, figure 2c).

        0F0 0F1 0F2 0B0 0B1 0B2
        1F0 1F1 1F2 1B0 1B1 1B2

    Every stage keeps the activations of all micro-batches at once.  Backwards run in the order of the forwards, not
    in the paper's reverse one: so the last stage hands the first gradient back a whole sweep of backwards earlier,
    and with unequal micro-batches the order in which running gradients are summed is that of one device.
    """
    return Schedule(turns("gpipe", pipeline))


@registered("gpipe-2bp", Traits(splits_backward=True))
def gpipe_2bp(pipeline: Pipeline) -> Schedule:
    """GPipe with 2BP: all forwards, all backwards for the inputs, then all backwards for the weights.

        0F0 0F1 0F2 0I0 0I1 0I2 0W0 0W1 0W2
        1F0 1F1 1F2 1I0 1I1 1I2 1W0 1W1 1W2

    Rae et al., "2BP: 2-stage backpropagation", arXiv 2405.18047, 2024, figure 1.  The gradients travel back at the
    pace of I alone, and W fills the time in which the stages upstream are still at it.  It keeps what GPipe keeps,
    only longer.
    """
    count = pipeline.stages.num_microbatches
    rows = [split(in_turn(s, count, count)) for s in range(pipeline.stages.num_stages)]
    return Schedule(by_position("gpipe-2bp", pipeline, rows))


@registered("forward", Traits(trains=False, stages_per_position=0))
def forward(pipeline: Pipeline) -> Schedule:
    """Forward only: micro-batches stream through the stages, nothing comes back (inference).

        0F0 0F1 0F2 0F3
        1F0 1F1 1F2 1F3

    A position that runs several stages takes them as a wave would reach it: by stage plus micro-batch, the later
    stage first.  All rows follow one order of all forwards in which no stage precedes those upstream: free of
    deadlock on any DAG and any positions.  A step is sum of f + (m - 1) max of f; one micro-batch alone is the
    latency.
    """
    batches = range(pipeline.stages.num_microbatches)
    waves = (
        sorted((stage + m, -stage, m) for stage in stages for m in batches) for stages in stages_by_position(pipeline)
    )
    return Schedule(tuple(tuple(Action(-stage, Op.FORWARD, m) for _, stage, m in wave) for wave in waves))
