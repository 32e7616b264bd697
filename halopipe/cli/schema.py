"""``halopipe schema``: the JSON Schema of a file format."""

from __future__ import annotations

from typing import Annotated

import typer


def schema(
    name: Annotated[str, typer.Argument(metavar="NAME", help="profile, plan or timeline.")],
) -> None:
    """Write the JSON Schema of a file format to stdout."""
    from halopipe.terminal import console, units
    from planner.ir import codec

    units.require_known("file format", [name], list(codec.FORMATS))
    console.emit(codec.schema(name))
