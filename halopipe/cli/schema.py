"""``halopipe schema``: the JSON Schema of a file format."""

from __future__ import annotations

from typing import Annotated

import typer

from halopipe.cli import completion
from halopipe.terminal import console, units

FORMATS = ("profile", "plan", "proof", "timeline", "job")


def schema(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="profile, plan, proof, timeline or job.",
            autocompletion=completion.offered(FORMATS),
        ),
    ],
) -> None:
    """Write the JSON Schema of a file format to stdout."""
    from halopipe.run_spec import job_file
    from planner.ir import codec

    units.require_known("file format", [name], [*codec.FORMATS, job_file.NAME])
    console.emit(job_file.schema() if name == job_file.NAME else codec.schema(name))
