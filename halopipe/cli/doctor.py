"""``halopipe doctor``: what is missing or odd on this machine."""

from __future__ import annotations

import typer

from halopipe.cli.options import JsonOption
from halopipe.terminal import console
from planner.ir.errors import CheckError


def doctor(json: JsonOption = False) -> None:
    """Say what is missing or odd on this machine, and what to do; exit code 6 if halopipe cannot run here."""
    from halopipe.reports import doctor as examining

    findings = examining.examine()
    console.emit_json(examining.data(findings)) if json else console.emit(examining.render(findings))
    if not examining.can_run(findings):
        raise typer.Exit(CheckError.exit_code)
