"""The command line: ``profile``, ``plan``, ``run``, and the verbs that read their files.

Each verb lives in ``halopipe/cli/`` and imports what it needs when it is called: ``--help`` is quick, and only
``profile``, ``run``, ``checkpoint``, ``doctor`` and ``demo`` load torch.
"""

from __future__ import annotations

from typing import Annotated

import typer

from halopipe.cli import (
    check,
    checkpoint,
    cluster,
    compare,
    demo,
    devices,
    doctor,
    draw,
    explain,
    export,
    importing,
    merge,
    plan,
    profile,
    report,
    run,
    schema,
)
from halopipe.terminal.console import INTERRUPTED, emit, reported

app = typer.Typer(
    name="halopipe",
    help="Plan how to train a neural network on the devices there are, then train it that way.",
    epilog="MODEL -> profile.json -> plan.json -> timeline.json. Start with: halopipe demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _verb in (profile.profile, plan.plan, explain.explain, compare.compare, check.check, run.run, export.export):
    app.command()(reported(_verb))
app.command()(reported(report.report))
app.command()(reported(draw.draw))
app.command()(reported(doctor.doctor))
app.command()(reported(checkpoint.checkpoint))
app.command()(reported(merge.merge))
app.command()(reported(devices.devices))
app.command()(reported(cluster.cluster))
app.command("import")(reported(importing.import_))
app.command()(reported(schema.schema))
app.command()(reported(demo.demo))


def _show_version(wanted: bool) -> None:
    if wanted:
        from halopipe.version import version

        emit(f"halopipe {version()}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    """Options before the verb."""


def main() -> int:
    """Runs the command line; returns the exit code."""
    try:
        app()
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
