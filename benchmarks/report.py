"""Rows of a benchmark, how they are printed, and how documents show those of ``results/``.

A document has a table wherever it says

    <!-- results: step_time; rows=^ResNet-50; columns=predicted|measured; by=, -->
    <!-- end of results -->

and ``python -m benchmarks.report`` writes the tables of all documents again, those of many rows folded. A row's name
is cut at its last ``by`` (by default a colon; nothing: it is not cut), into the table's row and column; names without
one make a table of two columns. ``rows`` and ``columns`` are expressions of which those shown hold a match; without
them all are shown.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
DOCUMENTS = Path(__file__).parents[1]
MOST_COLUMNS = 7
"""A table with more of them, and fewer rows, is turned round."""
MOST_ROWS = 6
"""A table with more of them is folded: a reader sees how many rows it has, and how many goals are missed."""

_BLOCK = re.compile(r"<!-- results: (?P<asked>[^\n]*?) -->\n(?P<table>.*?)<!-- end of results -->", re.DOTALL)


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


def at_most(name: str, value: float, unit: str, limit: float | None) -> Row:
    """A row that should not exceed ``limit``; without one it informs."""
    return Row(name, value, unit) if limit is None else Row(name, value, unit, f"<= {limit:g}", value <= limit)


def at_least(name: str, value: float, unit: str, limit: float | None) -> Row:
    """A row that should reach ``limit``; without one it informs."""
    return Row(name, value, unit) if limit is None else Row(name, value, unit, f">= {limit:g}", value >= limit)


def error_within(name: str, ratio: float, limit: float) -> Row:
    """By how many per cent a ratio is off 1, which should be no more than ``limit``."""
    error = 100 * (ratio - 1)
    return Row(name, error, "%", f"within {limit:g}", abs(error) <= limit)


def run(
    description: str,
    measure: Callable[..., Sequence[Row]],
    arguments: Sequence[str] | None = None,
    own: Mapping[str, Mapping[str, Any]] | None = None,
) -> int:
    """Parse ``--json``, ``--quick`` and what the benchmark takes, measure, print; the exit code is 0 in any case.

    Args:
        measure: is called with ``quick``, and with the options of ``own`` by their names.
        own: the benchmark's own options, as ``add_argument`` takes them.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print only the rows, as JSON")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, within a minute")
    for name, settings in (own or {}).items():
        parser.add_argument(name, **settings)
    options = vars(parser.parse_args(arguments))
    as_json = options.pop("json")
    rows = measure(options.pop("quick"), **options)
    sys.stdout.write(as_text(rows) if as_json else f"{description}\n{table(rows)}\n")
    return 0


def as_text(rows: Sequence[Row]) -> str:
    """The rows as a file of ``results/`` has them."""
    return json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n"


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


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows of which benchmark a table shows; see the module's text."""

    benchmark: str
    rows: str = ""
    columns: str = ""
    by: str = ":"

    @classmethod
    def parse(cls, asked: str) -> Selection:
        """The selection that a comment asks for.

        Raises:
            ValueError: it names an option that there is not.
        """
        benchmark, *options = (part.strip() for part in asked.split(";"))
        given = dict(option.partition("=")[::2] for option in options)
        if unknown := given.keys() - {"rows", "columns", "by"}:
            raise ValueError(f"results: {asked}: there is no option {', '.join(sorted(unknown))}")
        return cls(benchmark, **given)

    def cells(self, rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
        """Those rows by the name of the table's row and column; the column is empty where a name is in one piece."""
        found: dict[str, dict[str, Row]] = {}
        for row in rows:
            name, cut, column = row.name.rpartition(f"{self.by} ") if self.by else ("", "", "")
            name, column = (name, column) if cut else (row.name, "")
            if re.search(self.rows, name) and re.search(self.columns, column):
                found.setdefault(name, {})[column] = row
        return found


def read(benchmark: str) -> list[Row]:
    """The rows that a benchmark left in ``results/``."""
    return [Row(**row) for row in json.loads((RESULTS / f"{benchmark}.json").read_text("utf-8"))]


def written(document: str, results: Callable[[str], Sequence[Row]] = read) -> str:
    """The document with its tables as the results are now.

    Raises:
        ValueError: a table would be empty.
    """

    def block(match: re.Match[str]) -> str:
        selection = Selection.parse(match["asked"])
        cells = selection.cells(results(selection.benchmark))
        if not cells:
            raise ValueError(f"results: {match['asked']}: no row of {selection.benchmark} is like that")
        return f"<!-- results: {match['asked']} -->\n\n{folded(cells)}\n\n<!-- end of results -->"

    return _BLOCK.sub(block, document)


def folded(cells: Mapping[str, Mapping[str, Row]]) -> str:
    """A table; one of many rows stands behind a line that a reader opens."""
    text = markdown(cells)
    num_rows = text.count("\n") - 1
    if num_rows <= MOST_ROWS:
        return text
    num_missed = sum(not row.holds for of_name in cells.values() for row in of_name.values())
    missed = f", {num_missed} of the figures miss{'es' if num_missed == 1 else ''} the goal" if num_missed else ""
    return f'<details markdown="1"><summary>{num_rows} rows{missed}</summary>\n\n{text}\n\n</details>'


def markdown(cells: Mapping[str, Mapping[str, Row]]) -> str:
    """A table; figures that miss their goal are bold, with the goal behind them."""
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    if len(columns) > MOST_COLUMNS and len(columns) > len(cells):
        return markdown({each: {name: row[each] for name, row in cells.items() if each in row} for each in columns})
    units = {column: {row[column].unit for row in cells.values() if column in row} for column in columns}
    common = {column: next(iter(of_column)) if len(of_column) == 1 else "" for column, of_column in units.items()}
    heads = [", ".join(part for part in (column, common[column]) if part) or "value" for column in columns]
    lines = [["", *heads], ["---"] + ["---:"] * len(columns)]
    for name, row in cells.items():
        lines.append([name, *(_cell(row.get(column), not common[column]) for column in columns)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def figure(value: float) -> str:
    """Three digits of a value, and all of those before the point."""
    size = abs(value)
    if value == round(value) or size >= 100:
        return f"{value:,.0f}"
    return f"{value:#.2g}" if size < 1 else f"{value:.{1 if size >= 10 else 2}f}"


def _cell(row: Row | None, with_unit: bool) -> str:
    if row is None:
        return ""
    text = figure(row.value) + (f" {row.unit}" if with_unit and row.unit else "")
    return text if row.holds else f"**{text}** ({row.goal})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables of README.md and of docs/ again."""
    argparse.ArgumentParser(description=main.__doc__).parse_args(arguments)
    for path in (DOCUMENTS / "README.md", *sorted((DOCUMENTS / "docs").rglob("*.md"))):
        before = path.read_text("utf-8")
        after = written(before)
        if after != before:
            path.write_text(after, "utf-8")
            sys.stdout.write(f"{path.relative_to(DOCUMENTS)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
