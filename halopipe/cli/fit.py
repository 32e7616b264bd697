"""``halopipe fit``: how well kernel models fit a table of kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halopipe.cli.options import Json
from halopipe.terminal import console, units
from halopipe.terminal import tables as text
from halopipe.terminal.output_files import claimed, require_once


def fit(
    tables: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[TABLES.csv ...]", help="Kernels as you measured them; none: those that ship."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Figure of the errors to write: .svg or .png.")
    ] = None,
    json: Json = False,
) -> None:
    """Fit kernel models to tables of measured kernels, and say how far off they are on networks held back."""
    from planner.extras.kernels.fit import as_json, fit_rows, known_rows
    from planner.extras.kernels.tables import read_table, shipped

    if output is not None:
        from halopipe.extras.figures import figures

        figures.require_format(output)
    require_once(tables or [], "table")
    with claimed([output], tables or []):
        fitted = fit_rows([row for path in tables for row in read_table(path)] if tables else known_rows(shipped()))
        rows = [
            [
                each.device,
                each.dtype,
                each.kind,
                str(each.held_back.num_rows),
                units.percent(each.held_back.median),
                units.percent(each.held_back.p90),
                units.percent(each.curve_error),
                "curve and neighbours" if each.uses_neighbours else "curve",
            ]
            for each in fitted
        ]
        header = ["device", "dtype", "kernel", "shapes", "median error", "90 %", "curve alone", "kept"]
        console.emit_json(as_json(fitted)) if json else console.emit(text.table(header, rows))
        if output is not None:
            figures.save(figures.fits(fitted), output)
            console.wrote(output)
