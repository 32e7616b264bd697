"""What a command line, or a script of Python, comes to in this process."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from halopipe.cli.app import app
from planner.ir.errors import HalopipeError

PYTHON = "python"
"""In place of a verb: what follows is a script."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What a command came to."""

    exit_code: int
    stderr: str


def typed(folder: Path, arguments: Sequence[str], asked: bytes = b"") -> Ended:
    """What a command line, or a script, comes to in a folder, in this process."""
    environment = dict(os.environ)
    try:
        with contextlib.chdir(folder):
            if arguments[0] == PYTHON:
                return _script(arguments[1])
            result = CliRunner().invoke(app, list(arguments), input=asked)
            return Ended(result.exit_code, result.stderr)
    finally:
        os.environ.clear()
        os.environ.update(environment)


def _script(text: str) -> Ended:
    """As ``python`` ends that runs it: an error of ours is refused, any other one is a fault."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            exec(compile(text, "script.py", "exec"), {"__name__": "__main__"})
    except HalopipeError as error:
        return Ended(error.exit_code, error.render())
    except Exception as error:  # noqa: BLE001 - whatever a script ends with
        return Ended(1, f"{type(error).__name__}: {error}")
    return Ended(0, "")
