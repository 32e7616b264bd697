"""What a peer's optimiser answers: the value, how far the best could be from it, and the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

OPTIMAL, TIME_LIMIT, INFEASIBLE = ("optimal", "time limit", "infeasible")
"""Proved to be the best; the best found when time was up; no plan exists."""

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
"""What JSON can hold."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A plan under a peer's objective.

    Attributes:
        value: the peer's objective, in its unit (seconds, or milliseconds); infinite if no plan was found.
        bound: no plan has a smaller value; equal to ``value`` where that is proved optimal.
        status: ``OPTIMAL``, ``TIME_LIMIT`` or ``INFEASIBLE``.
        plan: what was chosen, as JSON; empty if nothing was found.
    """

    value: float
    bound: float
    status: str
    plan: Mapping[str, Json] = field(default_factory=dict)

    @property
    def found(self) -> bool:
        """Whether there is a plan."""
        return self.value < inf


def infeasible() -> Answer:
    """No plan exists."""
    return Answer(inf, inf, INFEASIBLE)
