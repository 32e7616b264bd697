"""How many cases run: a few of each test by default, all with ``--all-cases`` (``make test-all``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

MOST_CASES = 4
"""Of one test function that ``make test`` runs."""

everything = False
"""Whether all cases run; set before any test is imported."""


def few(values: Sequence[T], most: int) -> list[T]:
    """The first, the last, and some evenly between them: ``most`` in all."""
    count = min(most, len(values))
    return [values[number * (len(values) - 1) // max(1, count - 1)] for number in range(count)]


def some(values: Sequence[T], most: int) -> list[T]:
    """All values with ``--all-cases``, else a few of them."""
    return list(values) if everything else few(values, most)
