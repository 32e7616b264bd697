"""The list of all schedules: each adds itself where it is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner.ir.schedule import Pipeline, Schedule, Traits

Order = Callable[[Pipeline], Schedule]
"""What a schedule is."""
Positions = Callable[[int, int], tuple[int, ...]]
"""The position of each stage, by the number of positions and of stages on each."""
ByStage = Callable[[Pipeline], tuple[int, ...]]
"""A number for each stage."""


@dataclass(frozen=True, slots=True)
class RegisteredSchedule:
    """A schedule and what is special about it."""

    order: Order
    traits: Traits
    positions: Positions | None
    max_in_flight: ByStage | None
    staleness: ByStage | None


ENTRIES: dict[str, RegisteredSchedule] = {}
"""By name."""


def registered(
    name: str,
    traits: Traits | None = None,
    *,
    positions: Positions | None = None,
    max_in_flight: ByStage | None = None,
    staleness: ByStage | None = None,
) -> Callable[[Order], Order]:
    """Adds the function below to the schedules, as ``name``.

    Args:
        positions: where its stages lie; None: stage s at position s mod p.
        max_in_flight: forwards before the first backward, after which backwards and forwards take turns (``in_turn``);
            None where the order is another one.
        staleness: how old its weights are; None: never old.
    """

    def add(order: Order) -> Order:
        if name in ENTRIES:
            raise ValueError(f"there are two schedules {name!r}")
        ENTRIES[name] = RegisteredSchedule(order, traits or Traits(), positions, max_in_flight, staleness)
        return order

    return add
