"""What a command line, or a script of Python, comes to in this process."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from halopipe.cli.app import app
from planner.ir.errors import HalopipeError
from tests.halopipe.commands import HOME

PYTHON = "python"
"""In place of a verb: what follows is a script."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What a command came to."""

    exit_code: int
    stderr: str


def typed(folder: Path, arguments: Sequence[str], asked: bytes | None = None) -> Ended:
    """What a command line, or a script, comes to in a folder, in this process; in one of its own if it is asked."""
    environment = dict(os.environ)
    try:
        with contextlib.chdir(folder):
            if arguments[0] == PYTHON:
                return _script(arguments[1])
            if asked is not None:
                environment_there = {**os.environ, "PYTHONPATH": str(HOME)}
                command = [sys.executable, "-m", "halopipe", *arguments]
                done = subprocess.run(command, input=asked, env=environment_there, capture_output=True, check=False)
                return Ended(done.returncode, done.stderr.decode())
            result = CliRunner().invoke(app, list(arguments))
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
