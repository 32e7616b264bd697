"""``halopipe profile``: measures a model on this machine, or on all hosts of a job of torchrun; ``--on``: models it.

Its options are those of :mod:`halopipe.planning.options`.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halopipe.cli.options import FileOption, HostsOption, JsonOption, explicit, with_options
from halopipe.extra import FaceExtra
from halopipe.planning.options import MEASURING, ProfileOptions
from halopipe.run_spec.schema import asked_in, flag
from halopipe.terminal import console, units
from halopipe.terminal.output_files import claimed
from planner.ir.errors import UsageError
from planner.ir.extras import extras, required
from planner.ir.scratch import ended_by_exception

if TYPE_CHECKING:
    from halopipe.launch.job_environment import JobRank
    from planner.ir.profile import ModelSource, Profile

_NOT_ELSEWHERE = {
    **{name: flag(asked_in(ProfileOptions)[name]) for name in (*MEASURING, "resume")},
    "hosts": "--hosts",
}
"""Options that are of no use where nothing is measured, by name."""


@with_options
def profile(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A factory, 'pkg.mod:factory' or 'path/file.py:factory'; or a module in a file: model.pt, model.pt2.",
        ),
    ],
    options: ProfileOptions,
    hosts: HostsOption = None,
    output: FileOption = Path("profile.json"),
    json: JsonOption = False,
) -> None:
    """Measure what every layer, device and link costs -> profile.json; in a job of torchrun, on all of its hosts."""
    from halopipe.launch.job_environment import hosts_refused, job_rank
    from halopipe.planning import measure

    if hosts is not None:
        raise hosts_refused(hosts, f"profile {shlex.quote(model)} ...")
    read = [model.rpartition(":")[0] or model, options.on or None, *options.tables]
    with ended_by_exception(), claimed([output], read):
        job = job_rank()
        source = _source(model, options, job)
        if options.on or options.tables:
            refused = [_NOT_ELSEWHERE[name] for name in explicit(context, _NOT_ELSEWHERE)]
            profiles = (extra.profile_on(source, options, refused, quiet=False) for extra in extras(FaceExtra))
            _write(required(profiles, "halopipe", "profiles of machines that are not here"), output, json)
            return
        if options.size:
            from halopipe.planning import resized

            resized.require_sizes(source, options.size)
        kept = measure.unfinished_file(output)
        measured = (
            measure.measure(source, options, unfinished=kept)
            if job is None
            else measure.measure_in_job(job, source, options)
        )
        if measured is None:  # rank 0 writes for all
            return
        if options.size:
            measured = resized.at_sizes(measured, resized.parse_sizes(options.size))
        _write(measured, output, json)
        kept.unlink(missing_ok=True)


def _source(model: str, options: ProfileOptions, job: JobRank | None) -> ModelSource:
    """Where workers find the model."""
    from halopipe.planning import measure

    workers = options.workers if job is None else job.num_ranks
    num_blocks = _stages_elsewhere(options.local_loss, options.workers) if options.on else options.local_loss
    return measure.source_of(
        model,
        options.input_shape,
        units.parse_arguments(options.arg),
        options.dtype,
        options.autocast,
        options.elementwise,
        local_losses=measure.local_blocks(num_blocks, options.device, workers),
    )


def _stages_elsewhere(local_loss: str, workers: int) -> str:
    """``--local-loss`` as a number: how many workers this machine has says nothing of another one."""
    if local_loss != "stage":
        return local_loss
    if not workers:
        raise UsageError("--local-loss stage: as many as which workers?", [], ["give --workers N, or --local-loss N"])
    return str(workers)


def _write(profile: Profile, output: Path, json: bool) -> None:
    from halopipe.reports.measured import summary
    from planner.ir.codec import dump, dumps

    dump(profile, output)
    console.emit(dumps(profile) if json else summary(profile))
    console.wrote(output, console.command("plan", output))
