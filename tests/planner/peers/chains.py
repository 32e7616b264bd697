"""Random small chains."""

from __future__ import annotations

import random

from planner.baselines.common.chain import Chain


def random_chain(seed: int, largest: int = 5) -> Chain:
    """At most ``largest`` layers with random costs."""
    draw = random.Random(seed)
    count = draw.randint(1, largest)

    def each(high: float) -> tuple[float, ...]:
        return tuple(draw.choice([0.0, draw.uniform(0, high), draw.uniform(0, high)]) for _ in range(count))

    names = tuple(f"l{k}" for k in range(count))
    crossing = (*(draw.uniform(0, 3) for _ in range(count - 1)), 0.0)
    return Chain(names, each(2), each(3), each(4), each(5), crossing)
