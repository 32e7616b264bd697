"""Sentences of a plan's file, each made of figures: what limits the step, and why another plan was not taken.

Solvers write them; the checker writes them again of the figures that the file states, and compares.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.costs.predict import Forecast
from planner.ir.plan import Stage
from planner.ir.schedule import Op

NEARLY_FULL = 0.9
WORTH_NAMING = 0.01
"""Shares of a rank's limit, and of the step, from which on they are named."""
IDLE = "of the ranks' time is idle (bubble)"
SUMS = "of the step sums gradients (all-reduce and wait)"
MESSAGES = "of the step moves activations, gradients or statistics"
AS_FAST = "as fast"
TIE = ", a tie"
_GIB = 2.0**30


def binding(stages: Sequence[Stage], forecast: Forecast) -> tuple[str, ...]:
    """What limits the step, in words, the largest share of it first."""
    step_s = forecast.prediction.step_s
    ranks = forecast.prediction.ranks
    if step_s <= 0:
        return ()
    busiest = max(ranks, key=lambda rank: rank.compute_s)
    shares = {
        computes(stages, busiest.rank): busiest.compute_s / step_s,
        IDLE: forecast.prediction.bubble_fraction,
        SUMS: longest_sum_s(forecast) / step_s,
        MESSAGES: most_messages_s(forecast) / step_s,
    }
    ordered = sorted(shares.items(), key=lambda pair: -pair[1])
    fullest = max(ranks, key=lambda rank: rank.peak_bytes / max(1, rank.memory_limit_bytes))
    full = fullest.peak_bytes / max(1, fullest.memory_limit_bytes)
    return (
        *(share_text(share, label) for label, share in ordered if share >= WORTH_NAMING),
        *([full_text(fullest.rank, full)] if full >= NEARLY_FULL else []),
    )


def computes(stages: Sequence[Stage], rank: int) -> str:
    """What a rank that computes is called: its device, and the first of its stages."""
    for number, stage in enumerate(stages):
        if rank in stage.ranks:
            device = dict(zip(stage.ranks, stage.devices, strict=False)).get(rank, "")
            return f"of the step rank {rank} ({device}) computes stage {number}"
    return f"of the step rank {rank} () computes no stage"


def share_text(share: float, label: str) -> str:
    """``31% of the step ...``."""
    return f"{share:.0%} {label}"


def full_text(rank: int, share: float) -> str:
    """Of a rank that holds this share of its limit."""
    return f"memory: rank {rank} holds {share:.0%} of what it may"


def longest_sum_s(forecast: Forecast) -> float:
    """The longest that a rank is in a sum of gradients that is made once a step."""
    spans = (span for span in forecast.own_timeline.spans if span.action.endswith(Op.REDUCE_GRAD.value))
    return max((span.stop_s - span.start_s for span in spans), default=0.0)


def most_messages_s(forecast: Forecast) -> float:
    """The communication of the rank that has most of it, reductions apart."""
    reduction_s = {
        span.rank: span.stop_s - span.start_s
        for span in forecast.own_timeline.spans
        if span.action.endswith(Op.REDUCE_GRAD.value)
    }
    return max((rank.communication_s - reduction_s.get(rank.rank, 0.0) for rank in forecast.own_ranks), default=0.0)


def slower_text(step_s: float, best_s: float) -> str:
    """How another step compares with the plan's: ``3.1% slower``."""
    if best_s <= 0:
        return "slower than a step that costs nothing" if step_s > best_s else AS_FAST
    ratio = step_s / best_s - 1
    return f"{abs(ratio):.1%} {'slower' if ratio > 0 else 'faster'}" if abs(ratio) > 1e-9 else AS_FAST


def needs_text(peak_bytes: int, rank: int, limit_bytes: int | None = None) -> str:
    """The two numbers that disagree: "needs 3.1 GiB on rank 0, limit 2.0 GiB"; its beginning where one is not known."""
    return (
        f"needs {size_text(peak_bytes)} on rank {rank}, limit {'' if limit_bytes is None else size_text(limit_bytes)}"
    )


def too_slow_text(sustained_per_s: float, rate_per_s: float) -> str:
    """Of a plan that sustains less than was asked for."""
    return f"sustains {sustained_per_s:.4g} samples/s, asked: {rate_per_s:.6g}"


def size_text(num_bytes: float) -> str:
    """Bytes as people read them."""
    for unit, scale in (("GiB", _GIB), ("MiB", _GIB / 1024), ("KiB", _GIB / 1024**2)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"
