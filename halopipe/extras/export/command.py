"""``halopipe export``: a plan in another tool's format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halopipe.cli import completion
from halopipe.cli.options import ClusterOption, PlanPath, ProfileOption, with_options
from halopipe.terminal import console, units
from halopipe.terminal.output_files import claimed
from planner.ir.errors import UsageError
from planner.ir.files import write_text, write_texts
from planner.ir.options import option
from planner.ir.timeline import TimelineFile

if TYPE_CHECKING:
    from planner.ir.plan import Plan
    from planner.ir.profile import Profile

_TRACE = "chrome-trace"
_TORCH = "torch-pipelining"
_FORMATS = {
    _TRACE: Path("trace.json"),
    _TORCH: Path("pipeline.json"),
    "megatron": Path("megatron.sh"),
    "megatron-bridge": Path("megatron-bridge.sh"),
    "torchtitan": Path("torchtitan.sh"),
    "deepspeed": Path("deepspeed.json"),
    "accelerate": Path("accelerate.yaml"),
}
"""Formats, and the file that each is written to unless another is named; launchers are those after the first two."""
_BESIDE = {_TORCH: ".csv", "deepspeed": ".sh", "accelerate": ".sh"}
"""What is written beside that file, from where it is named: a schedule, or a script."""


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What some formats take.  The help of each field says what it is."""

    timeline: Path | None = option(None, "A timeline file, as written by 'halopipe run'.", "TIMELINE")
    version: str = option("", "Of a launcher; empty: the newest.", "VERSION")


@with_options
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
    profile: ProfileOption = None,
    cluster: ClusterOption = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help=f"File to write; {', '.join(map(str, _FORMATS.values()))} unless it is named."
        ),
    ] = None,
    *,
    options: ExportOptions,
) -> None:
    """Write a plan for another tool.

    chrome-trace: the predicted step, and a run's measured one, for ui.perfetto.dev.

    torch-pipelining: for a chain of stages on one rank each. A JSON with the split
    points of torch.distributed.pipelining.pipeline and each stage's rank; beside it a
    CSV that _PipelineScheduleRuntime._load_csv reads. Needs the profile.

    megatron, megatron-bridge, torchtitan, deepspeed, accelerate: of a file that
    'halopipe ways -o' wrote, in place of a plan: a script that starts the training
    on each host, with a configuration beside it for the last two. What the program
    cannot be told is refused; what it leaves to your own code is said.
    """
    from halopipe.planning import plan_files

    units.require_known("export format", [to], tuple(_FORMATS))
    file = output or _FORMATS[to]
    if to == _TORCH and file.is_dir():
        file /= _FORMATS[to]
    files = [file, *_beside(file, to)]
    with claimed(files, [plan, profile, options.timeline, cluster]):
        if to not in (_TRACE, _TORCH):
            _write_launch(plan, to, options.version, files)
            return
        if options.version:
            raise UsageError(f"--version is of launchers, and {to} is none", [], ["leave out --version"])
        loaded = plan_files.load_plan(plan)
        source = (
            plan_files.profile_of(loaded, plan, profile, cluster) if to == _TORCH or options.timeline is None else None
        )
        if to == _TORCH:
            _write_torch(loaded, source, file)
        else:
            _write_trace(loaded, plan, source, options.timeline, file)


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


def _beside(file: Path, to: str) -> list[Path]:
    if to not in _BESIDE:
        return []
    other = file.with_suffix(_BESIDE[to])
    if other == file:
        what = "the schedule" if to == _TORCH else "the script"
        raise UsageError(f"{file} is the name of {what}", [f"{to} has a file beside it"], [f"-o {_FORMATS[to]}"])
    return [other]


def _write_launch(ways: Path, to: str, version: str, files: list[Path]) -> None:
    from halopipe.extras.transformers.ways import read
    from planner.extras.export.launchers import launcher_of, written

    launched = written(launcher_of(to, version), read(ways), files[0].name)
    texts = dict(zip(files, (launched.text, launched.script), strict=False))
    write_texts(texts)
    for file in texts:
        console.wrote(file)
    for text in launched.missing:
        console.remark(f"left to you: {text}")


def _write_torch(plan: Plan, profile: Profile | None, output: Path) -> None:
    from planner.extras.export.torch_pipelining import torch_pipelining

    if profile is None:
        raise UsageError(
            "split points need the model's graph",
            ["a plan file holds the names of layers, not what they read and whose parameters they use"],
            ["--profile PROFILE (that the plan was made from)"],
        )
    [schedule] = _beside(output, _TORCH)
    exported = torch_pipelining(plan, profile.graph, schedule.name)
    write_text(schedule, exported.schedule)
    write_text(output, exported.description)
    console.wrote(schedule)
    console.wrote(output)
    for text in exported.inside_modules:
        console.remark(f"{text}: inside a module, where torch cannot split")
