"""``halopipe compare``: plans beside one another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halopipe.cli.options import ClusterOption, JsonOption, ProfileOption
from halopipe.run_spec.schema import MOST_JOBS
from halopipe.terminal import console
from halopipe.terminal.output_files import require_once
from planner.ir.errors import UsageError


def compare(
    plans: Annotated[
        list[Path],
        typer.Argument(metavar="PLAN...", help="Plan files; the first is the reference."),
    ],
    baselines: Annotated[
        bool, typer.Option("--baselines", help="Beside the published strategies, which are solved from the profile.")
    ] = False,
    jobs: Annotated[
        int,
        typer.Option(
            "--jobs", metavar="N", min=1, max=MOST_JOBS, help="Processes that share out the strategies of --baselines."
        ),
    ] = 1,
    profile: ProfileOption = None,
    cluster: ClusterOption = None,
    json: JsonOption = False,
) -> None:
    """Put plans beside one another: a table, and what they decide differently."""
    from halopipe.planning import plan_files, problem, search_progress
    from halopipe.planning.compare import Comparison

    require_once(plans, "plan")
    names = [str(path) for path in plans]
    by_name = {name: plan_files.load_plan(name) for name in names}
    first = by_name[names[0]]
    source = plan_files.profile_of(first, names[0], profile, cluster)
    comparison = Comparison(by_name, source)
    if baselines:
        if source is None:
            raise UsageError(
                "--baselines are solved from the profile",
                [f"none is given, and no profile.json beside {names[0]} is the one that it was made from"],
                [console.command("compare", names[0], "--baselines", "--profile", "PROFILE")],
            )
        solved = search_progress.baselines(problem.problem_of(first, source), jobs)
        comparison = Comparison({**by_name, **solved.plans}, source, solved)
    console.show(comparison, as_json=json)
