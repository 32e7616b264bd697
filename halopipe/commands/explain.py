"""``halopipe explain``: why this plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halopipe.commands.options import Json, PlanPath, ProfileOption


def explain(
    plan: PlanPath,
    profile: Annotated[
        Path | None, typer.Argument(metavar="PROFILE", help="The profile that the plan was made from.")
    ] = None,
    profile_option: ProfileOption = None,
    why_not: Annotated[
        str,
        typer.Option(
            metavar="TEXT", help="An alternative's name, or schedule=, micro-batch=, ranks=, stages=, solver=."
        ),
    ] = "",
    layer: Annotated[str, typer.Option(metavar="NAME", help="Where a layer runs and what it costs.")] = "",
    json: Json = False,
) -> None:
    """Say why this plan: the step as a picture, stages, memory, what binds, what else there was."""
    from halopipe import asking, console, explaining, planning
    from planner.ir.errors import UsageError

    if profile is not None and profile_option is not None:
        raise UsageError("two profiles are given", [str(profile), f"--profile {profile_option}"], ["keep one"])
    found = planning.load_plan(plan)
    source = planning.profile_of(found, plan, profile or profile_option)
    if why_not:
        answer = asking.why_not(found, source, why_not)
        console.emit_json({"why_not": answer.splitlines()}) if json else console.emit(answer)
    elif layer:
        answer = asking.describe_layer(found, source, layer)
        console.emit_json({"layer": answer.splitlines()}) if json else console.emit(answer)
    elif json:
        console.emit_json(explaining.data(found, source))
    else:
        console.emit(explaining.explain(found, source))
