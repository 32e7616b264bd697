"""How many cases run: a few of each test by default, all with ``--all-cases`` (``make test-all``).

A test function has 0.3 seconds of processor time in ``make test``: cheap ones run eight cases, dear ones one.  What a
case takes is written down (``tests/costs.json``, made by ``pytest --write-costs``), so that the same cases run every
time and everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TypeVar

T = TypeVar("T")

MOST_CASES, BUDGET_S = 8, 0.3
"""Of one test function that ``make test`` runs: cases, and processor time of them; one case runs in any case."""

COSTS = Path(__file__).with_name("costs.json")
"""Seconds of processor time a case, children included, of functions of which fewer than ``MOST_CASES`` can be paid."""

everything = False
"""Whether all cases run; set before any test is imported."""


def few(values: Sequence[T], most: int) -> list[T]:
    """The first, the last, and some evenly between them: ``most`` in all."""
    count = min(most, len(values))
    return [values[number * (len(values) - 1) // max(1, count - 1)] for number in range(count)]


def written_costs() -> dict[str, float]:
    """:data:`COSTS`, by file and name of the function."""
    costs: dict[str, dict[str, float]] = json.loads(COSTS.read_text("utf-8"))
    return {f"{file}::{name}": seconds for file, tests in costs.items() for name, seconds in tests.items()}


def write_costs(seconds: Mapping[str, Sequence[float]]) -> None:
    """Write the mean seconds of the cases of each function (``file::name``) to :data:`COSTS`, where they matter."""
    costs = {function: mean_s for function, mean_s in written_costs().items() if function not in seconds}
    costs |= {function: round(fmean(cases), 2) for function, cases in seconds.items() if len(cases) > 1}
    files: dict[str, dict[str, float]] = {}
    for function, mean_s in sorted(costs.items()):
        if affordable(mean_s) < MOST_CASES:
            file, _, name = function.partition("::")
            files.setdefault(file, {})[name] = mean_s
    COSTS.write_text(json.dumps(files, indent=1) + "\n", "utf-8")


def affordable(seconds: float) -> int:
    """How many cases of so many seconds each ``make test`` runs."""
    return max(1, min(MOST_CASES, int(BUDGET_S / seconds))) if seconds else MOST_CASES


def some(values: Sequence[T], most: int) -> list[T]:
    """All values with ``--all-cases``, else a few of them."""
    return list(values) if everything else few(values, most)
