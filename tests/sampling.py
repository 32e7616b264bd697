"""Which cases run: of each function as many as its budget of processor time buys; all with ``--all-cases``.

A function's budget is the same for all, :func:`budget_s`: the largest with which the whole of ``make test`` takes no
more than :data:`TOTAL_S`.  What a case takes is measured, in ``tests/costs.json`` (``pytest --write-costs``).  A budget
buys at least one case, at most :data:`NUM_CASES`, or what the function's mark says.

Which cases they are follows from a seed and the names of the cases.  The seed is git's HEAD, so that every commit looks
at other cases and all processes of a run at the same ones; pytest prints it, and ``--seed`` sets it.  Files that take
long come first, so that no core waits for another one at the end.
"""

from __future__ import annotations

import functools
import hashlib
import json
import statistics
import subprocess
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

NUM_CASES = 6
"""Of one test function that ``make test`` runs at most, where ``@pytest.mark.cases(number)`` says nothing else."""

TOTAL_S = 680.0
"""Processor time that the cases of :data:`COSTS` may take in ``make test``, on all cores together."""

NO_COMMIT = "no-commit"
"""The seed outside git."""

COSTS = Path(__file__).with_name("costs.json")
"""What a case of each function takes, where all that may run of it take more than :data:`CHEAP_S`."""

CHEAP_S = 0.3

everything = False
"""Whether all cases run; set before any test is imported."""


@dataclass(frozen=True)
class Cost:
    """Of one test function."""

    case_s: float  # processor time of the median case
    fewest: int  # cases that run whatever they take
    most: int  # cases that run where the budget buys them

    def num_cases(self, budget_s: float) -> int:
        return max(self.fewest, min(self.most, int(budget_s / self.case_s)))

    def total_s(self, budget_s: float) -> float:
        return self.case_s * self.num_cases(budget_s)


@functools.cache
def costs() -> Mapping[str, Cost]:
    """Those of :data:`COSTS`, by function (``file::name``)."""
    files: dict[str, dict[str, dict[str, float]]] = json.loads(COSTS.read_text("utf-8"))
    return {
        f"{file}::{name}": Cost(fields["case_s"], int(fields["fewest"]), int(fields["most"]))
        for file, functions in files.items()
        for name, fields in functions.items()
    }


@functools.cache
def budget_s() -> float:
    """Of each function."""
    return largest_budget_s(costs().values(), TOTAL_S)


def largest_budget_s(costs: Collection[Cost], total_s: float) -> float:
    """With which functions take at most ``total_s`` together; where that is too little for their fewest cases, zero."""
    budgets = sorted({cost.case_s * number for cost in costs for number in range(cost.fewest, cost.most + 1)})
    num_affordable = bisect_right(budgets, total_s, key=lambda budget: sum(cost.total_s(budget) for cost in costs))
    return budgets[num_affordable - 1] if num_affordable else 0.0


def num_cases(function: str, fewest: int, most: int) -> int:
    """How many cases of ``function`` run."""
    known = costs().get(function)
    return Cost(known.case_s, fewest, most).num_cases(budget_s()) if known else most


def commit(folder: Path) -> str:
    """The hash of git's HEAD, with changes beside it or without; :data:`NO_COMMIT` where there is none."""
    command = ["git", "-C", str(folder), "rev-parse", "--verify", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, check=True, text=True, timeout=30).stdout.strip()[:12]
    except (OSError, subprocess.SubprocessError):
        return NO_COMMIT


def drawn(values: Sequence[T], most: int, seed: str, name: Callable[[T], str]) -> list[T]:
    """``most`` of the values in their order, by a hash of ``seed`` and of the name of each."""
    lowest = sorted(values, key=lambda value: hashlib.sha256(f"{seed} {name(value)}".encode()).digest())[:most]
    chosen = set(map(name, lowest))
    return [value for value in values if name(value) in chosen]


def few(values: Sequence[T], most: int) -> list[T]:
    """The first, the last, and some evenly between them: ``most`` in all."""
    count = min(most, len(values))
    return [values[number * (len(values) - 1) // max(1, count - 1)] for number in range(count)]


def some(values: Sequence[T], most: int) -> list[T]:
    """All values with ``--all-cases``, else a few of them."""
    return list(values) if everything else few(values, most)


def file_costs() -> dict[str, float]:
    """Seconds of each file of tests in ``make test``."""
    files: dict[str, float] = {}
    for function, cost in costs().items():
        file = function.partition("::")[0]
        files[file] = files.get(file, 0.0) + cost.total_s(budget_s())
    return files


def write_costs(measured: Mapping[str, Cost]) -> None:
    """Write them in the place of what was known of the same files."""
    files = {function.partition("::")[0] for function in measured}
    kept = {function: cost for function, cost in costs().items() if function.partition("::")[0] not in files}
    written: dict[str, dict[str, dict[str, float]]] = {}
    for function, cost in sorted({**kept, **measured}.items()):
        if cost.case_s * cost.most > CHEAP_S:
            file, _, name = function.partition("::")
            written.setdefault(file, {})[name] = asdict(cost)
    by_file = []
    for file, functions in written.items():
        lines = [f"  {json.dumps(name)}: {json.dumps(cost)}" for name, cost in functions.items()]
        by_file.append(f" {json.dumps(file)}: {{\n" + ",\n".join(lines) + "\n }")
    COSTS.write_text("{\n" + ",\n".join(by_file) + "\n}\n", "utf-8")
    costs.cache_clear()
    budget_s.cache_clear()


def measured_cost(cases_s: Sequence[float], fewest: int, most: int) -> Cost:
    """Of a function whose cases took so long: the median, since the first of them also pays for what they share."""
    return Cost(max(1e-3, round(statistics.median(cases_s), 3)), fewest, most)
