"""Clocks that a search is told the time by, and searches that end by counted work alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from planner.solvers import budget


class Ticking:
    """A clock that goes on by so much whenever it is asked."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.num_asked = 0

    def __call__(self) -> float:
        self.num_asked += 1
        return self.num_asked * self.step_s


@contextmanager
def by_clock(clock: Callable[[], float]) -> Iterator[None]:
    """Inside, searches ask ``clock``."""
    real = budget.now_s
    budget.now_s = clock
    try:
        yield
    finally:
        budget.now_s = real


@contextmanager
def by_work() -> Iterator[None]:
    """Inside, limits of searches are limits of work: what is proven does not depend on how fast the machine is."""
    with budget.under(budget.Budget(3600.0)):
        yield
