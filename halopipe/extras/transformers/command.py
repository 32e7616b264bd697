"""``halopipe ways``: how to divide a transformer's training step over a cluster of GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halopipe.cli.options import JsonOption, with_options
from halopipe.extras.transformers.options import WaysOptions
from halopipe.terminal import console
from halopipe.terminal.output_files import claimed
from planner.extras.transformers.shape import MOST_DEGREE
from planner.ir.errors import UsageError
from planner.ir.problem import MOST_BATCH


@with_options
def ways(
    transformer: Annotated[
        str,
        typer.Argument(
            metavar="TRANSFORMER",
            help="A name, such as llama3-8b; a Hugging Face config.json; or sizes: hidden=4096,ffn=16384,heads=32,"
            "layers=32,vocab=51200,seq=2048. Sizes behind a name or file are in place of its own: llama3-8b,seq=4096.",
        ),
    ],
    on: Annotated[
        str, typer.Option("--on", metavar="NAME", help="a100-dgx, h100-dgx, p3.16xlarge, ...; or a cluster file.")
    ],
    gpus: Annotated[int, typer.Option(min=1, max=MOST_DEGREE, help="Devices.")],
    global_batch: Annotated[
        int | None, typer.Option(min=1, max=MOST_BATCH, help="Samples a step; with --fits one a device, if not given.")
    ] = None,
    *,
    fits: Annotated[
        bool, typer.Option("--fits", help="Say whether it fits, what the memory holds, and what would make it fit.")
    ] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write: the best way, as JSON.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Page to write: time against memory, the best way's step, what limits it.")
    ] = None,
    options: WaysOptions,
    json: JsonOption = False,
) -> None:
    """Find how to divide a transformer's training step over a cluster of GPUs. Needs no devices."""
    from halopipe.extras.transformers import fits as found_fits
    from halopipe.extras.transformers import page
    from halopipe.extras.transformers import ways as found_ways

    if report is not None:
        from halopipe.extras.figures.report import require_page

        require_page(report, "--report")
        if fits:
            raise UsageError("--report is of the best way, and --fits answers another question", [], ["leave one out"])
    with claimed([output, report], [on, options.layers]):
        find = found_fits.find if fits else found_ways.find
        answer = find(transformer, on, gpus, global_batch, options)
        if output is not None:
            answer.write(output)
        if report is not None and isinstance(answer, found_ways.WaysReport):
            page.write(answer, found_ways.space_of(options), report)
        console.show(answer, as_json=json)
        for written in (output, report):
            if written is not None:
                console.wrote(written)
