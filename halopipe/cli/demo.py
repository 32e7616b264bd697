"""``halopipe demo``: the whole journey on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    folder: Annotated[Path, typer.Option("-o", "--output", help="Folder for the files.")] = Path("halopipe-demo"),
    quick: Annotated[bool, typer.Option("--quick", help="A smaller network: seconds, not minutes.")] = False,
) -> None:
    """Profile, plan, explain, compare, run VGG-16 on real digits and the best rival; predicted beside measured."""
    from halopipe import demo as demonstration

    demonstration.travel(folder, demonstration.SMALL if quick else demonstration.VGG16)
