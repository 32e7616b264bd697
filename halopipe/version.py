"""The release that runs, from the installed package or, in a source tree, from ``pyproject.toml`` beside it."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path


def version() -> str:
    """Such as ``0.1.0``."""
    project = Path(__file__).resolve().parent.parent / "pyproject.toml"
    if project.is_file():
        found = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]
        return str(found)
    return metadata.version("halopipe")
