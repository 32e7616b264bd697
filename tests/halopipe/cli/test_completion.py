from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch.optim import lr_scheduler

from benchmarks.chains import chain_profile
from halopipe.cli import app
from halopipe.run_spec import job_file
from planner.ir import codec
from tests.planner.factories import chain_decision, plan_of

HOME = Path(__file__).resolve().parents[3]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a profile, a plan, a job, a model, a folder, and what is none of them."""
    monkeypatch.chdir(tmp_path)
    profile = chain_profile(3)
    codec.dump(profile, "p.json")
    (tmp_path / "sub").mkdir()
    for path in ("q.json", "sub/r.json"):
        codec.dump(plan_of(profile, chain_decision(profile, (2,))), path)
    for name in ("job.yaml", "mine.py", "other.json", ".hidden.json"):
        (tmp_path / name).touch()
    return tmp_path


def options(verb: str) -> dict[str, Any]:
    return {option.name: option for option in app._Loaded()[verb].params}


def names(verb: str, option: str, typed: str = "") -> list[str]:
    """What the shell offers."""
    shown = options(verb)[option]
    return [item.value for item in shown.shell_complete(typer.Context(app._Loaded()[verb]), typed)]


def test_names_are_offered_and_of_lists_the_next() -> None:
    assert "data-parallel" in names("plan", "solver", "da")
    assert names("plan", "allow", "sample,s") == ["sample,spatial"]
    assert names("run", "resume") == ["auto"]
    assert names("schema", "name", "j") == [job_file.NAME]
    assert set(names("schema", "name")) == {*codec.FORMATS, job_file.NAME}


def test_the_shell_completes_files_itself() -> None:
    assert names("plan", "profile") == names("run", "profile") == []


def test_what_is_offered_exists() -> None:
    assert all(hasattr(torch.optim, name) for name in names("run", "optimizer"))
    assert all(hasattr(lr_scheduler, name) for name in names("run", "scheduler"))
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in names("run", "dtype"))
    assert set(names("run", "compiler")) <= set(torch.compiler.list_backends(exclude_tags=()))


def test_the_shell_is_answered_without_torch(folder: Path) -> None:
    words = "halopipe explain q.json --layer l"
    code = (
        "import sys; from halopipe.cli.app import main; sys.argv = ['halopipe']; main(); "
        "sys.exit(3 if 'torch' in sys.modules else 0)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "PYTHONPATH": str(HOME),
            "COMP_WORDS": words,
            "COMP_CWORD": "4",
            "_HALOPIPE_COMPLETE": "complete_bash",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.split() == ["l0", "l1", "l2", "loss"]
