"""The release that runs, from the installed package or, in a source tree, from ``pyproject.toml`` beside it."""

from __future__ import annotations

import os
import tomllib
from importlib import metadata
from pathlib import Path

from planner.ir.errors import StaleFileError


def version() -> str:
    """Such as ``0.1.0``."""
    project = Path(__file__).resolve().parent.parent / "pyproject.toml"
    if project.is_file():
        found = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]
        return str(found)
    return metadata.version("halopipe")


def require_same_release(theirs: str) -> None:
    """Raises :class:`StaleFileError` where the launcher, whose release is ``theirs``, runs another than this host."""
    if theirs != version():
        raise StaleFileError(
            "halopipe is not the same on all hosts",
            [f"launcher: {theirs}", f"{os.uname().nodename}: {version()}"],
            ["install one release on all of them"],
        )
