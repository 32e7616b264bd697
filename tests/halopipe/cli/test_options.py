"""What the shell offers for options, and that options which errors and remarks name are those of the verb meant."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch.optim import lr_scheduler

from halopipe.cli import app
from halopipe.run_spec import job_file
from planner.ir import codec
from tests.halopipe.commands import HOME
from tests.test_readme import verbs


def params_of(verb: str) -> dict[str, Any]:
    return {option.name: option for option in app._Loaded()[verb].params}


def names(verb: str, option: str, typed: str = "") -> list[str]:
    """What the shell offers."""
    shown = params_of(verb)[option]
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
    words = "halopipe explain by_hand.json --layer l"
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
    assert answer.stdout.split() == ["l0", "l1", "l2", "l3", "l4", "l5", "loss"]


SOURCES = [
    path
    for folder in ("halopipe", "planner", "profiler", "runtime", "cuda_ops")
    for path in sorted((HOME / folder).rglob("*.py"))
]
OPTION = re.compile(r"(?<![\w-])--[a-z](?:[a-z0-9-]*[a-z0-9])?(?![\w-]|\.\w)")
OTHERS = re.compile(
    r"torchrun|srun|pip |docker|nvidia-smi|--query-gpu|--format=csv|ipykernel|--master-addr|--index-url|--id=|--force"
)
"""Programs of others, whose options these are."""

LAUNCHERS = HOME / "planner/extras/export/launchers"
"""Whose files write the options of other launchers."""

VERB_OF = {
    "halopipe/extras/serving": "serve",
    "halopipe/training": "run",
    "halopipe/launch": "run",
    "halopipe/run_spec": "run",
    "halopipe/data": "run",
    "runtime/checkpoint/reader": "checkpoint",
    "runtime": "run",
    "profiler": "profile",
    "planner/solvers": "plan",
    "planner/layers": "plan",
    "planner/costs": "plan",
    "planner/extras/transformers/search": "ways",
}
"""Whose user reads the messages of these files, where they name no verb."""

ANYWHERE = {"--help", "--version"}


def options() -> dict[str, set[str]]:
    """By verb."""
    return {
        verb: {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        for verb, command in verbs().commands.items()
    }


OPTIONS = options()
_VERBS = "|".join(OPTIONS)
VERB = re.compile(
    rf"halopipe ({_VERBS})(?![\w.])|(?<![\w-])({_VERBS})(?= (?:again )?(?:with\b|without\b|--|[A-Z]{{2}}))"
)


def texts(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of what a module says; not of what it is documented with."""
    tree = ast.parse(source)
    silent = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            silent |= {id(part) for part in node.values}
            yield node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
            yield node.lineno, node.value


def unknown(text: str, verb: str = "") -> list[str]:
    """Options in the text that neither ``verb`` nor the verb that the text names before them has; of none, any verb."""
    found = []
    for match in OPTION.finditer(text):
        named = [first or second for first, second in VERB.findall(text[: match.end()])]
        those = {*named[-1:], *([verb] if verb else [])} or OPTIONS.keys()
        if match[0] not in ANYWHERE.union(*(OPTIONS[each] for each in those)):
            found.append(match[0])
    return found


def verb_of(path: Path) -> str:
    place = path.relative_to(HOME).with_suffix("").as_posix()
    if path.parent.name == "cli" and path.stem in OPTIONS:
        return path.stem
    return next((verb for start, verb in VERB_OF.items() if place.startswith(start)), "")


def test_every_option_that_a_message_names_is_one_of_its_verb() -> None:
    faults = [
        f"{path.relative_to(HOME)}:{line}: {option} in {text!r}"
        for path in SOURCES
        if LAUNCHERS not in path.parents
        for line, text in texts(path.read_text("utf-8"))
        if "--" in text and not OTHERS.search(text)
        for option in unknown(text, verb_of(path))
        if text != option  # a constant of the code, which no person reads
    ]
    assert "\n".join(faults) == ""


@pytest.mark.parametrize(
    ("text", "verb", "expected"),
    [
        ("a smaller --batch", "", ["--batch"]),
        ("--micro-batch 4, or --global-batch 8", "plan", []),
        ("--schedule 1f1b", "run", ["--schedule"]),
        ("halopipe plan --schedule 1f1b", "run", []),
        ("profile --workers 2, or --cluster", "plan", []),
        ("profile --workers 2, or --cluster", "", ["--cluster"]),
        ("run again with --resume, --on-nan", "", []),
    ],
)
def test_an_option_of_another_verb_is_noticed(text: str, verb: str, expected: list[str]) -> None:
    assert unknown(text, verb) == expected
