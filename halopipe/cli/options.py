"""Options that several verbs have, spelled once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer


def a_number(value: float) -> float:
    """Callback of options that compare with limits, which NaN passes."""
    if math.isnan(value):
        raise typer.BadParameter("NaN is no number")
    return value


PlanPath = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file, as written by 'halopipe plan'.")]
ProfileOption = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="PROFILE",
        help="The profile that the plan was made from; if it is profile.json beside the plan, it is found.",
    ),
]
ClusterOption = Annotated[
    Path | None,
    typer.Option("--cluster", metavar="FILE", help="Machines one does not have (YAML); see 'halopipe devices'."),
]
Json = Annotated[bool, typer.Option("--json", help="Write the result alone, as JSON, to stdout.")]
HostsOption = Annotated[Path | None, typer.Option("--hosts", hidden=True)]
"""Of former times: answered with the commands of torchrun that take its place."""
