"""``halopipe demo``: the whole journey on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    folder: Annotated[Path, typer.Option("-o", "--output", help="Folder for the files.")] = Path("halopipe-demo"),
    quick: Annotated[bool, typer.Option("--quick", help="A smaller network: seconds, not minutes.")] = False,
) -> None:
    """Profile, plan and run ResNet-50 and its best rival on this machine; show predicted beside measured."""
    from halopipe import demo as demonstration

    demonstration.travel(folder, demonstration.SMALL if quick else demonstration.RESNET50)
