"""``halopipe fit``: how well kernel models fit a table of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halopipe.cli.options import JsonOption
from halopipe.terminal import console, units
from halopipe.terminal import tables as text
from halopipe.terminal.output_files import claimed, require_once

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from planner.extras.kernels.fit import Fit


def fit(
    tables: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[TABLES.csv ...]", help="Kernels as you measured them; none: those that ship."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Figure of the errors to write: .svg or .png.")
    ] = None,
    json: JsonOption = False,
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
            figures.save(_errors(fitted), output)
            console.wrote(output)


def _errors(fitted: Sequence[Fit]) -> Figure:
    """One panel a device: predicted over measured of each shape that was held back, by the time that it took."""
    from matplotlib.figure import Figure

    from halopipe.extras.figures.colours import COLOURS, GREY

    devices = list(dict.fromkeys((fit.device, fit.dtype) for fit in fitted))
    kinds = list(dict.fromkeys(fit.kind for fit in fitted))
    figure = Figure(figsize=(9.0, 0.8 + 2.6 * len(devices)), layout="constrained")
    panels = figure.subplots(len(devices), 1, sharex=True, squeeze=False)[:, 0]
    for axes, device in zip(panels, devices, strict=True):
        for fit in (fit for fit in fitted if (fit.device, fit.dtype) == device):
            colour = COLOURS[kinds.index(fit.kind) % len(COLOURS)]
            marker = "ox^s"[kinds.index(fit.kind) // len(COLOURS) % 4]
            label = f"{fit.kind}, {fit.held_back.text}"
            measured_s, logs = fit.checked.T
            ratios = [exp(log) for log in logs]
            axes.scatter(measured_s, ratios, 6, colour, marker=marker, alpha=0.5, linewidths=0, label=label)
        axes.axhline(1.0, color=GREY, linewidth=0.8)
        axes.set(xscale="log", yscale="log", ylabel="predicted / measured", title=", ".join(device))
        axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
    panels[-1].set_xlabel("measured seconds of a kernel that was held back")
    return figure
