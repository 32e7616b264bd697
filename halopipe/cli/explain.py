"""``halopipe explain``: why this plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halopipe.cli import completion
from halopipe.cli.options import ClusterOption, JsonOption, PlanPath, ProfileOption, with_options
from halopipe.terminal import console
from planner.ir.errors import UsageError
from planner.ir.options import option

if TYPE_CHECKING:
    from halopipe.terminal.console import Answer
    from planner.ir.plan import Plan
    from planner.ir.profile import Profile


@dataclass(frozen=True, slots=True)
class Questions:
    """What may be asked about a plan; at most one of the first three.  The help of each field says what it is."""

    why_not: str = option(
        "",
        "An alternative's or solver's name, or conditions: 'dp=4', 'stages=4,schedule=gpipe,micro-batch=8'.",
        "TEXT",
        offers="planner.solvers:names",
    )
    what_if: str = option(
        "", "Changes: 'n0/gpu0.memory=32GiB', 'devices=8', 'without=n1/*', 'link TIER.bandwidth=25GB/s'.", "TEXT"
    )
    prices: bool = option(False, "What a GiB, a device, a link twice as fast would save.")
    time_limit: float = option(60.0, "Seconds that --prices may search.", least=0.1)
    layer: str = option("", "Where a layer runs, what it costs, which split wins.", "NAME", offers=completion.layers)
    receptive_field: str = option(
        "", "What an output of a layer reads of the network's inputs; PLAN may be a profile.", "LAYER"
    )
    box: str = option("", "Of that output, which part: height=0:4; else the middle.", "DIM=FROM:TO,...")


@with_options
def explain(
    plan: PlanPath,
    profile: Annotated[
        Path | None, typer.Argument(metavar="PROFILE", help="The profile that the plan was made from.")
    ] = None,
    profile_option: ProfileOption = None,
    cluster: ClusterOption = None,
    *,
    questions: Questions,
    json: JsonOption = False,
) -> None:
    """Say why this plan: the step as a picture, stages, memory, what binds, what else there was."""
    from halopipe.planning import plan_files
    from halopipe.reports import explain as explaining
    from halopipe.reports import layer as describing

    if profile is not None and profile_option is not None:
        raise UsageError("two profiles are given", [str(profile), f"--profile {profile_option}"], ["keep one"])
    profile = profile or profile_option
    asked = [name for name in ("why_not", "what_if", "prices") if getattr(questions, name)]
    flags = [f"--{name.replace('_', '-')}" for name in asked]
    if len(asked) > 1:
        raise UsageError(f"{' and '.join(flags)} are asked at once", [], ["ask one at a time"])
    if questions.receptive_field:
        from planner.layers import receptive_field as fields

        box = describing.parse_box(questions.box) if questions.box else None
        field = fields.receptive_field(plan_files.graph_in(plan, profile, cluster), questions.receptive_field, box)
        console.emit_json(describing.field_data(field)) if json else console.emit(describing.describe_field(field))
        return
    if questions.box:
        raise UsageError("--box is of an output", [], ["add --receptive-field LAYER"])
    loaded = plan_files.load_plan(plan)
    source = plan_files.profile_of(loaded, plan, profile, cluster)
    if source is None and asked and not questions.why_not:
        raise UsageError(
            f"{flags[0]} searches again, which needs the profile",
            [f"none is given, and no profile.json beside {plan} is the one that it was made from"],
            [f"{console.command('explain', plan, '--profile', 'PROFILE')} ..."],
        )
    if asked:
        console.show(_answer(loaded, source, questions), as_json=json)
    elif questions.layer:
        about = loaded, source, questions.layer
        console.emit_json(describing.layer_data(*about)) if json else console.emit(describing.describe_layer(*about))
    else:
        console.emit_json(explaining.data(loaded, source)) if json else console.emit(explaining.explain(loaded, source))


def _answer(plan: Plan, profile: Profile | None, questions: Questions) -> Answer:
    from halopipe.planning import search_progress

    if questions.why_not or profile is None:
        return search_progress.why_not(plan, profile, questions.why_not)
    if questions.what_if:
        return search_progress.what_if(plan, profile, questions.what_if)
    return search_progress.prices(plan, profile, questions.time_limit)
