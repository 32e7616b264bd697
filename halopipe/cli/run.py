"""``halopipe run``: executes a plan.

Its options are those of :mod:`halopipe.run_spec.options`, from the command line or from a job file.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from halopipe.cli.options import HostsOption, JobPath, Json, given_options, job_of, with_options
from halopipe.run_spec.options import RunFiles, RunOptions
from planner.ir.errors import UsageError


@with_options
def run(
    context: typer.Context,
    plan: JobPath,
    options: RunOptions,
    files: RunFiles,
    json: Json = False,
    write_job: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write plan and options as a job file (.yaml), and end.", rich_help_panel="Job file"
        ),
    ] = None,
    hosts: HostsOption = None,
) -> None:
    """Train by the plan -> timeline.json; starts workers on this host, or joins its torchrun job.

    A plan of forward passes alone (--schedule forward) is evaluated: its steps are timed, nothing is trained.
    """
    from halopipe.launch.job_environment import hosts_refused
    from halopipe.planning import calibration, plan_files, solve
    from halopipe.reports import run as training
    from halopipe.terminal import console
    from halopipe.terminal.output_files import claimed, made
    from halopipe.training.metrics import folder_of
    from planner.ir.codec import dump
    from planner.ir.files import write_text

    if write_job is not None:
        _write_job(write_job, plan, context)
        return
    if options.profile_steps and files.update:
        raise UsageError(
            "--update with --profile-steps would write steps into the plan that are slower than others",
            [f"{options.profile_steps} are traced by torch.profiler"],
            ["leave one of them out, and run twice"],
        )
    if options.profile_steps and not options.profile_folder:
        options = replace(options, profile_folder=str(Path("torch-traces").absolute()))
    output = Path(files.output) if files.output else plan_files.timeline_of(plan)
    trace, profile, checkpoint, traces = (
        Path(text) if text else None
        for text in (files.trace, files.profile, options.checkpoint, options.profile_folder)
    )
    events = folder_of(options.metrics)
    metrics = Path(options.metrics) if options.metrics and events is None else None
    replaced = [plan] if files.update else []
    with claimed([output, trace, made(metrics)], [plan, profile, job_of(context)], [events, traces], replaced):
        planned = plan_files.load_plan(plan)
        if hosts is not None:
            raise hosts_refused(hosts, f"run {shlex.quote(str(plan))}", planned.decision)
        predicted = training.predicted_timeline(planned)
        source = plan_files.profile_of(planned, plan, profile)
        if source is not None:
            predicted = solve.predict_again(planned, source)[1]
        replanned = None
        if options.replan:
            from halopipe.launch.replanning import replanner

            replanned = replanner(planned, source, options)
        result = training.train(planned, options, replanned)
        if result is None:  # in a job of torchrun, rank 0 reports for all
            return
        if result.end:
            console.remark(result.end)
            if json:
                console.emit_json(training.data(planned, result))
            return
        is_other = replanned is not None and replanned.plan != planned
        if replanned is not None and is_other:
            planned, source = replanned.plan, replanned.plan.inputs.as_seen(replanned.profile)
            predicted = solve.predict_again(planned, source)[1]
        drift = None if source is None else calibration.drift(source, planned, options, result)
        file = result.timeline_file(planned, predicted, drift)
        dump(file, output)
        if trace is not None:
            from planner.export.chrome_trace import chrome_trace

            timelines = [timeline for timeline in (file.predicted, file.measured) if timeline.spans]
            write_text(trace, chrome_trace(timelines, plan_files.device_names(planned)))
        if files.update and is_other:
            console.remark(f"{plan} stays as it is: the job ended under another plan")
        elif files.update:
            dump(replace(planned, measured=result.measured(planned.prediction)), plan)
        if source is not None:
            for text in filter(None, (calibration.other_torch(source), calibration.changed_text(source, drift))):
                console.remark(text)
        update = calibration.CalibrationUpdate("")
        if files.learn:
            update = calibration.calibrate(planned, plan, profile, options, result)
            if files.update or update.path is not None:
                console.remark(update.text)
        changes = () if replanned is None else replanned.changes
        console.emit_json(training.data(planned, result, drift, changes)) if json else console.emit(
            training.report(planned, result, predicted, drift, changes)
        )
        changed = plan if files.update and not is_other else None
        written = (output, trace, changed, update.path, metrics, events, traces, checkpoint)
        for path in filter(None, written):
            console.wrote(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _write_job(path: Path, plan: Path, context: typer.Context) -> None:
    from halopipe.planning import plan_files
    from halopipe.run_spec import job_file
    from halopipe.terminal import console
    from halopipe.terminal.output_files import claimed

    if path.suffix not in job_file.SUFFIXES:
        raise UsageError(f"--write-job {path} is no name of a job file", [], [f"--write-job {path.stem}.yaml"])
    with claimed([path], [plan, job_of(context)]):
        plan_files.load_plan(plan)
        job_file.write(path, plan, given_options(context))
        console.wrote(path, console.command("run", path))
