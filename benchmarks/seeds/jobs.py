"""Jobs of two workers of this host in float64, held against one device as ``halopipe run --check-numerics`` does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Row, at_most

TOLERANCE = 1e-10


def largest_error(
    name: str, folder: Path, profile: Sequence[str] = (), plan: Sequence[str] = (), run: Sequence[str] = ()
) -> Row:
    """The largest relative error of any gradient, parameter, buffer or loss.

    Args:
        name: of the system; its row says that it was executed.
        folder: has ``model.py`` with a factory ``model``.
        profile: more options of ``halopipe profile``.
        plan: of ``halopipe plan``.
        run: of ``halopipe run``.
    """
    halopipe(folder, "profile", "model.py:model", "--quick", "--dtype", "float64", *profile)
    halopipe(folder, "plan", "profile.json", "--global-batch", "32", "--micro-batch", "8", *plan)
    told = halopipe(folder, "run", "plan.json", "--steps", "3", "--check-numerics", "--json", *run)
    error = max(each["error"] for each in json.loads(told)["numerics"]["worst"].values())
    return at_most(f"{name}, executed: largest error", error, "relative", TOLERANCE)


def halopipe(folder: Path, *arguments: str) -> str:
    """What the command prints.

    Raises:
        RuntimeError: it failed; the message is its own.
    """
    command = [sys.executable, "-m", "halopipe", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"halopipe {' '.join(arguments)}:\n{done.stderr}")
    return done.stdout
