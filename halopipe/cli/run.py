"""``halopipe run``: executes a plan.

Its options are those of :mod:`halopipe.run_spec.options`, from the command line or from a job file.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halopipe.cli.options import HostsOption, JobPath, JsonOption, given_options, job_of, with_options
from halopipe.run_spec.options import RunFiles, RunOptions
from halopipe.terminal import console
from halopipe.terminal.output_files import claimed, made
from planner.ir.errors import UsageError
from planner.ir.files import write_text

if TYPE_CHECKING:
    from halopipe.reports.run import RunReport
    from planner.ir.profile import Profile


@with_options
def run(
    context: typer.Context,
    plan: JobPath,
    options: RunOptions,
    files: RunFiles,
    json: JsonOption = False,
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
    from halopipe.reports import run as reporting
    from halopipe.run_spec import job_file

    if write_job is not None:
        _write_job(write_job, plan, context)
        return
    options = _with_traces(options, files)
    paths = _Paths.of(plan, options, files)
    read = [plan, paths.profile, job_of(context), *job_file.factory_files(options)]
    folders = [paths.events, paths.traces]
    with claimed([paths.output, paths.trace, made(paths.metrics)], read, folders, [plan] if files.update else []):
        planned = plan_files.load_plan(plan)
        if hosts is not None:
            raise hosts_refused(hosts, f"run {shlex.quote(str(plan))}", planned.decision)
        source = plan_files.profile_of(planned, plan, paths.profile)
        step = reporting.predicted_step(planned, source)
        replanned = None
        if options.replan:
            from halopipe.launch.replanning import replanner

            replanned = replanner(planned, source, options)
        result = reporting.train(planned, options, replanned)
        if result is None:  # in a job of torchrun, rank 0 reports for all
            return
        if result.end:
            console.remark(result.end)
            if json:
                console.emit_json(reporting.RunReport(planned, result, *step).data())
            return
        is_other = replanned is not None and replanned.plan != planned
        if replanned is not None and is_other:
            planned = replanned.plan
            source = planned.inputs.as_seen(replanned.profile)
            step = reporting.predicted_step(planned, source)
        drift = None if source is None else calibration.drift(source, planned, options, result)
        changes = () if replanned is None else replanned.changes
        report = reporting.RunReport(planned, result, *step, drift, changes, details)
        _write(report, paths.output, paths.trace)
        updated = _updated(plan, report, is_other) if files.update else None
        taught = _taught(plan, source, report, options, files)
        console.show(report, as_json=json)
        for path in filter(None, (paths.output, paths.trace, updated, taught, *paths.others)):
            shown = _shown(path)
            is_reported = path == paths.output and not is_other
            console.wrote(shown, console.command("report", _shown(plan), shown) if is_reported else "")


@dataclass(frozen=True, slots=True)
class _Paths:
    """What a run reads and writes beside its plan; None: nothing.

    Attributes:
        metrics: one file; ``events``: a folder of them.
        traces: a folder of torch.profiler's.
        checkpoint: a folder, too.
    """

    profile: Path | None
    output: Path
    trace: Path | None
    metrics: Path | None
    events: Path | None
    traces: Path | None
    checkpoint: Path | None

    @classmethod
    def of(cls, plan: Path, options: RunOptions, files: RunFiles) -> _Paths:
        """Those of the options; the timeline's name follows from the plan's."""
        from halopipe.planning.plan_files import timeline_of
        from halopipe.training.metrics import folder_of

        events = folder_of(options.metrics)
        return cls(
            profile=_path(files.profile),
            output=_path(files.output) or timeline_of(plan),
            trace=_path(files.trace),
            metrics=_path(options.metrics) if events is None else None,
            events=events,
            traces=_path(options.profile_folder),
            checkpoint=_path(options.checkpoint),
        )

    @property
    def others(self) -> tuple[Path | None, ...]:
        """What was written while the job ran."""
        return self.metrics, self.events, self.traces, self.checkpoint


def _with_traces(options: RunOptions, files: RunFiles) -> RunOptions:
    """The options with a folder for traces, where some are asked for."""
    if not options.profile_steps:
        return options
    if files.update:
        raise UsageError(
            "--update with --profile-steps would write steps into the plan that are slower than others",
            [f"{options.profile_steps} are traced by torch.profiler"],
            ["leave one of them out, and run twice"],
        )
    return replace(options, profile_folder=options.profile_folder or str(Path("torch-traces").absolute()))


def _updated(plan: Path, report: RunReport, is_other: bool) -> Path | None:
    """The plan's file with what was measured; None where the job ended under another plan."""
    from planner.ir.codec import dump

    if is_other:
        console.remark(f"{plan} stays as it is: the job ended under another plan")
        return None
    dump(replace(report.plan, measured=report.result.measured(report.plan.prediction)), plan)
    return plan


def _taught(plan: Path, source: Profile | None, report: RunReport, options: RunOptions, files: RunFiles) -> Path | None:
    """The profile's file where it has learnt from the run; and says what the profile does not fit any more."""
    from halopipe.planning import calibration

    if source is not None:
        for text in filter(None, (calibration.other_torch(source), calibration.changed_text(source, report.drift))):
            console.remark(text)
    if not files.learn:
        return None
    update = calibration.calibrate(report.plan, plan, _path(files.profile), options, report.result)
    if files.update or update.path is not None:
        console.remark(update.text)
    return update.path


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
