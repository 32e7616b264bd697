"""What limits a step, in words: the busiest rank, idle time, sums and messages, and memory that is nearly full."""

from __future__ import annotations

from planner.costs.predict import Forecast
from planner.ir.plan import Decision
from planner.ir.schedule import Op

_NEARLY_FULL = 0.9
_WORTH_NAMING = 0.01


def binding(decision: Decision, seen: Forecast) -> tuple[str, ...]:
    """What limits the step, in words, the largest share of it first."""
    step_s = seen.prediction.step_s
    if step_s <= 0:
        return ()
    shares = [
        (share, words)
        for share, words in (
            _bottleneck(decision, seen),
            (seen.prediction.bubble_fraction, "of the ranks' time is idle (bubble)"),
            (longest_sum_s(seen) / step_s, "of the step sums gradients (all-reduce and wait)"),
            (most_messages_s(seen) / step_s, "of the step moves activations, gradients or statistics"),
        )
        if share >= _WORTH_NAMING
    ]
    ordered = [f"{share:.0%} {words}" for share, words in sorted(shares, key=lambda pair: -pair[0])]
    fullest = max(seen.prediction.ranks, key=lambda rank: rank.peak_bytes / max(1, rank.memory_limit_bytes))
    full = fullest.peak_bytes / max(1, fullest.memory_limit_bytes)
    if full >= _NEARLY_FULL:
        ordered.append(f"memory: rank {fullest.rank} holds {full:.0%} of what it may")
    return tuple(ordered)


def _bottleneck(decision: Decision, seen: Forecast) -> tuple[float, str]:
    busiest = max(seen.prediction.ranks, key=lambda rank: rank.compute_s)
    stages = [s for s, stage in enumerate(decision.stages) if busiest.rank in stage.ranks]
    where = f"stage {stages[0]}" if stages else "no stage"
    device = next((d for s in stages for r, d in _devices(decision, s) if r == busiest.rank), "")
    return busiest.compute_s / seen.prediction.step_s, f"of the step rank {busiest.rank} ({device}) computes {where}"


def _devices(decision: Decision, stage: int) -> tuple[tuple[int, str], ...]:
    found = decision.stages[stage]
    return tuple(zip(found.ranks, found.devices, strict=True))


def longest_sum_s(seen: Forecast) -> float:
    """The longest that a rank is in a sum of gradients that is made once a step."""
    spans = (span for span in seen.timeline.spans if span.action.endswith(Op.REDUCE_GRAD.value))
    return max((span.stop_s - span.start_s for span in spans), default=0.0)


def most_messages_s(seen: Forecast) -> float:
    """The communication of the rank that has most of it, reductions apart."""
    reduction_s = {
        span.rank: span.stop_s - span.start_s
        for span in seen.timeline.spans
        if span.action.endswith(Op.REDUCE_GRAD.value)
    }
    return max((rank.communication_s - reduction_s.get(rank.rank, 0.0) for rank in seen.prediction.ranks), default=0.0)
