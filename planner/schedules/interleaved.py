"""Several stages on a position."""

from __future__ import annotations

from collections.abc import Iterator

from planner.ir.schedule import Action, Op, Pipeline, Schedule, Traits
from planner.schedules._registry import registered
from planner.schedules._rows import require_positions


def positions(num_positions: int, stages_per_position: int) -> tuple[int, ...]:
    """The position of each stage."""
    return tuple(range(num_positions)) * stages_per_position


@registered("interleaved", Traits(stages_per_position=0), positions=positions)
def interleaved(pipeline: Pipeline) -> Schedule:
    """Interleaved 1F1B: each position runs several stages, p apart, so that a micro-batch passes it several times.

        0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

    Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC 2021,
    section 2.2.2, figure 4.  Stage s runs at position s mod p (p positions, v = S / p stages on each).  Forwards go p
    micro-batches through a position's first stage, then the same p through its next, and so on; backwards likewise
    from its last stage; position r runs 2 (p - r - 1) + (v - 1) p forwards, then forward and backward in turn.  The
    bubble is that of 1F1B over v, at v times as many messages.  With one stage on each position it is 1F1B.

    The paper asks for a multiple of p micro-batches and of p stages.  Here the order is that of the next multiples,
    without the micro-batches and stages that do not exist: what must precede what stays among those that do.  A DAG
    needs no more than the chain of its stages in topological order, in which every edge is implied.

    Raises:
        UsageError: stage s is not at position s mod p.
    """
    num_positions, num_stages = pipeline.num_positions, pipeline.stages.num_stages
    per_position = -(-num_stages // num_positions)
    require_positions("interleaved", pipeline, positions(num_positions, per_position)[:num_stages])
    return Schedule(tuple(tuple(_row(pipeline, r, per_position)) for r in range(num_positions)))


def _row(pipeline: Pipeline, position: int, per_position: int) -> Iterator[Action]:
    p, v, stages = pipeline.num_positions, per_position, pipeline.stages
    count = -(-stages.num_microbatches // p) * p * v
    ahead = p - position - 1
    warm_up = min(count, 2 * ahead + (v - 1) * p if v > 1 else ahead)
    sequence = [(Op.FORWARD, k) for k in range(warm_up)]
    for k in range(count - warm_up):
        sequence += [(Op.FORWARD, warm_up + k), (Op.BACKWARD, k)]
    sequence += [(Op.BACKWARD, k) for k in range(count - warm_up, count)]
    for op, k in sequence:
        turn = k // p % v
        stage = (turn if op is Op.FORWARD else v - 1 - turn) * p + position
        microbatch = k // (p * v) * p + k % p
        if stage < stages.num_stages and microbatch < stages.num_microbatches:
            yield Action(stage, op, microbatch)
