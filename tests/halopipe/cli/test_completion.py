from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.optim import lr_scheduler

from benchmarks.chains import chain_profile
from halopipe.cli import completion
from halopipe.training import optimizer_spec
from planner.ir.codec import dump
from tests.planner.factories import chain_decision, plan_of

HOME = Path(__file__).resolve().parents[3]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a profile, a plan, a job, a model, a folder, and what is none of them."""
    monkeypatch.chdir(tmp_path)
    profile = chain_profile(3)
    dump(profile, "p.json")
    (tmp_path / "sub").mkdir()
    for path in ("q.json", "sub/r.json"):
        dump(plan_of(profile, chain_decision(profile, (2,))), path)
    for name in ("job.yaml", "mine.py", "other.json", ".hidden.json"):
        (tmp_path / name).touch()
    return tmp_path


def test_files_of_the_right_kind_are_offered_and_folders_on_the_way(folder: Path) -> None:
    assert completion.plans("") == ["q.json", "sub/"]
    assert completion.plans("sub/") == completion.plans("sub/r") == ["sub/r.json"]
    assert completion.profiles("p") == ["p.json"]
    assert completion.jobs("") == ["job.yaml", "q.json", "sub/"]
    assert completion.models("m") == ["mine.py"]
    assert completion.plans("nowhere/") == []


def test_names_are_offered_and_of_lists_the_next() -> None:
    assert completion.solvers("da") == ["dapple", "data-parallel"]
    assert completion.families("sample,s") == ["sample,spatial"]
    assert completion.devices("V100-16") == ["V100-16GB"]


def test_what_is_offered_exists() -> None:
    assert all(hasattr(torch.optim, name) for name in optimizer_spec.OPTIMIZERS)
    assert all(hasattr(lr_scheduler, name) for name in completion.RUN["scheduler"](""))
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in completion.DTYPES)
    assert set(completion.COMPILERS) <= set(torch.compiler.list_backends(exclude_tags=()))


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
