"""Random small chains."""

from __future__ import annotations

import random
from collections.abc import Sequence

from planner.extras.baselines.common.problem import ChainCosts


def random_chain(seed: int, largest: int = 5) -> ChainCosts:
    """At most ``largest`` layers with random costs."""
    draw = random.Random(seed)
    count = draw.randint(1, largest)

    def each(high: float) -> tuple[float, ...]:
        return tuple(draw.choice([0.0, draw.uniform(0, high), draw.uniform(0, high)]) for _ in range(count))

    names = tuple(f"l{k}" for k in range(count))
    crossing = (*(draw.uniform(0, 3) for _ in range(count - 1)), 0.0)
    return ChainCosts(names, each(2), each(3), each(4), each(5), crossing)


def latency_s(costs: Sequence[tuple[float, float, float]], micro_batches: int) -> float:
    """DAPPLE's objective, as its module states it.

    Args:
        costs: (F, B, AR) of every stage and boundary, in order.
    """
    steady = [(micro_batches - 1) * (f + b) for f, b, _ in costs]
    pivot = len(costs) - 1
    for s in reversed(range(len(costs) - 1)):
        if steady[s] > steady[pivot] + sum(f + b for f, b, _ in costs[s + 1 : pivot]):
            pivot = s
    ending = max(
        reduction
        + (sum(b for _, b, _ in costs[s : pivot + 1]) if s <= pivot else -sum(b for _, b, _ in costs[pivot + 1 : s]))
        for s, (_, _, reduction) in enumerate(costs)
    )
    return sum(f for f, _, _ in costs[: pivot + 1]) + steady[pivot] + ending
