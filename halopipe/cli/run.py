"""``halopipe run``: executes a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halopipe.cli.options import HostsOption, Json, PlanPath, ProfileOption, a_number


def run(
    plan: PlanPath,
    steps: Annotated[int, typer.Option(min=1, help="Steps to train, those before a checkpoint included.")] = 20,
    data: Annotated[
        str,
        typer.Option(
            metavar="FACTORY",
            help="Data, as 'pkg.mod:factory' that gives batches, a Dataset or a DataLoader; "
            "the model's own example if not given.",
        ),
    ] = "",
    data_from: Annotated[
        str,
        typer.Option(
            metavar="WHO",
            help="Who reads it: 'each' rank all, the 'first' for all, or they 'share' a Dataset's samples.",
        ),
    ] = "each",
    optimizer: Annotated[
        str, typer.Option(metavar="TEXT", help="Instead of the plan's: 'AdamW:lr=0.001', or a factory.")
    ] = "",
    scheduler: Annotated[
        str,
        typer.Option(metavar="TEXT", help="Learning rates: 'CosineAnnealingLR:T_max=100', or a factory."),
    ] = "",
    clip_norm: Annotated[
        float, typer.Option(metavar="X", help="Largest norm of all gradients together; 0: they are not clipped.")
    ] = 0.0,
    accumulate: Annotated[int, typer.Option(min=1, metavar="K", help="Steps whose gradients make up one update.")] = 1,
    compiler: Annotated[
        str,
        typer.Option("--compile", metavar="BACKEND", help="Compile the stages by torch.compile, such as 'inductor'."),
    ] = "",
    device: Annotated[
        str, typer.Option(metavar="WHAT", help="cpu: compute there, whatever devices the plan names.")
    ] = "",
    eval_data: Annotated[
        str, typer.Option(metavar="FACTORY", help="Data to evaluate on, as --data; at the end at least.")
    ] = "",
    eval_every: Annotated[int, typer.Option(min=0, metavar="N", help="Evaluate every N steps too.")] = 0,
    eval_batches: Annotated[
        int, typer.Option(min=0, metavar="N", help="Evaluate on N batches; 0: on all of the data.")
    ] = 0,
    metrics: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Gets a line of JSON a step: loss, rate, gradient norm, ...")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder of checkpoints, which all hosts share.")
    ] = None,
    checkpoint_every: Annotated[
        int, typer.Option(min=0, metavar="N", help="Save every N steps; 0: at the end alone.")
    ] = 0,
    keep: Annotated[int, typer.Option(min=0, metavar="K", help="Keep the newest K checkpoints; 0: all.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, also of another plan.")
    ] = False,
    check_numerics: Annotated[
        bool, typer.Option("--check-numerics", help="Compare losses and gradients of the first steps with one device.")
    ] = False,
    check_first_step: Annotated[
        bool,
        typer.Option(
            "--check-first-step/--no-check-first-step",
            help="Compare the first step with one device, where that fits into memory, and end if it differs.",
        ),
    ] = True,
    update: Annotated[
        bool, typer.Option("--update", help="Write what was measured into the plan file, and teach the profile.")
    ] = False,
    profile: ProfileOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Of parameters and data.")] = 0,
    dtype: Annotated[str, typer.Option(help="Instead of the plan's, such as float64.")] = "",
    deadline: Annotated[float, typer.Option(min=1.0, callback=a_number, help="Seconds that a wait may last.")] = 120.0,
    memory_limit: Annotated[
        str, typer.Option(metavar="SIZE", help="Most memory of a rank's tensors, such as 2GiB; else H506.")
    ] = "",
    hosts: HostsOption = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Timeline file to write.")] = Path("timeline.json"),
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Trace for ui.perfetto.dev to write too.")] = None,
    json: Json = False,
) -> None:
    """Train by the plan -> timeline.json; starts workers on this host, or joins its torchrun job.

    A plan of forward passes alone (--schedule forward) is evaluated: its steps are timed, nothing is trained.
    """
    from dataclasses import replace

    from halopipe.launch.job_environment import hosts_refused
    from halopipe.planning import calibration, solve
    from halopipe.reports import run as training
    from halopipe.run_spec.options import RunOptions
    from halopipe.terminal import console, units
    from halopipe.terminal.output_files import claimed, made
    from planner.export.chrome_trace import chrome_trace
    from planner.ir.codec import dump
    from planner.ir.files import write_text

    with claimed([output, trace, made(metrics)], [plan, profile], folders=[checkpoint]):
        found = solve.load_plan(plan)
        if hosts is not None:
            raise hosts_refused(hosts, f"run {plan}", found.decision)
        predicted = training.predicted_timeline(found)
        source = solve.profile_of(found, plan, profile)
        if source is not None:
            predicted = solve.predict_again(found, source)[1]
        options = RunOptions(
            steps=steps,
            seed=seed,
            data=data,
            check_numerics=check_numerics,
            dtype=dtype,
            deadline_s=deadline,
            data_from=data_from,
            optimizer=optimizer,
            scheduler=scheduler,
            clip_norm=clip_norm,
            accumulate=accumulate,
            compiler=compiler,
            eval_data=eval_data,
            eval_every=eval_every,
            eval_batches=eval_batches,
            metrics=str(metrics.absolute()) if metrics is not None else "",
            checkpoint=str(checkpoint.absolute()) if checkpoint is not None else "",
            checkpoint_every=checkpoint_every,
            keep=keep,
            resume=resume,
            memory_limit_bytes=units.parse_size(memory_limit) if memory_limit else 0,
            device=device,
            check_first_step=check_first_step,
        )
        result = training.train(found, options)
        if result is None:  # in a job of torchrun, rank 0 reports for all
            return
        file = result.timeline_file(predicted)
        dump(file, output)
        if trace is not None:
            timelines = [timeline for timeline in (file.predicted, file.measured) if timeline.spans]
            write_text(trace, chrome_trace(timelines, solve.device_names(found)))
        lesson = calibration.Lesson("")
        if update:
            dump(replace(found, measured=result.measured(found.prediction)), plan)
            lesson = calibration.teach(found, plan, profile, options, result)
            console.remark(lesson.text)
        console.emit_json(training.data(found, result)) if json else console.emit(
            training.report(found, result, predicted)
        )
        written = (output, trace, plan if update else None, lesson.path, metrics, checkpoint)
        for path in filter(None, written):
            console.wrote(path)
