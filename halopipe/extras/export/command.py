"""``halopipe export``: a plan in another tool's format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halopipe.cli import completion
from halopipe.cli.options import ClusterOption, PlanPath, ProfileOption
from halopipe.terminal import console, units
from halopipe.terminal.output_files import claimed
from planner.ir.errors import UsageError
from planner.ir.files import write_text
from planner.ir.timeline import TimelineFile

if TYPE_CHECKING:
    from planner.ir.plan import Plan
    from planner.ir.profile import Profile

_TRACE = "chrome-trace"
_TORCH = "torch-pipelining"
_FORMATS = {
    _TRACE: Path("trace.json"),
    _TORCH: Path("pipeline.json"),
    "megatron": Path("megatron.args"),
    "torchtitan": Path("torchtitan.args"),
    "deepspeed": Path("deepspeed.json"),
}
"""Formats, and the file that each is written to unless another is named."""


def export(
    plan: PlanPath,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help=f"{', '.join(_FORMATS)}.",
            autocompletion=completion.offered(tuple(_FORMATS)),
        ),
    ],
    timeline: Annotated[
        Path | None,
        typer.Option(
            metavar="TIMELINE",
            help="A timeline file, as written by 'halopipe run'.",
        ),
    ] = None,
    profile: ProfileOption = None,
    cluster: ClusterOption = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help=f"File to write; {', '.join(map(str, _FORMATS.values()))} unless it is named."
        ),
    ] = None,
) -> None:
    """Write a plan for another tool.

    chrome-trace: the predicted step, and a run's measured one, for ui.perfetto.dev.

    torch-pipelining: for a chain of stages on one rank each. A JSON with the split
    points of torch.distributed.pipelining.pipeline and each stage's rank; beside it a
    CSV that _PipelineScheduleRuntime._load_csv reads. Needs the profile.

    megatron, torchtitan, deepspeed: of a file that 'halopipe ways -o' wrote, in
    place of a plan: command-line options or settings, and what they cannot say.
    """
    from halopipe.planning import plan_files

    units.require_known("export format", [to], tuple(_FORMATS))
    file = output or _FORMATS[to]
    if to == _TORCH and file.is_dir():
        file /= _FORMATS[to]
    files = [file, file.with_suffix(".csv")] if to == _TORCH else [file]
    with claimed(files, [plan, profile, timeline, cluster]):
        if to not in (_TRACE, _TORCH):
            _write_options(plan, to, file)
            return
        loaded = plan_files.load_plan(plan)
        source = plan_files.profile_of(loaded, plan, profile, cluster) if to == _TORCH or timeline is None else None
        if to == _TORCH:
            _write_torch(loaded, source, file)
        else:
            _write_trace(loaded, plan, source, timeline, file)


def _write_trace(plan: Plan, name: Path, profile: Profile | None, timeline: Path | None, output: Path) -> None:
    from halopipe.planning import plan_files, solve
    from planner.ir.chrome_trace import chrome_trace
    from planner.ir.codec import load

    if timeline is not None:
        file = load(timeline, TimelineFile)
        plan_files.require_timeline_of(plan, name, file, timeline)
        timelines = [t for t in (file.predicted, file.measured) if t.spans]
    elif profile is not None:
        timelines = [solve.predict_again(plan, profile)[1]]
    else:
        raise UsageError(
            "a trace needs a timeline",
            ["a plan file holds the order of actions, not their times"],
            ["--timeline TIMELINE (of a run)", "--profile PROFILE (predicted)"],
        )
    write_text(output, chrome_trace(timelines, plan_files.device_names(plan)))
    console.wrote(output, "open it at https://ui.perfetto.dev")


def _write_options(ways: Path, to: str, output: Path) -> None:
    from halopipe.extras.transformers.ways import read
    from planner.extras.export.launchers import LAUNCHERS

    options = LAUNCHERS[to](*read(ways))
    write_text(output, options.text)
    console.wrote(output)
    for text in options.missing:
        console.remark(f"no option of {to} says: {text}")


def _write_torch(plan: Plan, profile: Profile | None, output: Path) -> None:
    from planner.extras.export.torch_pipelining import torch_pipelining

    if profile is None:
        raise UsageError(
            "split points need the model's graph",
            ["a plan file holds the names of layers, not what they read and whose parameters they use"],
            ["--profile PROFILE (that the plan was made from)"],
        )
    schedule = output.with_suffix(".csv")
    if schedule == output:
        raise UsageError(f"{output} is the name of the schedule", ["the split points are JSON"], ["-o pipeline.json"])
    exported = torch_pipelining(plan, profile.graph, schedule.name)
    write_text(schedule, exported.schedule)
    write_text(output, exported.description)
    console.wrote(schedule)
    console.wrote(output)
    for text in exported.inside_modules:
        console.remark(f"{text}: inside a module, where torch cannot split")
