"""What a search reports while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """How far a search is; told when it has a plan for the first time, and every now and then.

    Attributes:
        best_s: the best plan so far; infinity if there is none yet.
        bound_s: no plan of the searched space is faster.
        gap: best_s / bound_s - 1.
        num_simulated: plans simulated so far.
        num_stages, num_devices: of the best plan; 0 if there is none yet.
    """

    best_s: float
    bound_s: float
    gap: float
    num_simulated: int
    elapsed_s: float
    num_stages: int = 0
    num_devices: int = 0


Progress = Callable[[SearchProgress], None]
