"""``halopipe report``: a plan as one offline page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halopipe.cli.options import ClusterOption, ProfileOption
from halopipe.terminal import console
from halopipe.terminal.output_files import claimed
from planner.ir.errors import UsageError
from planner.ir.files import write_text


def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="PLAN [PROFILE] [TIMELINE] [RIVAL...]",
            help="Told apart by what they hold: the first plan is reported, further plans are its rivals.",
        ),
    ],
    profile: ProfileOption = None,
    cluster: ClusterOption = None,
    pareto: Annotated[
        int, typer.Option(min=0, help="Search the Pareto front of step and memory for about so many plans.")
    ] = 0,
    output: Annotated[Path, typer.Option("-o", "--output", help="Page to write.")] = Path("report.html"),
) -> None:
    """Write one offline page: network, step, memory, rivals, proof, and how each figure is known."""
    from halopipe.planning import pareto as fronts
    from halopipe.planning import problem
    from halopipe.reports import report as reporting

    reporting.require_page(output)
    with claimed([output], [*files, profile, cluster]):
        sources = reporting.read(files, profile, cluster)
        front = None
        if pareto and sources.profile is None:
            raise UsageError(
                "--pareto searches, which needs the profile",
                [f"none is given, and no profile.json beside {sources.file} is the one that it was made from"],
                [sources.command("report", "PROFILE", "--pareto", pareto)],
            )
        if pareto and sources.profile is not None:
            front = fronts.front(problem.problem_of(sources.plan, sources.profile), pareto)
        write_text(output, reporting.page(sources, front))
    console.wrote(output, "open it in a browser; it needs no network")
