"""Jobs of two workers of this host in float64, held against one device as ``halopipe run --check-numerics`` does."""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from typer.testing import CliRunner

from benchmarks.report import Row, at_most
from halopipe.cli.app import app

TOLERANCE = 1e-10


def largest_error(
    name: str, model: str, profile: Sequence[str] = (), plan: Sequence[str] = (), run: Sequence[str] = ()
) -> Row:
    """The largest relative error of any gradient, parameter, buffer or loss of a job.

    Args:
        name: of the system; its row says that it was executed.
        model: text of a module with a factory ``model``.
        profile: more options of ``halopipe profile``.
        plan: of ``halopipe plan``.
        run: of ``halopipe run``.
    """
    with folder_of(model) as folder:
        Path(folder, "profile.json").write_text(profiled(model, tuple(profile)), encoding="utf-8")
        halopipe(folder, "plan", "profile.json", "--global-batch", "32", "--micro-batch", "8", *plan)
        told = halopipe(folder, "run", "plan.json", "--steps", "3", "--check-numerics", "--json", *run)
    return error_of(name, told)


@functools.cache
def profiled(model: str, options: tuple[str, ...]) -> str:
    """The profile of a module's factory ``model`` in float64, measured once for all plans that are made of it."""
    with folder_of(model) as folder:
        halopipe(folder, "profile", "model.py:model", "--quick", "--dtype", "float64", *options)
        return Path(folder, "profile.json").read_text(encoding="utf-8")


def error_of(name: str, told: str) -> Row:
    """The same of a job that was run with ``--check-numerics --json``, which ``told`` this."""
    error = max(each["error"] for each in json.loads(told)["numerics"]["worst"].values())
    return at_most(f"{name}, executed: largest error", error, "relative", TOLERANCE)


@contextlib.contextmanager
def folder_of(model: str) -> Iterator[Path]:
    """A folder that has this ``model.py``, for a while."""
    with tempfile.TemporaryDirectory() as name:
        Path(name, "model.py").write_text(model, encoding="utf-8")
        yield Path(name)


def halopipe(folder: Path, *arguments: str) -> str:
    """What the command prints; it runs in this process, so that torch is loaded once, its workers are forks.

    Raises:
        RuntimeError: it failed; the message is its own.
    """
    with contextlib.chdir(folder):
        done = CliRunner().invoke(app, list(arguments))
    if done.exit_code:
        raise RuntimeError(f"halopipe {' '.join(arguments)}:\n{done.stderr}")
    return done.stdout
