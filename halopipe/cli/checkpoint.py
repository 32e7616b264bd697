"""``halopipe checkpoint``: what a folder of checkpoints holds, checked; weights out of it for torch, and into it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halopipe.cli import completion
from halopipe.cli.options import JsonOption
from halopipe.run_spec.schema import MOST_WHOLE
from halopipe.terminal import console
from halopipe.terminal.output_files import claimed, made
from planner.ir.errors import UsageError

LIST, VERIFY, EXPORT, IMPORT = VERBS = ("list", "verify", "export", "import")


def checkpoint(
    what: Annotated[
        str,
        typer.Argument(
            metavar="VERB|FOLDER",
            help="list, verify, export or import; or the folder of 'halopipe run --checkpoint FOLDER', to look at one.",
            autocompletion=completion.offered(VERBS),
        ),
    ],
    folder: Annotated[Path | None, typer.Argument(metavar="FOLDER", help="The folder, behind a verb.")] = None,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, max=MOST_WHOLE, help="The one of step N; the newest if not given."),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            metavar="FILE",
            help="State dict to write, for torch.load; NAME.dcp: a folder, for torch.distributed.checkpoint.load.",
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="import: a state dict, as torch.save(module.state_dict(), FILE)."),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="PLAN", help="import: of the model that it is the weights of."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check every byte of a checkpoint and say what it holds; with --to, write its weights as a plain state dict.

    list: the checkpoints there, with size, age and plan. verify: every byte of all of them, or of --step. export --to
    FILE: its weights. import --from FILE --plan PLAN: a checkpoint of plain weights, for run --resume to begin from.
    """
    if folder is None:
        verb = "" if to is None else EXPORT
        folder = Path(what)
        if what in VERBS and not folder.exists():
            raise UsageError(f"checkpoint {what} needs a folder", [], [f"halopipe checkpoint {what} FOLDER"])
    elif what in VERBS:
        verb = what
    else:
        verbs = ", ".join(VERBS)
        raise UsageError(f"halopipe checkpoint knows no {what!r}", [f"known: {verbs}"], ["halopipe checkpoint FOLDER"])
    _require_fitting(verb, {"--step": step, "--to": to, "--from": source, "--plan": plan, "--json": json or None})
    if verb == EXPORT or not verb:
        _show(folder, step, to)
    elif verb == IMPORT:
        _import(folder, source or Path(), plan or Path())
    else:
        _look(folder, step, json=json, every_byte=verb == VERIFY)


def _require_fitting(verb: str, values: dict[str, object]) -> None:
    """Raises :class:`UsageError` for an option that the verb does not have, or lacks."""
    may = {"": ["--step"], LIST: ["--json"], VERIFY: ["--step", "--json"], EXPORT: ["--step"], IMPORT: []}[verb]
    must = {EXPORT: ["--to"], IMPORT: ["--from", "--plan"]}.get(verb, [])
    name = f"checkpoint {verb}".strip()
    for option, value in values.items():
        if value is not None and option not in (*may, *must):
            raise UsageError(f"{name} takes no {option}", [f"it takes {', '.join((*must, *may)) or 'a folder alone'}"])
        if value is None and option in must:
            raise UsageError(f"{name} needs {option}", [], [f"halopipe {name} FOLDER {' ... '.join(must)} ..."])


def _show(folder: Path, step: int | None, to: Path | None) -> None:
    from halopipe.training.checkpoint_folders import describe, write_state_dict
    from runtime.checkpoint import Checkpoint

    with claimed([made(to)]):
        opened = Checkpoint.open(folder, step)
        opened.verify()
        if to is not None:
            write_state_dict(opened, to)
            console.wrote(to)
        else:
            console.emit(describe(opened))


def _look(folder: Path, step: int | None, *, json: bool, every_byte: bool) -> None:
    from halopipe.training.checkpoint_folders import entries, listing, require_sound
    from planner.ir.codec import plain

    rows = entries(folder, every_byte=every_byte, step=step)
    console.emit_json(plain(rows)) if json else console.emit(listing(rows, every_byte=every_byte))
    if every_byte:
        require_sound(folder, rows)


def _import(folder: Path, source: Path, plan: Path) -> None:
    from halopipe.planning.plan_files import load_plan
    from halopipe.training.checkpoint_folders import read_state_dict
    from runtime.checkpoint.lock import held

    planned = load_plan(plan)
    with held(folder):
        written = read_state_dict(source, planned, folder)
    console.wrote(written, console.command("run", plan, "--checkpoint", folder, "--resume"))
