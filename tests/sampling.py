"""How many cases run: a few of each test by default, all with ``--all-cases`` (``make test-all``).

A test function has 0.3 seconds of processor time in ``make test``: cheap ones run eight cases, dear ones one.  What a
case takes is written down (``tests/costs.json``, made by ``pytest --write-costs``), so that the same cases run every
time and everywhere.  Files that take long come first, so that no core waits for another one at the end.
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

LONG_FILES, LONG_S = Path(__file__).with_name("long_files.json"), 2.0
"""Seconds of processor time of the files of tests that take more than ``LONG_S`` in ``make test``: they come first."""

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
    costs = written_costs()
    several = {function for function, cases in seconds.items() if len(cases) > 1}  # or one was all that could be paid
    costs |= {function: round(fmean(seconds[function]), 2) for function in several | (seconds.keys() & costs.keys())}
    files: dict[str, dict[str, float]] = {}
    for function, mean_s in sorted(costs.items()):
        if affordable(mean_s) < MOST_CASES:
            file, _, name = function.partition("::")
            files.setdefault(file, {})[name] = mean_s
    COSTS.write_text(json.dumps(files, indent=1) + "\n", "utf-8")


def long_files() -> dict[str, float]:
    """:data:`LONG_FILES`, the longest first."""
    found: dict[str, float] = json.loads(LONG_FILES.read_text("utf-8"))
    return found


def write_long_files(seconds: Mapping[str, Sequence[float]]) -> None:
    """Write what files took of which these are the seconds of all tests, by function (``file::name``)."""
    sums: dict[str, float] = {}
    for function, cases in seconds.items():
        file = function.partition("::")[0]
        sums[file] = sums.get(file, 0.0) + sum(cases)
    files = {**long_files(), **{file: round(total_s, 1) for file, total_s in sums.items()}}
    kept = sorted((-total_s, file) for file, total_s in files.items() if total_s > LONG_S)
    LONG_FILES.write_text(json.dumps({file: -negative for negative, file in kept}, indent=1) + "\n", "utf-8")


def affordable(seconds: float) -> int:
    """How many cases of so many seconds each ``make test`` runs."""
    return max(1, min(MOST_CASES, int(BUDGET_S / seconds))) if seconds else MOST_CASES


def some(values: Sequence[T], most: int) -> list[T]:
    """All values with ``--all-cases``, else a few of them."""
    return list(values) if everything else few(values, most)
