"""``halopipe plan``: searches for the fastest plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halopipe.commands.options import Json


def plan(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="A profile, as written by 'halopipe profile'.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write.")] = Path("plan.json"),
    global_batch: Annotated[
        int, typer.Option(min=0, help="Samples a step; 0: as many as the profile's example has.")
    ] = 0,
    micro_batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Samples a micro-batch that may be used; repeatable.")
    ] = None,
    schedule: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Schedule that may be used; repeatable; all if not given.")
    ] = None,
    solver: Annotated[str, typer.Option(metavar="NAME", help="How to search.")] = "suffix-dp",
    ranks: Annotated[int, typer.Option(min=0, help="Devices that may be used; 0: all.")] = 0,
    max_stages: Annotated[int, typer.Option(min=0, help="Most stages; 0: no limit.")] = 0,
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Most memory a device may use, such as 2GiB or 512MB.")
    ] = "",
    gap: Annotated[
        float, typer.Option(min=0.0, help="Stop once the plan is proved to be this close to the best (0.01 = 1 %).")
    ] = 0.0,
    time_limit: Annotated[float, typer.Option(min=0.0, help="Seconds to search at most.")] = 60.0,
    json: Json = False,
) -> None:
    """Search for the fastest plan -> plan.json. Needs no devices."""
    from halopipe import console, explaining, planning, searching, units
    from halopipe.outcome import INTERRUPTED
    from planner.ir.codec import dump, dumps

    problem = planning.make_problem(
        planning.load_profile(profile),
        global_batch=global_batch,
        micro_batch=micro_batch or (),
        schedules=schedule or (),
        num_ranks=ranks,
        max_stages=max_stages,
        memory_bytes=units.parse_size(memory) if memory else 0,
        gap=gap,
        time_limit_s=time_limit,
    )
    found = searching.solve(problem, solver)
    dump(found, output)
    console.emit(dumps(found) if json else explaining.headline(found))
    console.wrote(output, f"halopipe explain {output} --profile {profile}, or halopipe run {output}")
    if found.search.status == "stopped":
        raise typer.Exit(INTERRUPTED)
