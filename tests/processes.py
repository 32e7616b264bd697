"""Processes of a test: what one does that needs no torch, and which it left behind."""

from __future__ import annotations

import os
from pathlib import Path


def execute(text: str) -> None:
    """What a worker of a few lines does."""
    exec(text, {})


def writing_into(folder: Path) -> list[int]:
    """Processes whose standard output is a file in ``folder``, as that of all workers of a job there."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            written = os.readlink(entry / "fd" / "1")
        except OSError:
            continue
        if Path(written).is_relative_to(folder):
            found.append(int(entry.name))
    return found
