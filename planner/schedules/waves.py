"""Waves and bidirectional pipelines: stages lie down and up again over the positions, in an order computed once."""

from __future__ import annotations

from dataclasses import replace

from planner.ir.schedule import Pipeline, Schedule, StageTimes, Traits
from planner.schedules._registry import registered
from planner.schedules._rows import require_positions, zigzag
from planner.schedules.greedy import list_scheduled

_EQUAL = StageTimes(1.0, 0.5, 0.5)
"""A backward as long as a forward: the order that this gives is also the best for one of twice its length (tests)."""


@registered("hanayo", Traits(stages_per_position=0), positions=zigzag)
def hanayo(pipeline: Pipeline) -> Schedule:
    """Hanayo: each position runs several stages, which lie down and up again in waves; no replicas.

        0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1
        1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1

    Liu et al., "Hanayo: harnessing wave-like pipeline parallelism for enhanced large model training efficiency", SC
    2023, section 3.  On each of p positions lie two stages a wave: W waves divide the bubble by W, at 2 W times the
    messages (nothing is sent at a turn).  Where F and B are those of all stages of a position and F = B, m
    micro-batches take m (F + B) + (p - 1) F / W; p of them with B = 2 F take p (F + B) + 2 (p - 1) F / W, which is a
    bubble of (2 p - 2) / (3 p W + 2 p - 2).  No position keeps more than the first of 1F1B.

    The order is that of list scheduling with equal times, whatever the stages last: backwards first, then the smaller
    micro-batch, then the later stage.  It is free of deadlock on any DAG, as ``greedy`` is.

    Raises:
        UsageError: the stages do not lie in waves.
    """
    return _in_waves("hanayo", pipeline)


@registered("chimera", Traits(stages_per_position=2, bidirectional=True), positions=zigzag)
def chimera(pipeline: Pipeline) -> Schedule:
    """Chimera: two pipelines in opposite directions, which fill each other's bubbles; every stage has two replicas.

        0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1
        1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1

    Li and Hoefler, "Chimera: efficiently training large-scale neural networks with bidirectional pipelines", SC 2021,
    section 3.  Of D stages, stage s is on the ranks s and D - 1 - s.  One half of each micro-batch goes down, from rank
    0 to rank D - 1, the other half goes up at the same time.  So the ranks r and D - 1 - r do the same in the same
    order, and are one position here, of D / 2.  A micro-batch is two of the paper's: its N are N / 2 here.

    With F = B, N = D of them take (2 D + D - 2) F: D - 2 bubbles where 1F1B has 2 (D - 1).  A rank keeps D / 2 + 1 to D
    of their activations, and two stages' weights.  As two waves on D / 2 positions with replicas (``hanayo``), but that
    the messages at the turn go between ranks.

    Raises:
        UsageError: there are not two stages on each position, down and up again.
    """
    return _in_waves("chimera", pipeline)


def _in_waves(name: str, pipeline: Pipeline) -> Schedule:
    stages, p = pipeline.stages, pipeline.num_positions
    require_positions(name, pipeline, zigzag(p, -(-stages.num_stages // p))[: stages.num_stages])
    alike = replace(pipeline, windows=(), times=(_EQUAL,) * stages.num_stages, transfer=0.0)
    return Schedule(list_scheduled(alike, (stages.num_microbatches,) * stages.num_stages)[1])
