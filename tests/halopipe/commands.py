"""Verbs as a person types them, in this process or a fresh one, and the profile that they are tried on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner, Result

from benchmarks.chains import chain_profile
from halopipe.cli.app import _Loaded, app

HOME = Path(__file__).resolve().parents[2]
PROFILE = chain_profile(6, latency_s=1e-4, parameter_bytes=2**20, activation_bytes=2**14)


def present(rows: list[list[str]]) -> list[list[str]]:
    """The rows that begin with a verb that is there: extras bring theirs."""
    return [row for row in rows if row[0] in _Loaded()]


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def require_said(folder: Path, arguments: list[str], exit_code: int, text: str) -> None:
    """Fails unless a verb ends so, with ``text`` and what to try on standard error alone, and writes no file."""
    (folder / "broken.json").write_text('{"halopipe": ')
    before = sorted(path.name for path in folder.iterdir())
    result = call(*arguments)
    assert (result.exit_code, text in result.stderr, result.stdout) == (exit_code, True, ""), result.stderr
    assert ("error[H" not in result.stderr) or "\n  try: " in result.stderr
    assert sorted(path.name for path in folder.iterdir()) == before


def process(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    command = [sys.executable, "-m", "halopipe", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
