"""``halopipe profile``: measures a model on this machine, or on all hosts of a job of torchrun; ``--on``: models it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halopipe.cli import completion
from halopipe.cli.options import HostsOption, Json
from planner.ir.errors import UsageError

if TYPE_CHECKING:
    from planner.ir.profile import Profile

_MODEL, _MEASURED, _EFFORT, _ELSEWHERE = "The model", "What is measured", "How often", "Machines that are not here"
_NOT_ELSEWHERE = ("device", "allow", "ranks", "quick", "processes", "transport", "resume", "hosts")


def measured_systems() -> tuple[str, ...]:
    """What --on knows by name."""
    from planner.kernels import SYSTEMS

    return tuple(SYSTEMS)


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
    input_shape: Annotated[
        str,
        typer.Option(
            "--input", metavar="SHAPE", help="Shape of the example, samples first: 8,3,64,64.", rich_help_panel=_MODEL
        ),
    ] = "",
    arg: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Keyword argument of the factory; repeatable.", rich_help_panel=_MODEL),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            min=0,
            help="Workers to plan for, each a CPU core or a GPU; 0: two cores, or all GPUs.",
            rich_help_panel=_MEASURED,
        ),
    ] = 0,
    device: Annotated[
        str,
        typer.Option(
            metavar="WHAT",
            help="What to measure: cpu, cuda, or auto: GPUs if there are enough of them.",
            autocompletion=completion.named(lambda: ("auto", "cpu", "cuda")),
            rich_help_panel=_MEASURED,
        ),
    ] = "auto",
    sizes: Annotated[
        str,
        typer.Option(
            metavar="N,N,...",
            help="Micro-batch sizes to measure; if not given, as many as reading between them needs.",
            rich_help_panel=_MEASURED,
        ),
    ] = "",
    optimizer: Annotated[
        str,
        typer.Option(
            metavar="NAME[:KEY=N,...]",
            help="Of torch.optim, such as SGD:lr=0.1,momentum=0.9.",
            autocompletion=completion.optimizers,
            rich_help_panel=_MEASURED,
        ),
    ] = "SGD",
    dtype: Annotated[
        str,
        typer.Option(
            metavar="DTYPE",
            help="Of parameters and activations; if not given, float32, or that of the module in a file.",
            autocompletion=completion.dtypes,
            rich_help_panel=_MODEL,
        ),
    ] = "",
    autocast: Annotated[
        str,
        typer.Option(
            metavar="DTYPE",
            help="Mixed precision: bfloat16, with parameters in float32.",
            autocompletion=completion.named(lambda: ("bfloat16",)),
            rich_help_panel=_MODEL,
        ),
    ] = "",
    allow: Annotated[
        str,
        typer.Option(
            metavar="DIM,...",
            help="Dims that plans may cut: sample, spatial, channel, time; parts are then measured too.",
            autocompletion=completion.families,
            rich_help_panel=_MEASURED,
        ),
    ] = "sample",
    ranks: Annotated[
        int, typer.Option(min=0, help="Ranks that parts are measured for; 0: the workers.", rich_help_panel=_MEASURED)
    ] = 0,
    elementwise: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OP",
            help="Operator that treats each element by itself, such as lib::op; repeatable.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    local_loss: Annotated[
        str,
        typer.Option(
            metavar="N",
            help="Train the model as N blocks ('stage': a block a worker), each by a loss of its own: changes the "
            "optimisation; 0: as it is.",
            rich_help_panel=_MODEL,
        ),
    ] = "0",
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer sizes and runs, one process: faster, less exact.")
    ] = False,
    processes: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Fresh processes that measure the same; 0: 3, or 1 with --quick.",
            rich_help_panel=_EFFORT,
        ),
    ] = 0,
    transport: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What cores exchange by, as of run: 'shared' (the default) or 'gloo'.",
            autocompletion=completion.named(lambda: ("shared", "gloo")),
            rich_help_panel=_MEASURED,
        ),
    ] = "",
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on with what an interrupted profile of the same job measured.", rich_help_panel=_EFFORT
        ),
    ] = False,
    on: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="h100-dgx, a100-dgx or a cluster file: no device runs, kernel models tell the times.",
            autocompletion=completion.named(measured_systems),
            rich_help_panel=_ELSEWHERE,
        ),
    ] = "",
    tables: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="CSV",
            help="Kernels that you measured, for --on; see halopipe fit. Repeatable.",
            rich_help_panel=_ELSEWHERE,
        ),
    ] = None,
    size: Annotated[
        str,
        typer.Option(
            "--size",
            metavar="DIM=N,...",
            help="Sizes to plan for, of dims that the factory says vary (height=8192); measured on the example.",
        ),
    ] = "",
    hosts: HostsOption = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write.")] = Path("profile.json"),
    json: Json = False,
) -> None:
    """Measure what every layer, device and link costs -> profile.json; in a job of torchrun, on all of its hosts."""
    from halopipe.launch.job_environment import hosts_refused, job_rank
    from halopipe.planning import measure
    from halopipe.terminal import units
    from halopipe.terminal.output_files import claimed

    if hosts is not None:
        raise hosts_refused(hosts, f"profile {shlex.quote(model)} ...")
    with claimed([output], [model.rpartition(":")[0] or model]):
        shape = units.parse_integers(input_shape, "--input", "8,3,64,64")
        arguments = units.parse_arguments(arg or [])
        job = job_rank()
        num_blocks = _stages_elsewhere(local_loss, workers) if on else local_loss
        blocks = measure.local_blocks(num_blocks, device, workers if job is None else job.num_ranks)
        wanted = units.parse_integers(sizes, "--sizes", "1,2,4,8")
        source = measure.source_of(model, shape, arguments, dtype, autocast, elementwise or (), local_losses=blocks)
        if on or tables:
            refused = [f"--{name}" for name in _NOT_ELSEWHERE if _is_given(context, name)]
            modelled = measure.modelled(source, on, workers, optimizer, wanted, tables or (), refused=refused)
            _write(modelled, output, json)
            return
        asked = measure.Measuring(
            device, optimizer, wanted, tuple(units.names_in(allow)), ranks, quick, processes, transport
        )
        if job is not None:
            found = measure.measure_in_job(job, source, asked, resume=resume)
            if found is None:  # rank 0 writes for all
                return
        else:
            kept = measure.unfinished_file(output)
            found = measure.measure(source, asked, num_workers=workers, unfinished=kept, resume=resume)
        if size:
            from halopipe.planning import resized

            found = resized.at_sizes(found, resized.parse_sizes(size))
        _write(found, output, json)
        measure.unfinished_file(output).unlink(missing_ok=True)


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


def _write(found: Profile, output: Path, json: bool) -> None:
    from halopipe.planning import measure
    from halopipe.terminal import console
    from planner.ir.codec import dump, dumps

    dump(found, output)
    console.emit(dumps(found) if json else measure.summary(found))
    console.wrote(output, console.command("plan", output))
