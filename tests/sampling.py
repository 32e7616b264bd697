"""Which cases run: six of each function by default, all with ``--all-cases`` (``make test-all``).

Which six follows from a seed and the names of the cases.  The seed is git's HEAD, so that every commit looks at other
cases and all processes of a run at the same ones; pytest prints it, and ``--seed`` sets it.  Files that take long come
first, so that no core waits for another one at the end.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

NUM_CASES = 6
"""Of one test function that ``make test`` runs, where ``@pytest.mark.cases(number)`` says nothing else."""

NO_COMMIT = "no-commit"
"""The seed outside git."""

LONG_FILES, LONG_S = Path(__file__).with_name("long_files.json"), 2.0
"""Seconds of processor time of the files of tests that take more than ``LONG_S`` in ``make test``: they come first."""

everything = False
"""Whether all cases run; set before any test is imported."""


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


def long_files() -> dict[str, float]:
    """:data:`LONG_FILES`, the longest first."""
    files: dict[str, float] = json.loads(LONG_FILES.read_text("utf-8"))
    return files


def write_long_files(seconds: Mapping[str, Sequence[float]]) -> None:
    """Write what files took of which these are the seconds of all tests, by function (``file::name``)."""
    sums: dict[str, float] = {}
    for function, cases in seconds.items():
        file = function.partition("::")[0]
        sums[file] = sums.get(file, 0.0) + sum(cases)
    files = {**long_files(), **{file: round(total_s, 1) for file, total_s in sums.items()}}
    kept = sorted((-total_s, file) for file, total_s in files.items() if total_s > LONG_S)
    LONG_FILES.write_text(json.dumps({file: -negative for negative, file in kept}, indent=1) + "\n", "utf-8")
