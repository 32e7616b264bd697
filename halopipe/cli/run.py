"""``halopipe run``: executes a plan.

Its options are those of :class:`halopipe.run_spec.options.RunOptions`, and what to do with the result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halopipe.cli.options import HostsOption, Json, PlanPath, ProfileOption, with_run_options
from halopipe.run_spec.options import RunOptions


@with_run_options
def run(
    plan: PlanPath,
    options: RunOptions,
    update: Annotated[
        bool, typer.Option("--update", help="Write what was measured into the plan file, and teach the profile.")
    ] = False,
    profile: ProfileOption = None,
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
    from halopipe.terminal import console
    from halopipe.terminal.output_files import claimed, made
    from planner.export.chrome_trace import chrome_trace
    from planner.ir.codec import dump
    from planner.ir.files import write_text

    metrics, checkpoint = (Path(text) if text else None for text in (options.metrics, options.checkpoint))
    with claimed([output, trace, made(metrics)], [plan, profile], folders=[checkpoint]):
        planned = solve.load_plan(plan)
        if hosts is not None:
            raise hosts_refused(hosts, f"run {plan}", planned.decision)
        predicted = training.predicted_timeline(planned)
        source = solve.profile_of(planned, plan, profile)
        if source is not None:
            predicted = solve.predict_again(planned, source)[1]
        result = training.train(planned, options)
        if result is None:  # in a job of torchrun, rank 0 reports for all
            return
        file = result.timeline_file(predicted)
        dump(file, output)
        if trace is not None:
            timelines = [timeline for timeline in (file.predicted, file.measured) if timeline.spans]
            write_text(trace, chrome_trace(timelines, solve.device_names(planned)))
        lesson = calibration.Lesson("")
        if update:
            dump(replace(planned, measured=result.measured(planned.prediction)), plan)
            lesson = calibration.teach(planned, plan, profile, options, result)
            console.remark(lesson.text)
        console.emit_json(training.data(planned, result)) if json else console.emit(
            training.report(planned, result, predicted)
        )
        written = (output, trace, plan if update else None, lesson.path, metrics, checkpoint)
        for path in filter(None, written):
            console.wrote(_shown(path))


def _shown(path: Path) -> Path:
    """From here, where it lies below."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
