"""What is waited for sums of gradients that run behind a backward, for the checker: a clock, bucket after bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.ir.program import BUCKET_BYTES


@dataclass(frozen=True, slots=True)
class Made:
    """A parameter's gradient: its bytes, and how much of the backward is left when it is complete."""

    num_bytes: int
    left_s: float


def waited_s(
    gradients: Sequence[Made],
    sum_s: Callable[[int], float],
    core_s: Callable[[int], float],
) -> float:
    """Seconds between the end of a backward and that of the last sum.

    Args:
        gradients: in the order of the model.
        core_s: what moving so many bytes takes from the core that computes.
    """
    buckets: list[list[Made]] = []
    for made in reversed(gradients):
        fits = buckets and made.num_bytes + sum(other.num_bytes for other in buckets[-1]) <= BUCKET_BYTES
        if fits:
            buckets[-1].append(made)
        else:
            buckets.append([made])
    sizes = [sum(made.num_bytes for made in bucket) for bucket in buckets]
    if len(buckets) <= 1:
        return sum(sum_s(size) for size in sizes)
    # The end of the backward is at 0; a sum starts when its gradients are complete and the one before has ended.
    starts = [-min(made.left_s for made in bucket) for bucket in buckets]
    clock = starts[0]
    for start, size in zip(starts, sizes, strict=True):
        clock = max(clock, start) + sum_s(size)
    total_s = sum(sum_s(size) for size in sizes)
    moving_s = sum(core_s(size) for size in sizes)
    hidden = min(1.0, -starts[0] / total_s) if total_s > 0 else 0.0
    return max(0.0, clock) + moving_s * hidden
