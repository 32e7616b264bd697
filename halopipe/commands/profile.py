"""``halopipe profile``: measures a model on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halopipe.commands.options import Json


def profile(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A factory: 'pkg.mod:factory' or 'path/file.py:factory'.")
    ],
    input_shape: Annotated[
        str, typer.Option("--input", metavar="SHAPE", help="Shape of the example, samples first: 8,3,64,64.")
    ] = "",
    arg: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Keyword argument of the factory; repeatable.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Workers to plan for; a worker is one CPU core.")] = 2,
    sizes: Annotated[
        str, typer.Option(metavar="N,N,...", help="Micro-batch sizes to measure; divisors of the batch if not given.")
    ] = "",
    optimizer: Annotated[
        str, typer.Option(metavar="NAME[:KEY=N,...]", help="Of torch.optim, such as SGD:lr=0.1,momentum=0.9.")
    ] = "SGD",
    dtype: Annotated[str, typer.Option(help="Of parameters and activations.")] = "float32",
    autocast: Annotated[
        str, typer.Option(metavar="DTYPE", help="Mixed precision: bfloat16, with parameters in float32.")
    ] = "",
    allow: Annotated[
        str,
        typer.Option(
            metavar="DIM,...",
            help="Dims that plans may cut layers along: sample, spatial, channel; parts are then measured too.",
        ),
    ] = "sample",
    ranks: Annotated[int, typer.Option(min=0, help="Ranks that parts are measured for; 0: the workers.")] = 0,
    elementwise: Annotated[
        list[str] | None,
        typer.Option(metavar="OP", help="Operator that treats each element by itself, such as lib::op; repeatable."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repetitions: faster, less exact.")] = False,
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write.")] = Path("profile.json"),
    json: Json = False,
) -> None:
    """Measure what every layer, device and link costs -> profile.json."""
    from halopipe import console, measuring, units
    from planner.ir.codec import dump, dumps

    shape = units.parse_integers(input_shape, "--input", "8,3,64,64")
    found = measuring.measure(
        measuring.source_of(model, shape, units.parse_arguments(arg or []), dtype, autocast, elementwise or ()),
        num_workers=workers,
        optimizer=optimizer,
        sizes=units.parse_integers(sizes, "--sizes", "1,2,4,8"),
        allow=[part.strip() for part in allow.split(",") if part.strip()],
        num_ranks=ranks,
        quick=quick,
    )
    dump(found, output)
    console.emit(dumps(found) if json else measuring.summary(found))
    console.wrote(output, f"halopipe plan {output}")
