"""``halopipe checkpoint``: what a folder of checkpoints holds, checked; and its weights for torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def checkpoint(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Of 'halopipe run --checkpoint FOLDER'.")],
    step: Annotated[int | None, typer.Option(metavar="N", help="The one of step N; the newest if not given.")] = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="State dict to write: torch.load, load_state_dict.")
    ] = None,
) -> None:
    """Check every byte of a checkpoint and say what it holds; with --to, write its weights as a plain state dict."""
    from halopipe.terminal import console
    from halopipe.terminal.output_files import claimed, made
    from halopipe.training.checkpointing import describe, write_state_dict
    from runtime.checkpoint import Checkpoint

    with claimed([made(to)]):
        found = Checkpoint.open(folder, step)
        found.verify()
        if to is not None:
            write_state_dict(found, to)
            console.wrote(to)
        else:
            console.emit(describe(found))
