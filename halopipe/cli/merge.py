"""``halopipe merge``: profiles of one model from several hosts, as one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halopipe.cli.options import FileOption, JsonOption
from halopipe.terminal import console
from halopipe.terminal.output_files import claimed, require_once


def merge(
    profiles: Annotated[
        list[Path],
        typer.Argument(
            metavar="PROFILE...",
            help="Profiles of one model, each from a host of its own.",
        ),
    ],
    output: FileOption = Path("merged.json"),
    json: JsonOption = False,
) -> None:
    """Merge profiles of one model, taken on several hosts, into one, whose cluster is all of them."""
    from halopipe.planning import measure
    from halopipe.reports.measured import summary
    from planner.ir.codec import dump, dumps

    require_once(profiles, "profile")
    with claimed([output], profiles):
        merged = measure.merged(profiles)
        dump(merged, output)
        console.emit(dumps(merged) if json else summary(merged))
        if merged.cluster.unlinked() is not None:
            console.remark("no profile says what messages between hosts cost: plan with --cluster FILE")
        console.wrote(output, console.command("plan", output))
