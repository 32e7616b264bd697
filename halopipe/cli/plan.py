"""``halopipe plan``: searches for the best plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halopipe.cli import completion
from halopipe.cli.options import ClusterOption, Json, a_number

_SPACE, _SEARCH = "What plans may use", "Search"
"""Headings in the help, below the common options."""


def plan(
    profile: Annotated[
        Path,
        typer.Argument(
            metavar="PROFILE", help="A profile, as written by 'halopipe profile'.", autocompletion=completion.profiles
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write.")] = Path("plan.json"),
    cluster: ClusterOption = None,
    global_batch: Annotated[
        int, typer.Option(min=0, help="Samples a step; 0: as many as the profile's example has.")
    ] = 0,
    micro_batch: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Samples a micro-batch that may be used; repeatable.", rich_help_panel=_SPACE),
    ] = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Schedule that may be used; repeatable; those that can run if not given.",
            autocompletion=completion.schedules,
            rich_help_panel=_SPACE,
        ),
    ] = None,
    objective: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="throughput (the step; a stream's rate with --schedule forward), memory or latency.",
            autocompletion=completion.objectives,
        ),
    ] = "throughput",
    rate: Annotated[
        float,
        typer.Option(
            min=0.0,
            callback=a_number,
            metavar="SAMPLES/S",
            help="Forward plans: what a stream must sustain, at the least latency; 0: any.",
        ),
    ] = 0.0,
    recompute: Annotated[
        str,
        typer.Option(
            metavar="WHEN",
            help="Compute activations again for the backward: never, auto, selective (attention alone), always.",
            autocompletion=completion.choices,
            rich_help_panel=_SPACE,
        ),
    ] = "never",
    shard: Annotated[
        str,
        typer.Option(
            metavar="WHEN",
            help="Divide a stage's optimiser state over its ranks: never, auto, always.",
            autocompletion=completion.choices,
            rich_help_panel=_SPACE,
        ),
    ] = "never",
    zero: Annotated[
        int,
        typer.Option(
            min=1,
            max=3,
            help="What --shard divides: 1 the optimiser's state, 2 gradients too, 3 parameters too.",
            rich_help_panel=_SPACE,
        ),
    ] = 1,
    allow: Annotated[
        str,
        typer.Option(
            metavar="DIM,...",
            help="Dims that may be cut: layers along sample, spatial, channel; sequences along time.",
            autocompletion=completion.families,
            rich_help_panel=_SPACE,
        ),
    ] = "sample",
    token_slices: Annotated[
        str,
        typer.Option(
            metavar="TOKENS+...",
            help="Cut sequences into slices of these tokens, such as 256+192+64; --allow time finds some.",
            rich_help_panel=_SPACE,
        ),
    ] = "",
    halo_depth: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="ROWS",
            help="Most rows that may be computed twice to save halos; 0: none.",
            rich_help_panel=_SPACE,
        ),
    ] = 0,
    fix: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE", help="Side constraint, such as 'enc.*=spatial:2'; repeatable.", rich_help_panel=_SPACE
        ),
    ] = None,
    forbid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE", help="What must not be, such as 'fc=device:n0/*'; repeatable.", rich_help_panel=_SPACE
        ),
    ] = None,
    solver: Annotated[
        str,
        typer.Option(metavar="NAME", help="How to search.", autocompletion=completion.solvers, rich_help_panel=_SEARCH),
    ] = "best-first",
    ranks: Annotated[int, typer.Option(min=0, help="Devices that may be used; 0: all.", rich_help_panel=_SPACE)] = 0,
    without: Annotated[
        str,
        typer.Option(
            metavar="DEVICE,...",
            help="Plan on what is left without these devices, such as 'n0/cpu1' or 'n1/*'.",
            rich_help_panel=_SPACE,
        ),
    ] = "",
    max_stages: Annotated[int, typer.Option(min=0, help="Most stages; 0: no limit.", rich_help_panel=_SPACE)] = 0,
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Most memory a device may use, such as 2GiB or 512MB.")
    ] = "",
    gap: Annotated[
        float,
        typer.Option(
            min=0.0,
            callback=a_number,
            help="Stop once the plan is proved to be this close to the best (0.01 = 1 %).",
            rich_help_panel=_SEARCH,
        ),
    ] = 0.0,
    confidence: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            callback=a_number,
            help="A simpler plan is taken unless another is faster with this probability; 0: the fastest at the mean.",
            rich_help_panel=_SEARCH,
        ),
    ] = 0.8,
    time_limit: Annotated[float, typer.Option(min=0.0, callback=a_number, help="Seconds to search at most.")] = 60.0,
    no_calibration: Annotated[
        bool,
        typer.Option(
            "--no-calibration", help="Costs as profiled, without what runs of plans corrected.", rich_help_panel=_SEARCH
        ),
    ] = False,
    pareto: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="The best step for N sizes of memory (0: for all), a plan file each.",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    measure_missing: Annotated[
        bool,
        typer.Option(
            "--measure-missing",
            help="Measure on this machine what the plan and close rivals use and the profile lacks; then plan again.",
            rich_help_panel=_SEARCH,
        ),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="With --measure-missing: fewer repetitions.", rich_help_panel=_SEARCH)
    ] = False,
    ways: Annotated[
        str,
        typer.Option(
            metavar="WAYS",
            help="No search: the plan that a way of a transformer is; 'ways -o' wrote it, or tensor=2,pipeline=2,...",
            rich_help_panel=_SEARCH,
        ),
    ] = "",
    json: Json = False,
) -> None:
    """Search for the best plan -> plan.json. Needs no devices, but for --measure-missing."""
    from halopipe.planning import problem as problems
    from halopipe.planning import search_progress, solve
    from halopipe.reports import explain
    from halopipe.terminal import console, units
    from halopipe.terminal.console import INTERRUPTED
    from halopipe.terminal.output_files import claimed
    from planner.ir.codec import dump, dumps

    with claimed([output], [profile, cluster], replaced=[profile] if measure_missing else []):
        if measure_missing:
            from halopipe.planning import measure_missing as missing

            missing.require_possible(cluster, pareto)
        loaded = solve.load_profile(profile, cluster=cluster)
        if ways:
            from halopipe.planning import ways as of_transformers

            asked = {
                "--schedule": schedule,
                "--fix": fix,
                "--forbid": forbid,
                "--recompute": recompute != "never",
                "--shard": shard != "never",
                "--zero": zero != 1,
                "--allow": allow != "sample",
                "--objective": objective != "throughput",
                "--solver": solver != "best-first",
                "--halo-depth": halo_depth,
                "--ranks": ranks,
                "--max-stages": max_stages,
                "--without": without,
                "--pareto": pareto is not None,
                "--measure-missing": measure_missing,
            }
            of_transformers.require_no_search([name for name, value in asked.items() if value])
            limit = units.parse_size(memory) if memory else 0
            given = of_transformers.plan_by(loaded, ways, global_batch, micro_batch or (), memory_bytes=limit)
            given = given if cluster is not None else solve.remembering(given, profile, output)
            dump(given, output)
            console.emit(dumps(given) if json else explain.headline(given, objective=objective))
            for line in explain.recomputed_lines(given, loaded):
                console.remark(line.strip())
            console.wrote(output, console.command("run", output))
            return
        problem = problems.make_problem(
            loaded,
            global_batch=global_batch,
            micro_batch=micro_batch or (),
            schedules=schedule or (),
            num_ranks=ranks,
            max_stages=max_stages,
            memory_bytes=units.parse_size(memory) if memory else 0,
            gap=gap,
            time_limit_s=time_limit,
            objective=objective,
            rate_per_s=rate,
            allow=units.names_in(allow),
            recompute=recompute,
            shard=shard,
            zero=zero,
            halo_depth=halo_depth,
            fix=fix or (),
            forbid=forbid or (),
            without=units.names_in(without),
            token_slices=units.parse_sum(token_slices, "--token-slices") if token_slices else (),
            calibration=not no_calibration,
            confidence=confidence,
        )
        if pareto is not None:
            front = search_progress.front(problem, solver, pareto)
            paths = [output, *(output.with_suffix(f".{n}{output.suffix}") for n in range(2, len(front.plans) + 1))]
            for path, found in zip(paths, front.plans, strict=True):
                dump(found if cluster is not None else solve.remembering(found, profile, path), path)
            console.emit_json(front.data()) if json else console.emit(front.render())
            for path in paths:
                console.wrote(path)
            return
        if measure_missing:
            completed = missing.plan_and_measure(
                problem, lambda asked: search_progress.solve(asked, solver), missing.measure_here(quick), console.remark
            )
            found, seen = completed.plan, completed.profile
            if completed.rounds:
                dump(missing.stored(loaded, completed.profile), profile)
                console.wrote(profile)
                console.remark(
                    f"its fingerprint is now {found.inputs.profile_fingerprint}: earlier plans are of another"
                )
        else:
            found, seen = search_progress.solve(problem, solver), loaded
        found = found if cluster is not None else solve.remembering(found, profile, output)
        dump(found, output)
        console.emit(dumps(found) if json else explain.headline(found, objective=objective))
        for line in explain.recomputed_lines(found, seen):
            console.remark(line.strip())
        on = ["--cluster", cluster] if cluster is not None else []
        explained = console.command("explain", output, "--profile", profile, *on)
        console.wrote(output, f"{explained}, or {console.command('run', output)}")
        if found.search.status == "stopped":
            raise typer.Exit(INTERRUPTED)
