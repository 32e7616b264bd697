"""``halopipe run``: executes a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halopipe.commands.options import Json, PlanPath, ProfileOption


def run(
    plan: PlanPath,
    steps: Annotated[int, typer.Option(min=1, help="Steps to train.")] = 20,
    data: Annotated[
        str, typer.Option(metavar="FACTORY", help="Data, as 'pkg.mod:factory'; the model's own example if not given.")
    ] = "",
    check_numerics: Annotated[
        bool, typer.Option("--check-numerics", help="Compare losses and gradients of the first steps with one device.")
    ] = False,
    update: Annotated[bool, typer.Option("--update", help="Write what was measured into the plan file.")] = False,
    profile: ProfileOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Of parameters and data.")] = 0,
    dtype: Annotated[str, typer.Option(help="Instead of the plan's, such as float64.")] = "",
    deadline: Annotated[float, typer.Option(min=1.0, help="Seconds that a wait may last.")] = 120.0,
    hosts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Hosts of the plan, in order: 'host [slots=N]' a line.")
    ] = None,
    launcher: Annotated[
        str,
        typer.Option(metavar="COMMAND", help="Starts a command on a {host} of --hosts; 'ssh {host}' if not given."),
    ] = "",
    interface: Annotated[
        str, typer.Option(metavar="NAME", help="Network interface, or address, that the hosts of --hosts meet at.")
    ] = "",
    output: Annotated[Path, typer.Option("-o", "--output", help="Timeline file to write.")] = Path("timeline.json"),
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Trace for ui.perfetto.dev to write too.")] = None,
    json: Json = False,
) -> None:
    """Train by the plan -> timeline.json; starts workers here or on --hosts, or joins its torchrun or Slurm job."""
    from dataclasses import replace

    from halopipe import console, planning, training
    from halopipe.hosts import named
    from halopipe.running import RunOptions
    from halopipe.support import require_executable
    from planner.export.chrome_trace import chrome_trace
    from planner.ir.codec import dump, write_text

    found = planning.load_plan(plan)
    require_executable(found)
    predicted = training.predicted_timeline(found)
    source = planning.profile_of(found, plan, profile)
    if source is not None:
        predicted = planning.predict_again(found, source)[1]
    options = RunOptions(
        steps=steps, seed=seed, data=data, check_numerics=check_numerics, dtype=dtype, deadline_s=deadline
    )
    result = training.train(found, options, named(hosts, launcher, interface))
    if result is None:  # in a job of torchrun or Slurm, rank 0 reports for all
        return
    file = result.timeline_file(predicted)
    dump(file, output)
    if trace is not None:
        timelines = [timeline for timeline in (file.predicted, file.measured) if timeline.spans]
        write_text(trace, chrome_trace(timelines, planning.device_names(found)))
    if update:
        dump(replace(found, measured=result.measured(found.prediction)), plan)
    console.emit_json(training.data(found, result)) if json else console.emit(training.report(found, result, predicted))
    for path in (output, *([trace] if trace is not None else []), *([plan] if update else [])):
        console.wrote(path)
