"""``halopipe demo``: the whole journey on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    folder: Annotated[Path, typer.Option("-o", "--output", help="Folder for the files.")] = Path("halopipe-demo"),
    quick: Annotated[bool, typer.Option("--quick", help="A smaller network: seconds, not minutes.")] = False,
) -> None:
    """Profile, plan, explain, compare and run ResNet-50 on real digits; predicted beside measured."""
    from halopipe import journey

    journey.travel(folder, journey.SMALL if quick else journey.RESNET50)
