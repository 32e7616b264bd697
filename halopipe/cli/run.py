"""``halopipe run``: executes a plan.

Its options are those of :mod:`halopipe.run_spec.options`, from the command line or from a job file.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halopipe.cli.options import HostsOption, JobPath, Json, given_options, job_of, with_options
from halopipe.run_spec.options import RunFiles, RunOptions
from halopipe.terminal import console
from halopipe.terminal.output_files import claimed, made
from planner.ir.errors import UsageError
from planner.ir.files import write_text

if TYPE_CHECKING:
    from halopipe.reports.run import RunReport


@with_options
def run(
    context: typer.Context,
    plan: JobPath,
    options: RunOptions,
    files: RunFiles,
    json: Json = False,
    details: Annotated[
        bool,
        typer.Option("--details", help="Print each stage too, predicted beside measured, and both steps as pictures."),
    ] = False,
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
    from halopipe.planning import calibration, plan_files
    from halopipe.reports import run as training
    from halopipe.run_spec import job_file
    from halopipe.training.metrics import folder_of
    from planner.ir.codec import dump

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
    trace = _path(files.trace)
    profile = _path(files.profile)
    events = folder_of(options.metrics)
    traces = _path(options.profile_folder)
    metrics = _path(options.metrics) if events is None else None
    replaced = [plan] if files.update else []
    read = [plan, profile, job_of(context), *job_file.factory_files(options)]
    with claimed([output, trace, made(metrics)], read, [events, traces], replaced):
        planned = plan_files.load_plan(plan)
        if hosts is not None:
            raise hosts_refused(hosts, f"run {shlex.quote(str(plan))}", planned.decision)
        source = plan_files.profile_of(planned, plan, profile)
        step = training.predicted_step(planned, source)
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
                console.emit_json(training.RunReport(planned, result, *step).data())
            return
        changes = () if replanned is None else replanned.changes
        is_other = replanned is not None and replanned.plan != planned
        if replanned is not None and is_other:
            planned = replanned.plan
            source = replanned.plan.inputs.as_seen(replanned.profile)
            step = training.predicted_step(planned, source)
        drift = None if source is None else calibration.drift(source, planned, options, result)
        report = training.RunReport(planned, result, *step, drift, changes, details)
        _write(report, output, trace)
        if files.update and is_other:
            console.remark(f"{plan} stays as it is: the job ended under another plan")
        elif files.update:
            dump(replace(planned, measured=result.measured(planned.prediction)), plan)
        if source is not None:
            for text in filter(None, (calibration.other_torch(source), calibration.changed_text(source, drift))):
                console.remark(text)
        update = calibration.calibrate(planned, plan, profile, options, result) if files.learn else None
        if update is not None and (files.update or update.path is not None):
            console.remark(update.text)
        console.show(report, as_json=json)
        changed = plan if files.update and not is_other else None
        taught = update.path if update is not None else None
        written = (output, trace, changed, taught, metrics, events, traces, _path(options.checkpoint))
        for path in filter(None, written):
            shown = _shown(path)
            is_reported = path == output and not is_other
            console.wrote(shown, console.command("report", _shown(plan), shown) if is_reported else "")


def _write(report: RunReport, output: Path, trace: Path | None) -> None:
    """The timelines, predicted and measured, and as a trace."""
    from halopipe.planning.plan_files import device_names
    from planner.ir.chrome_trace import chrome_trace
    from planner.ir.codec import dump

    file = report.result.timeline_file(report.plan, report.predicted, report.drift)
    dump(file, output)
    if trace is not None:
        timelines = [timeline for timeline in (file.predicted, file.measured) if timeline.spans]
        write_text(trace, chrome_trace(timelines, device_names(report.plan)))


def _shown(path: Path) -> Path:
    """As people call it: from the folder that they are in."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _path(text: str) -> Path | None:
    return Path(text) if text else None


def _write_job(path: Path, plan: Path, context: typer.Context) -> None:
    from halopipe.planning import plan_files
    from halopipe.run_spec import job_file

    if path.suffix not in job_file.SUFFIXES:
        raise UsageError(f"--write-job {path} is no name of a job file", [], [f"--write-job {path.stem}.yaml"])
    with claimed([path], [plan, job_of(context)]):
        plan_files.load_plan(plan)
        job_file.write(path, plan, given_options(context))
        console.wrote(path, console.command("run", path))
