"""What a decision says of its stages beside where they run: layouts in words, micro-batches in flight."""

from __future__ import annotations

from itertools import pairwise

from planner.ir.graph import SAMPLE
from planner.ir.layout import Layout
from planner.ir.plan import Decision, Placement
from planner.ir.schedule import Action, Op


def stage_layouts(decision: Decision, stage: int) -> dict[str, int]:
    """How many layers of ``stage`` are divided in which way; nothing on a stage of one rank."""
    found: dict[str, int] = {}
    if len(decision.stages[stage].ranks) > 1:
        for name in decision.layers_of(stage):
            words = layout_text(decision.layers[name], decision.micro_batches[0])
            found[words] = found.get(words, 0) + 1
    return found


def layout_text(placement: Placement, micro_batch: int) -> str:
    """``samples 3:1``, or ``samples 2:2 x height 28:28``: the parts along each dim; ``whole`` if nothing is cut.

    Beyond that ``(margin 2)``: rows that each rank works beyond its part; ``(2 ways)``: ranks that share channels.
    """
    parts = []
    for dim, points in placement.cuts.items():
        sizes = Layout({dim: points}).samples(micro_batch) if dim == SAMPLE else [b - a for a, b in pairwise(points)]
        parts.append(f"{'samples' if dim == SAMPLE else dim} {':'.join(map(str, sizes))}")
    more = [f"{placement.ways} ways"] if placement.ways > 1 else []
    more += [f"margin {placement.margin}"] if placement.margin else []
    return (" x ".join(parts) or "whole") + (f" ({', '.join(more)})" if more else "")


def in_flight(decision: Decision, stage: int) -> int:
    """Most micro-batches that the first rank of ``stage`` has forwarded and not yet gone back through.

    0 if the rank's row cannot be read.
    """
    most = now = 0
    rank = next(iter(decision.stages[stage].ranks), 0)
    try:
        row = [Action.parse(text) for text in decision.program[rank]]
    except (IndexError, ValueError):
        return 0
    for action in row:
        if action.stage == stage and action.op is Op.FORWARD:
            now += 1
            most = max(most, now)
        elif action.stage == stage and action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            now -= 1
    return most
