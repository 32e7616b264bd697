"""``halopipe explain``: why this plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halopipe.cli import completion
from halopipe.cli.options import ClusterOption, Json, PlanPath, ProfileOption
from planner.ir.errors import UsageError


def explain(
    plan: PlanPath,
    profile: Annotated[
        Path | None,
        typer.Argument(metavar="PROFILE", help="The profile that the plan was made from."),
    ] = None,
    profile_option: ProfileOption = None,
    cluster: ClusterOption = None,
    why_not: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="An alternative's or solver's name, or conditions: 'dp=4', 'stages=4,schedule=gpipe,micro-batch=8'.",
            autocompletion=completion.offered("planner.solvers:names"),
        ),
    ] = "",
    what_if: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="Changes: 'n0/gpu0.memory=32GiB', 'devices=8', 'without=n1/*', 'link TIER.bandwidth=25GB/s'.",
        ),
    ] = "",
    prices: Annotated[
        bool, typer.Option("--prices", help="What a GiB, a device, a link twice as fast would save.")
    ] = False,
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds that --prices may search.")] = 60.0,
    layer: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Where a layer runs, what it costs, which split wins.",
            autocompletion=completion.layers,
        ),
    ] = "",
    receptive_field: Annotated[
        str,
        typer.Option(
            "--receptive-field",
            metavar="LAYER",
            help="What an output of a layer reads of the network's inputs; PLAN may be a profile.",
        ),
    ] = "",
    box: Annotated[
        str,
        typer.Option(metavar="DIM=FROM:TO,...", help="Of that output, which part: height=0:4; else the middle."),
    ] = "",
    json: Json = False,
) -> None:
    """Say why this plan: the step as a picture, stages, memory, what binds, what else there was."""
    from halopipe.planning import plan_files, search_progress
    from halopipe.reports import explain as explaining
    from halopipe.reports import layer as describing
    from halopipe.terminal import console

    if profile is not None and profile_option is not None:
        raise UsageError("two profiles are given", [str(profile), f"--profile {profile_option}"], ["keep one"])
    asked = [name for name, value in (("--why-not", why_not), ("--what-if", what_if), ("--prices", prices)) if value]
    if len(asked) > 1:
        raise UsageError(f"{' and '.join(asked)} are asked at once", [], ["ask one at a time"])
    if receptive_field:
        from planner.layers import receptive_field as fields

        graph = plan_files.graph_in(plan, profile or profile_option, cluster)
        field = fields.receptive_field(graph, receptive_field, describing.parse_box(box) if box else None)
        console.emit_json(describing.field_data(field)) if json else console.emit(describing.describe_field(field))
        return
    if box:
        raise UsageError("--box is of an output", [], ["add --receptive-field LAYER"])
    loaded = plan_files.load_plan(plan)
    source = plan_files.profile_of(loaded, plan, profile or profile_option, cluster)
    if (what_if or prices) and source is None:
        raise UsageError(
            f"{asked[0]} searches again, which needs the profile",
            [f"none is given, and no profile.json beside {plan} is the one that it was made from"],
            [f"{console.command('explain', plan, '--profile', 'PROFILE')} ..."],
        )
    if why_not:
        answer = search_progress.why_not(loaded, source, why_not)
        console.emit_json(answer.data()) if json else console.emit(answer.render())
    elif what_if and source is not None:
        answer = search_progress.what_if(loaded, source, what_if)
        console.emit_json(answer.data()) if json else console.emit(answer.render())
    elif prices and source is not None:
        priced = search_progress.prices(loaded, source, time_limit)
        console.emit_json(priced.data()) if json else console.emit(priced.render())
    elif layer:
        if json:
            console.emit_json(describing.layer_data(loaded, source, layer))
        else:
            console.emit(describing.describe_layer(loaded, source, layer))
    elif json:
        console.emit_json(explaining.data(loaded, source))
    else:
        console.emit(explaining.explain(loaded, source))
