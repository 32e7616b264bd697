"""``halopipe notebook``: strategies compared for one's own profile, as a notebook."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halopipe.reports import notebook as notebooks
from halopipe.terminal import console
from halopipe.terminal.output_files import claimed, require_once
from planner.ir.errors import UsageError, WorkerError
from planner.ir.files import write_text


def notebook(
    profile: Annotated[
        Path,
        typer.Argument(metavar="PROFILE", help="A profile, as written by 'halopipe profile'."),
    ],
    plans: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="PLAN",
            help="Plans of it that were run: predicted beside measured.",
        ),
    ] = None,
    run: Annotated[bool, typer.Option(help="Run it, so that it opens with its tables and pictures.")] = True,
    output: Annotated[Path, typer.Option("-o", "--output", help="Notebook to write.")] = Path("strategies.ipynb"),
) -> None:
    """Write a notebook that plans from a profile, compares strategies, and asks what if; and run it."""
    from halopipe.planning import plan_files

    if output.suffix != ".ipynb":
        raise UsageError(f"notebooks are called .ipynb, not {output.name!r}", [], [f"-o {output.stem}.ipynb"])
    ran = plans or []
    require_once(ran, "plan")
    with claimed([output], [profile, *ran]):
        plan_files.load_profile(profile)
        for plan in ran:
            plan_files.load_profile(profile, plan_files.load_plan(plan))  # which says that it is of another profile
        written = notebooks.strategies(profile, ran, output.parent)
        try:
            if run:
                console.remark("running the notebook: planning, comparing")
                notebooks.run(written, output.parent)
        except WorkerError:
            write_text(output, notebooks.text(written))
            raise
        write_text(output, notebooks.text(written))
    console.wrote(output, "open it with Jupyter, or in an editor that shows notebooks")
