"""``halopipe profile``: measures a model on this machine, or on all hosts of a job of torchrun; ``--on``: models it.

Its options are those of :mod:`halopipe.planning.options`.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halopipe.cli import completion
from halopipe.cli.options import HostsOption, Json, with_options
from halopipe.planning.options import ProfileOptions
from planner.ir.errors import UsageError

if TYPE_CHECKING:
    from halopipe.launch.job_environment import JobRank
    from planner.ir.profile import ModelSource, Profile

_NOT_ELSEWHERE = ("device", "allow", "ranks", "quick", "processes", "transport", "resume", "hosts")


@with_options
def profile(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A factory, 'pkg.mod:factory' or 'path/file.py:factory'; or a module in a file: model.pt, model.pt2.",
            autocompletion=completion.models,
        ),
    ],
    options: ProfileOptions,
    hosts: HostsOption = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write.")] = Path("profile.json"),
    json: Json = False,
) -> None:
    """Measure what every layer, device and link costs -> profile.json; in a job of torchrun, on all of its hosts."""
    from halopipe.launch.job_environment import hosts_refused, job_rank
    from halopipe.planning import measure
    from halopipe.terminal.output_files import claimed

    if hosts is not None:
        raise hosts_refused(hosts, f"profile {shlex.quote(model)} ...")
    with claimed([output], [model.rpartition(":")[0] or model]):
        job = job_rank()
        source = _source(model, options, job)
        if options.on or options.tables:
            refused = [f"--{name}" for name in _NOT_ELSEWHERE if _is_given(context, name)]
            _write(_modelled(source, options, refused), output, json)
            return
        if options.size:
            from halopipe.planning import resized

            resized.require_sizes(source, options.size)
        measured = _measured(source, options, job, output)
        if measured is None:  # rank 0 writes for all
            return
        if options.size:
            measured = resized.at_sizes(measured, resized.parse_sizes(options.size))
        _write(measured, output, json)
        measure.unfinished_file(output).unlink(missing_ok=True)


def _source(model: str, options: ProfileOptions, job: JobRank | None) -> ModelSource:
    """Where workers find the model."""
    from halopipe.planning import measure
    from halopipe.terminal import units

    shape = units.parse_integers(options.input_shape, "--input", "8,3,64,64")
    arguments = units.parse_arguments(options.arg)
    workers = options.workers if job is None else job.num_ranks
    num_blocks = _stages_elsewhere(options.local_loss, options.workers) if options.on else options.local_loss
    blocks = measure.local_blocks(num_blocks, options.device, workers)
    return measure.source_of(
        model, shape, arguments, options.dtype, options.autocast, options.elementwise, local_losses=blocks
    )


def _modelled(source: ModelSource, options: ProfileOptions, refused: list[str]) -> Profile:
    """The profile on machines that are not here."""
    from halopipe.planning import measure

    workers, sizes = options.workers, _sizes(options)
    return measure.modelled(source, options.on, workers, options.optimizer, sizes, options.tables, refused=refused)


def _measured(source: ModelSource, options: ProfileOptions, job: JobRank | None, output: Path) -> Profile | None:
    """The profile on this machine, or on all hosts of the job; None on its ranks but the first."""
    from halopipe.planning import measure
    from halopipe.terminal import units

    asked = measure.MeasuringOptions(
        options.device,
        options.optimizer,
        _sizes(options),
        tuple(units.names_in(options.allow)),
        options.ranks,
        options.quick,
        options.processes,
        options.transport,
    )
    if job is not None:
        return measure.measure_in_job(job, source, asked, resume=options.resume)
    kept = measure.unfinished_file(output)
    return measure.measure(source, asked, num_workers=options.workers, unfinished=kept, resume=options.resume)


def _sizes(options: ProfileOptions) -> tuple[int, ...]:
    from halopipe.terminal import units

    return units.parse_integers(options.sizes, "--sizes", "1,2,4,8")


def _stages_elsewhere(local_loss: str, workers: int) -> str:
    """``--local-loss`` as a number: how many workers this machine has says nothing of another one."""
    if local_loss != "stage":
        return local_loss
    if not workers:
        raise UsageError("--local-loss stage: as many as which workers?", [], ["give --workers N, or --local-loss N"])
    return str(workers)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _write(profile: Profile, output: Path, json: bool) -> None:
    from halopipe.planning import measure
    from halopipe.terminal import console
    from planner.ir.codec import dump, dumps

    dump(profile, output)
    console.emit(dumps(profile) if json else measure.summary(profile))
    console.wrote(output, console.command("plan", output))
