"""``halopipe ways``: how to divide a transformer's training step over a cluster of GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halopipe.cli.options import Json

_FIXED = "What is given"


def ways(
    transformer: Annotated[
        str,
        typer.Argument(
            metavar="TRANSFORMER",
            help="A name, such as gpt3-175b, or sizes: hidden=4096,ffn=16384,heads=32,layers=32,vocab=51200,seq=2048.",
        ),
    ],
    on: Annotated[
        str, typer.Option("--on", metavar="NAME", help="a100-dgx, h100-dgx, p3.16xlarge, ...; or a cluster file.")
    ],
    gpus: Annotated[int, typer.Option(min=1, help="Devices.")],
    global_batch: Annotated[int, typer.Option(min=1, help="Samples a step.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write: the best way, as JSON.")] = None,
    tensor: Annotated[int, typer.Option(min=0, help="Ranks that share a block; 0: open.", rich_help_panel=_FIXED)] = 0,
    pipeline: Annotated[int, typer.Option(min=0, help="Stages; 0: open.", rich_help_panel=_FIXED)] = 0,
    interleave: Annotated[int, typer.Option(min=0, help="Chunks of a stage; 0: open.", rich_help_panel=_FIXED)] = 0,
    micro_batch: Annotated[
        int, typer.Option(min=0, help="Samples a micro-batch; 0: open.", rich_help_panel=_FIXED)
    ] = 0,
    recompute: Annotated[
        str, typer.Option(metavar="HOW", help="none, selective or full; empty: open.", rich_help_panel=_FIXED)
    ] = "",
    zero: Annotated[
        int, typer.Option(min=-1, max=3, help="What replicas divide, 0 to 3; -1: open.", rich_help_panel=_FIXED)
    ] = -1,
    gap: Annotated[float, typer.Option(min=0.0, help="Stop once the best is proved so close (0.01 = 1 %).")] = 0.0,
    time_limit: Annotated[float, typer.Option(min=0.0, help="Seconds to search at most.")] = 60.0,
    price_per_hour: Annotated[float, typer.Option(min=0.0, help="Dollars an hour of one device; 0: not told.")] = 0.0,
    layers: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Sailor's times of layers, in place of kernels, with a cluster file."),
    ] = None,
    json: Json = False,
) -> None:
    """Find how to divide a transformer's training step over a cluster of GPUs. Needs no devices."""
    from halopipe.planning import ways as found_ways
    from halopipe.terminal import console
    from halopipe.terminal.output_files import claimed

    with claimed([output] if output is not None else [], [layers]):
        sweep = found_ways.find(
            transformer,
            on,
            gpus,
            global_batch,
            tensor=tensor,
            pipeline=pipeline,
            interleave=interleave,
            micro_batch=micro_batch,
            recompute=recompute,
            zero=zero,
            gap=gap,
            time_limit_s=time_limit,
            price_per_hour=price_per_hour,
            layers=layers,
        )
        if output is not None:
            sweep.write(output)
        console.emit_json(sweep.data()) if json else console.emit(sweep.render())
        if output is not None:
            console.wrote(output)
