"""Verbs as a person types them, in this process or a fresh one, and the profile that they are tried on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner, Result

from benchmarks.chains import chain_profile
from halopipe.cli.app import _Loaded, app
from planner.ir.codec import dump

HOME = Path(__file__).resolve().parents[2]
PROFILE = chain_profile(6, latency_s=1e-4, parameter_bytes=2**20, activation_bytes=2**14)


def present(rows: list[list[str]]) -> list[list[str]]:
    """The rows that begin with a verb that is there: extras bring theirs."""
    return [row for row in rows if row[0] in _Loaded()]


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def code_and_output(*arguments: object) -> tuple[int, str]:
    """How a verb ends, and all that it says."""
    result = call(*map(str, arguments))
    return result.exit_code, result.output


def good(*arguments: str) -> Result:
    """What a verb says that succeeds."""
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result


def require_said(folder: Path, arguments: list[str], exit_code: int, *texts: str) -> None:
    """Fails unless a verb ends so, with ``texts`` and what to try on standard error alone, and writes no file."""
    write_faulty(folder)
    before = sorted(folder.rglob("*"))
    result = call(*arguments)
    missing = [text for text in texts if text not in result.stderr]
    assert (result.exit_code, missing, result.stdout) == (exit_code, [], ""), result.stderr
    assert ("error[H" not in result.stderr) or "\n  try: " in result.stderr
    assert sorted(folder.rglob("*")) == before


def write_faulty(folder: Path) -> None:
    """What is no JSON, a profile of another network, and the plan with an action left out or a layer renamed."""
    (folder / "broken.json").write_text('{"halopipe": ')
    dump(chain_profile(6), folder / "other.json")
    if (folder / "by_hand.json").exists():
        plan = (folder / "by_hand.json").read_text("utf-8")
        (folder / "edited.json").write_text(plan.replace('"1F1", ', "", 1))
        (folder / "renamed.json").write_text(plan.replace('"l2"', '"l two"'))


RENAMED = ("error[H602]", "layer l2 is in no stage", "layer l two is not in the model")
"""What is said of ``renamed.json`` (exit code 6)."""


def process(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    command = [sys.executable, "-m", "halopipe", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
