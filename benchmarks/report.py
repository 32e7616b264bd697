"""Rows of a benchmark, and how they are printed."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        goal: what it should be, such as ``<= 3``; empty if the row only informs.
        holds: whether it is.
    """

    name: str
    value: float
    unit: str
    goal: str = ""
    holds: bool = True


def at_most(name: str, value: float, unit: str, limit: float) -> Row:
    """A row that should not exceed ``limit``."""
    return Row(name, value, unit, f"<= {limit:g}", value <= limit)


def at_least(name: str, value: float, unit: str, limit: float) -> Row:
    """A row that should reach ``limit``."""
    return Row(name, value, unit, f">= {limit:g}", value >= limit)


def run(description: str, measure: Callable[[bool], Sequence[Row]], arguments: Sequence[str] | None = None) -> int:
    """Parse ``--json`` and ``--quick``, measure, print; the exit code is 0 whether or not the goals hold."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print only the rows, as JSON")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, within a minute")
    options = parser.parse_args(arguments)
    rows = measure(options.quick)
    if options.json:
        sys.stdout.write(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    else:
        sys.stdout.write(f"{description}\n{table(rows)}\n")
    return 0


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    cells = [
        (row.name, f"{row.value:.4g}", row.unit, row.goal, "" if not row.goal else "yes" if row.holds else "NO")
        for row in rows
    ]
    cells.insert(0, ("figure", "value", "unit", "goal", "holds"))
    widths = [max(len(cell[column]) for cell in cells) for column in range(5)]
    return "\n".join(
        "  ".join(cell[i].rjust(widths[i]) if i == 1 else cell[i].ljust(widths[i]) for i in range(5)).rstrip()
        for cell in cells
    )
