"""What users read: the help of every verb, every error with its remedies, and the schema of every file."""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import planner.ir.errors
from halopipe.cli import app
from halopipe.run_spec import job_file
from planner.ir import codec
from planner.ir.errors import HalopipeError
from runtime.checkpoint.reader import Checkpoint, whole_state_dict
from tests.frozen.files import FOLDER

FILES = FOLDER / "files"
"""Of each release that wrote others: a folder with one file of every kind."""

HOME = Path(__file__).parents[2]
PACKAGES = ("planner", "profiler", "runtime", "cuda_ops", "halopipe")
ERRORS: Mapping[str, str] = {
    name: made.code
    for name, made in vars(planner.ir.errors).items()
    if isinstance(made, type) and issubclass(made, HalopipeError)
}
"""Codes by the names of the classes."""


def values() -> dict[str, Callable[[], Any]]:
    """What is frozen, by name."""
    helps = {f"help-{verb}": partial(help_of, verb) for verb in app._VERBS}
    schemas = {f"schema-{name}": partial(schema_of, name) for name in (*codec.FORMATS, job_file.NAME)}
    states = {f"checkpoint-{folder.name}": partial(state_of, folder / "checkpoint") for folder in FILES.iterdir()}
    return {**helps, **schemas, **states, "errors": errors}


def state_of(folder: Path) -> Any:
    """What a checkpoint holds: of each tensor its dtype, its shape and its sum."""
    state = whole_state_dict(Checkpoint.open(folder))
    return {name: [str(each.dtype), [*each.shape], each.double().sum().item()] for name, each in state.items()}


def schema_of(name: str) -> Any:
    """As ``halopipe schema`` writes it."""
    return json.loads(job_file.schema() if name == job_file.NAME else codec.schema(name))


def errors() -> dict[str, list[str]]:
    """By code and title what an error says and what it tells to do; ``{}`` stands for what a run fills in.

    Where it is raised does not matter.  What is not written at the place where it is raised is ``...``.
    """
    texts = defaultdict[str, set[str]](set)
    for package in PACKAGES:
        for path in sorted((HOME / package).rglob("*.py")):
            for code, title, details, remedies in _raised(ast.parse(path.read_text("utf-8"))):
                texts[f"{code} {title}"].add(f"{details} | {remedies}")
    return {title: sorted(rest) for title, rest in sorted(texts.items())}


def _raised(tree: ast.Module) -> Iterator[tuple[str, str, str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS and node.args:
            named = {keyword.arg: keyword.value for keyword in node.keywords}
            details, remedies = (
                node.args[place] if len(node.args) > place else named.get(name)
                for place, name in ((1, "details"), (2, "remedies"))
            )
            yield ERRORS[node.func.id], _pattern(node.args[0]), _pattern(details), _pattern(remedies)


def _pattern(node: ast.expr | None) -> str:
    """The text of a literal."""
    if node is None:
        return ""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_pattern(part) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.List | ast.Tuple):
        return "; ".join(map(_pattern, node.elts))
    return "..."


def help_of(verb: str) -> dict[str, Any]:
    """What a verb says of itself, and of each argument and option; how lines are broken is the library's."""
    command = app._Loaded()[verb]
    return {"help": command.help, **{" ".join(each.opts): _option(each) for each in command.params}}


def _option(option: Any) -> dict[str, Any]:
    names = ("help", "metavar", "default", "required", "multiple", "min", "max", "hidden", "rich_help_panel")
    values = {name: getattr(option, name, None) for name in names}
    return {name: str(value) for name, value in values.items() if value is not None and value is not False}
