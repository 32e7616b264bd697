"""What users read: the help and the words of verbs, every error with its remedies, and the schema of every file."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import planner.ir.errors
from halopipe.cli import app
from halopipe.run_spec import job_file
from halopipe.terminal import units
from planner import faults_of
from planner.ir import codec
from planner.ir.errors import HalopipeError
from planner.ir.plan import STATUSES, Plan
from planner.ir.profile import Profile
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

FREE = re.compile(r"[\d.]+ GiB(?= +–)")
"""The memory that a machine has free at the moment, in the table of ``cluster``."""

TYPED: Mapping[str, tuple[str, ...]] = {
    "explain": ("explain", "plan.json"),
    "explain-as-json": ("explain", "two.json", "--json"),
    "explain-a-layer": ("explain", "two.json", "--layer", "1"),
    "explain-a-field": ("explain", "two.json", "--receptive-field", "1"),
    "explain-why-not": ("explain", "two.json", "--why-not", "one-device"),
    "explain-what-if": ("explain", "plan.json", "--what-if", "n0/*.memory=8GiB"),
    "compare": ("compare", "plan.json", "two.json"),
    "check": ("check", "two.json"),
    "check-a-proof": ("check", "plan.json", "--proof", "proof.json"),
    "checkpoint": ("checkpoint", "checkpoint"),
    "devices": ("devices",),
    "ways": ("ways", "gpt3-175b", "--on", "a100-dgx", "--gpus", "64", "--global-batch", "64", "--json"),
    "refused-no-memory": ("plan", "profile.json", "--memory", "1KiB"),
    "refused-ranks": ("plan", "profile.json", "--ranks", "7"),
    "refused-a-size": ("plan", "profile.json", "--memory", "2 giga"),
    "refused-a-file": ("explain", "proof.json"),
    "refused-no-file": ("explain", "nowhere.json"),
    "refused-an-option": ("run", "two.json", "--time-limits", "3"),
    "refused-nothing": ("run",),
}
"""What a person types in the folder of the files of a release."""


def values() -> dict[str, Callable[[], Any]]:
    """What is frozen, by name."""
    helps = {f"help-{verb}": partial(help_of, verb) for verb in app._Loaded()}
    schemas = {f"schema-{name}": partial(schema_of, name) for name in (*codec.FORMATS, job_file.NAME)}
    kept = [path.parent for kind in ("checkpoint", "safetensors") for path in FILES.glob(f"*/{kind}/step-*")]
    states = {f"{path.name}-{path.parent.name}": partial(state_of, path) for path in kept}
    said = {f"said-{name}": partial(said_of, *arguments) for name, arguments in TYPED.items()}
    checked = {f"checked-{name}": partial(noticed, name) for name in ("plan", "two")}
    once = {"errors": errors, "error-classes": error_classes, "quantities": quantities}
    return {**helps, **schemas, **states, **said, **checked, **once}


def said_of(*arguments: str) -> dict[str, Any]:
    """What a verb answers, line by line, of the newest files that are kept."""
    with contextlib.chdir(max(FILES.iterdir())):
        result = CliRunner().invoke(app.app, arguments, env={"COLUMNS": "120", "NO_COLOR": "1"})
    answer = FREE.sub("GiB", result.stdout).splitlines()
    errors = [line for line in result.stderr.splitlines() if not line.startswith("searching: ")]  # these tell the time
    return {"exit code": result.exit_code, "said": answer, "errors": errors}


def noticed(name: str) -> dict[str, list[str]]:
    """Where the checker finds fault with a plan in which one value is another; by the place of the value.

    Of a number there are three others, of which the first is checked with the profile as well.
    """
    folder = max(FILES.iterdir())
    profile = codec.load(folder / "profile.json", Profile)
    document = json.loads((folder / f"{name}.json").read_text("utf-8"))
    places: dict[str, list[str]] = {}
    for holder, key, place in [*_leaves(document, "")]:
        was = holder[key]
        for number, other in enumerate(_others(was)):
            holder[key] = other
            for given in (None, profile)[: 2 - bool(number)]:
                faults = _faults(json.dumps(document), given)
                places[f"{place} {number}{' with the profile' if given else ''}"] = faults
        holder[key] = was
    return places


def _others(value: Any) -> list[Any]:
    if isinstance(value, bool) or value is None:
        return [not value]
    if isinstance(value, str):
        return [f"{value}x", *(status for status in STATUSES if value in STATUSES and status != value)]
    return [value * 2, value * 1_000_000, -1]


def _faults(text: str, profile: Profile | None) -> list[str]:
    try:
        return [fault.partition(":")[0] for fault in faults_of(codec.loads(text, Plan), profile)]
    except HalopipeError as error:
        return [error.code]


def _leaves(value: Any, place: str) -> Iterator[tuple[Any, Any, str]]:
    """What holds each value that holds no other, its key, and its place."""
    keys = value if isinstance(value, dict) else range(len(value))
    for key in [*keys]:
        inner = f"{place}.{key}" if place else str(key)
        if isinstance(value[key], dict | list):
            yield from _leaves(value[key], inner)
        else:
            yield value, key, inner


def error_classes() -> dict[str, Any]:
    """Of each class of errors its word, its code, its exit code, and what usually helps."""
    classes = {name: getattr(planner.ir.errors, name) for name in ERRORS}
    return {name: [each.word, each.code, each.exit_code, *each.usual] for name, each in classes.items()}


def state_of(folder: Path) -> Any:
    """What a checkpoint holds: of each tensor its dtype, its shape and its sum."""
    state = whole_state_dict(Checkpoint.open(folder))
    return {name: [str(each.dtype), [*each.shape], each.double().sum().item()] for name, each in state.items()}


def schema_of(name: str) -> Any:
    """As ``halopipe schema`` writes it."""
    return json.loads(job_file.schema() if name == job_file.NAME else codec.schema(name))


@cache
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


def quantities() -> dict[str, Any]:
    """Sizes, times and shares as they are said where units or digits change; sizes and times as they are typed."""
    numbers = [0, 1, 9.949, 9.951, 99.94, 99.96, 999.4, 999.6, 1023, 1024, 8640]
    sizes = [*numbers, 999.4 * 1024, 1000 * 1024, 1 << 20, 1e9, 5 << 40, 2e15]
    typed = ["1", "1B", "1kB", "1KiB", "1.5MB", "1.5MiB", "2GB", "2gib", "3TB", "3TiB", "1PB", "0", "2 giga", "-1GiB"]
    times = ["30", "30s", "250ms", "5us", "1.5min", "6h", "2d", "7 weeks"]
    return {
        "sizes": {str(number): units.size(number) for number in sizes},
        "seconds": {str(number): [units.seconds(number), units.seconds(number * 1e-7)] for number in numbers},
        "durations": {str(number): units.duration(100 * number) for number in numbers},
        "shares": {str(number): units.percent(number / 100) for number in numbers},
        "typed sizes": {text: _or_error(units.parse_size, text) for text in typed},
        "typed times": {text: _or_error(units.parse_seconds, text) for text in times},
    }


def _or_error(parse: Callable[[str], float], text: str) -> float | str:
    try:
        return parse(text)
    except HalopipeError as error:
        return error.title


def _option(option: Any) -> dict[str, Any]:
    names = ("help", "metavar", "default", "required", "multiple", "min", "max", "hidden", "rich_help_panel")
    values = {name: getattr(option, name, None) for name in names}
    return {name: str(value) for name, value in values.items() if value is not None and value is not False}
