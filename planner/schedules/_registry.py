"""The list of all schedules: each adds itself where it is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner.ir.schedule import Pipeline, Schedule, Traits

Order = Callable[[Pipeline], Schedule]
"""What a schedule is."""
Positions = Callable[[int, int], tuple[int, ...]]
"""The position of each stage, by the number of positions and of stages on each."""
Staleness = Callable[[Pipeline], tuple[int, ...]]
"""By stage, the most updates that the weights of a micro-batch lack."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A schedule and what is special about it."""

    order: Order
    traits: Traits
    positions: Positions | None
    staleness: Staleness | None


ENTRIES: dict[str, Entry] = {}
"""By name."""


def registered(
    name: str, traits: Traits | None = None, *, positions: Positions | None = None, staleness: Staleness | None = None
) -> Callable[[Order], Order]:
    """Adds the function below to the schedules, as ``name``.

    Args:
        positions: where its stages lie; None: stage s at position s mod p.
        staleness: how old its weights are; None: never old.
    """

    def add(order: Order) -> Order:
        if name in ENTRIES:
            raise ValueError(f"there are two schedules {name!r}")
        ENTRIES[name] = Entry(order, traits or Traits(), positions, staleness)
        return order

    return add
