"""``halopipe export``: a plan in another tool's format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halopipe.commands.options import ClusterOption, PlanPath, ProfileOption

_FORMATS = ("chrome-trace",)


def export(
    plan: PlanPath,
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="chrome-trace (Perfetto reads it).")],
    timeline: Annotated[
        Path | None, typer.Option(metavar="TIMELINE", help="A timeline file, as written by 'halopipe run'.")
    ] = None,
    profile: ProfileOption = None,
    cluster: ClusterOption = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write.")] = Path("trace.json"),
) -> None:
    """Write a plan for another tool: predicted and measured steps as a trace for ui.perfetto.dev."""
    from halopipe import console, naming, planning
    from planner.export.chrome_trace import chrome_trace
    from planner.ir.codec import load, write_text
    from planner.ir.errors import UsageError
    from planner.ir.timeline import TimelineFile

    naming.require_known("export format", [to], _FORMATS)
    found = planning.load_plan(plan)
    if timeline is not None:
        file = load(timeline, TimelineFile)
        timelines = [t for t in (file.predicted, file.measured) if t.spans]
    elif (source := planning.profile_of(found, plan, profile, cluster)) is not None:
        timelines = [planning.predict_again(found, source)[1]]
    else:
        raise UsageError(
            "a trace needs a timeline",
            ["a plan file holds the order of actions, not their times"],
            ["--timeline timeline.json (of a run)", "--profile profile.json (predicted)"],
        )
    write_text(output, chrome_trace(timelines, planning.device_names(found)))
    console.wrote(output, "open it at https://ui.perfetto.dev")
