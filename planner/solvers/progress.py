"""What a search reports while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """How far a search is.

    Attributes:
        best_s: the best plan so far; infinity if there is none yet.
        bound_s: no plan of the searched space is faster.
        gap: best_s / bound_s - 1.
        num_simulated: plans simulated so far.
    """

    best_s: float
    bound_s: float
    gap: float
    num_simulated: int
    elapsed_s: float


Progress = Callable[[SearchProgress], None]
