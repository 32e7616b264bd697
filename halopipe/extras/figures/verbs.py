"""``halopipe report``, ``draw`` and ``notebook``: a plan as one page, as a figure, or beside others in a notebook."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halopipe.cli.options import ClusterOption, ProfileOption
from halopipe.extra import FaceExtra
from halopipe.extras.figures import EXTRA
from halopipe.extras.figures import notebook as notebooks
from halopipe.run_spec.schema import MOST_PLANS
from halopipe.terminal import console, units
from halopipe.terminal.output_files import claimed, require_once
from planner.ir.errors import UsageError, WorkerError
from planner.ir.extras import extras
from planner.ir.files import write_text

_FIGURES = ("step", "memory", "graph")


def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="PLAN [PROFILE] [TIMELINE] [RIVAL...]",
            help="Told apart by what they hold: the first plan is reported, further plans are its rivals. Or an answer "
            "of 'halopipe ways' alone.",
        ),
    ],
    profile: ProfileOption = None,
    cluster: ClusterOption = None,
    pareto: Annotated[
        int,
        typer.Option(min=0, max=MOST_PLANS, help="Search the Pareto front of step and memory for about so many plans."),
    ] = 0,
    output: Annotated[Path, typer.Option("-o", "--output", help="Page to write.")] = Path("report.html"),
) -> None:
    """Write one offline page: network, step, memory, rivals, proof, and how each figure is known."""
    from halopipe.extras.figures import report as reporting
    from halopipe.planning import pareto as fronts
    from halopipe.planning import problem

    reporting.require_page(output)
    with claimed([output], [*files, profile, cluster]):
        others = (extra for extra in extras(FaceExtra) if extra is not EXTRA)
        if any(extra.write_report(files, output, None) for extra in others):
            console.wrote(output, "open it in a browser; it needs no network")
            return
        sources = reporting.read(files, profile, cluster)
        front = None
        if pareto and sources.profile is None:
            raise UsageError(
                "--pareto searches, which needs the profile",
                [f"none is given, and no profile.json beside {sources.file} is the one that it was made from"],
                [sources.command("report", "PROFILE", "--pareto", pareto)],
            )
        if pareto and sources.profile is not None:
            front = fronts.front(problem.problem_of(sources.plan, sources.profile), pareto)
        write_text(output, reporting.page(sources, front))
    console.wrote(output, "open it in a browser; it needs no network")


def draw(
    files: Annotated[
        list[Path], typer.Argument(metavar="PLAN [PROFILE] [TIMELINE]", help="Told apart by what they hold.")
    ],
    what: Annotated[
        str, typer.Option(metavar="FIGURE", help=f"{', '.join(_FIGURES)}; if not said, what the output is called.")
    ] = "",
    profile: ProfileOption = None,
    cluster: ClusterOption = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Figure to write: .svg or .png.")] = Path("step.svg"),
) -> None:
    """Draw the step, the memory of its ranks over time, or the network with its stages, for a paper or a talk."""
    from halopipe.extras.figures import figures
    from halopipe.extras.figures import report as reporting

    figures.require_format(output)
    wanted = what or output.stem
    if not what and wanted not in _FIGURES:
        raise UsageError(
            f"{output} does not say what to draw", [f"figures: {', '.join(_FIGURES)}"], [f"--what step -o {output}"]
        )
    units.require_known("figure", [wanted], _FIGURES)
    with claimed([output], [*files, profile, cluster]):
        figures.save(reporting.figure_of(reporting.read(files, profile, cluster), wanted), output)
    console.wrote(output)


def notebook(
    profile: Annotated[
        Path,
        typer.Argument(metavar="PROFILE", help="A profile, as written by 'halopipe profile'."),
    ],
    plans: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="PLAN",
            help="Plans of it that were run with --update: predicted beside measured.",
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
            loaded = plan_files.load_plan(plan)
            plan_files.load_profile(profile, loaded)  # which says that it is of another profile
            if loaded.measured is None:
                raise UsageError(
                    f"{plan} keeps nothing that a run measured",
                    ["plans are given beside the profile to see predicted beside measured"],
                    [console.command("run", plan, "--update"), f"leave {plan} out"],
                )
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
