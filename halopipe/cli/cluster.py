"""``halopipe cluster``: this host, or the machines of a cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halopipe.cli.options import Json
from halopipe.terminal import console
from halopipe.terminal.output_files import claimed
from planner.ir.errors import UsageError


def cluster(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CLUSTER]",
            help="A cluster file (YAML); this host if not given.",
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="PROFILE",
            help="A profile, whose kinds of device the file may name.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the profile as it would be on these machines.")
    ] = None,
    json: Json = False,
) -> None:
    """Show the devices and links of this host or of a cluster file; check the file."""
    from halopipe.planning import clusters, plan_files
    from planner.extras.catalogue import read_machines
    from planner.ir.codec import dump, plain

    with claimed([output], [file, profile]):
        measured = plan_files.load_profile(profile) if profile is not None else None
        if file is None:
            machines = measured.cluster if measured is not None else clusters.detected()
        else:
            machines = (
                read_machines(file, measured.cluster).cluster if measured is not None else read_machines(file).cluster
            )
        if output is not None and (measured is None or file is None):
            raise UsageError(
                "--output needs a cluster file and --profile", [], ["halopipe cluster FILE --profile PROFILE"]
            )
        kinds = measured.measurements if measured is not None else ()
        console.emit_json(plain(machines)) if json else console.emit(clusters.cluster_text(machines, kinds))
        if output is not None and measured is not None and file is not None:
            dump(clusters.on_cluster(measured, file), output)
            console.wrote(output, console.command("plan", output))
