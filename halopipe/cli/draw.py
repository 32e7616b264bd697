"""``halopipe draw``: a figure of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halopipe.cli.options import ClusterOption, ProfileOption
from halopipe.terminal import console, units
from halopipe.terminal.output_files import claimed
from planner.ir.errors import UsageError

_FIGURES = ("step", "memory", "graph")


def draw(
    files: Annotated[
        list[Path], typer.Argument(metavar="PLAN [PROFILE] [TIMELINE]", help="Told apart by what they hold.")
    ],
    what: Annotated[
        str, typer.Option(metavar="FIGURE", help=f"{', '.join(_FIGURES)}; if not said, what the output is called.")
    ] = "",
    profile: ProfileOption = None,
    cluster: ClusterOption = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Figure to write: .svg or .png.")] = Path("step.svg"),
) -> None:
    """Draw the step, the memory of its ranks over time, or the network with its stages, for a paper or a talk."""
    from halopipe.reports import figures
    from halopipe.reports import report as reporting

    figures.require_format(output)
    wanted = what or output.stem
    if not what and wanted not in _FIGURES:
        raise UsageError(
            f"{output} does not say what to draw", [f"figures: {', '.join(_FIGURES)}"], [f"--what step -o {output}"]
        )
    units.require_known("figure", [wanted], _FIGURES)
    with claimed([output], [*files, profile, cluster]):
        figures.save(reporting.figure_of(reporting.read(files, profile, cluster), wanted), output)
    console.wrote(output)
