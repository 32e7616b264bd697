"""A job file: the plan and the options of ``halopipe run``, by the names that the command line has for them.

    halopipe: job
    version: 1
    plan: plan.json
    steps: 100
    optimizer: AdamW:lr=0.001
    checkpoint: ckpt

Its keys are the options of :mod:`halopipe.run_spec.options`, and no others.  Paths in it, also those in front of a
factory's name, are relative to its own folder.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, create_model

from halopipe.run_spec.options import ASKED, TENSORBOARD, RunFiles, RunOptions, flag_of, option_of
from halopipe.run_spec.schema import WRITTEN, limits
from halopipe.terminal import units
from planner.ir.errors import CorruptFileError, UsageError
from planner.ir.files import read_text, write_text
from planner.ir.options import DURATION, FACTORY, INTERVAL, METRICS, PATH, SIZE, WORD
from planner.ir.strict_yaml import cut, parse_yaml_words, suggestion

SUFFIXES = (".yaml", ".yml")
NAME = "job"
VERSION = 1

_HEADER = "halopipe", "version"
_REMEDY = "halopipe schema job lists what may be there; halopipe run PLAN ... --write-job FILE writes such a file"


@dataclass(frozen=True, slots=True)
class JobFile:
    """What a job file says.

    Attributes:
        options: values as the command line has them, by field; paths are absolute.
    """

    plan: Path
    options: Mapping[str, Any]


def key_of(name: str) -> str:
    """What the field is called in a job file."""
    return flag_of(name).removeprefix("--")


def read(path: Path) -> JobFile:
    """The job that the file spells.

    Raises:
        MissingFileError, CorruptFileError: it cannot be used; every fault is named with its line.
    """
    text = read_text(path)
    root, written = parse_yaml_words(text, str(path))
    if not isinstance(root, dict) or root.get("halopipe") != NAME:
        kind = root.get("halopipe") if isinstance(root, dict) else None
        fault = f"it is a halopipe {cut(kind)} file" if isinstance(kind, str) else "it has no line 'halopipe: job'"
        raise CorruptFileError(f"{path} is not a halopipe job file", [fault], [_REMEDY])
    texts = {key_of(name) for name, kind in _kinds().items() if kind is str} | {"plan"}
    plain = {  # what YAML takes for a number, as 1e5, or a truth, as on, is text where text is asked for
        key: written[key][1] if key in texts and type(value) in (int, float, bool) else value
        for key, value in root.items()
    }
    try:
        validated = _model()(**plain)
    except ValidationError as error:
        faults = sorted(_fault(path, each, written) for each in error.errors(include_url=False))
        count = units.count(len(faults), "fault")
        raise CorruptFileError(
            f"{path} is not a valid job file: {count}", [text for _, text in faults], [_REMEDY]
        ) from None
    values = validated.model_dump(exclude_unset=True)
    return JobFile(
        Path(located(PATH, values["plan"], path.absolute().parent)),
        {name: located(option_of(name).kind, values[name], path.absolute().parent) for name in ASKED if name in values},
    )


def write(path: Path, plan: Path, values: Mapping[str, Any]) -> None:
    """Write a job file of ``plan`` and ``values``: by field, as the command line has them."""
    folder = path.absolute().parent
    named = {"halopipe": NAME, "version": VERSION, "plan": _relative(PATH, str(plan), folder)}
    named |= {key_of(name): _relative(option_of(name).kind, values[name], folder) for name in ASKED if name in values}
    lines = [
        f"{key}: {value if key in _HEADER else json.dumps(value, ensure_ascii=False)}" for key, value in named.items()
    ]
    write_text(path, "\n".join(["# halopipe run FILE; flags behind it override what it says", *lines, ""]))


def schema() -> str:
    """JSON Schema of job files, as text."""
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **_model().model_json_schema(by_alias=True)}
    return json.dumps(document, indent=2) + "\n"


def factory_files(options: RunOptions) -> list[Path]:
    """The files whose factories ``options`` name; they are read."""
    values = {name: getattr(options, name) for name in ASKED if option_of(name).kind == FACTORY}
    return [Path(text) for value in values.values() if (text := _path_in(FACTORY, value)[1])]


def located(kind: str, value: Any, folder: Path) -> Any:
    """An option's value with its path, if it has one, read from ``folder``."""
    head, text, tail = _path_in(kind, value)
    return f"{head}{folder / text}{tail}" if text else value


def _relative(kind: str, value: Any, folder: Path) -> Any:
    if kind == INTERVAL:
        return units.parse_interval(value)
    head, text, tail = _path_in(kind, value)
    return f"{head}{os.path.relpath(text, folder)}{tail}" if text else value


def _path_in(kind: str, value: Any) -> tuple[str, str, str]:
    """What is before a path, the path, what is after it; no path: it is empty."""
    if kind == PATH and value:
        return "", str(value), ""
    if kind == METRICS and value:
        head = TENSORBOARD if value.startswith(TENSORBOARD) or value.endswith("/") else ""
        return head, value.removeprefix(TENSORBOARD), ""
    if kind == FACTORY and ".py:" in value:
        place, _, name = value.partition(".py:")
        return "", f"{place}.py", f":{name}"
    return "", "", ""


@functools.cache
def _kinds() -> dict[str, Any]:
    """The type of each field, in a file."""
    hints = {**get_type_hints(RunOptions), **get_type_hints(RunFiles)}
    kinds = {}
    for name in ASKED:
        option = option_of(name)
        kinds[name] = _word(option.choices) if option.kind == WORD else hints[name]
        if option.kind in _TYPES:
            kinds[name] = Annotated[_TYPES[option.kind], BeforeValidator(_checked(option.kind, flag_of(name)))]
    return kinds


@functools.cache
def _model() -> Any:
    """The file's fields by name, each with its key, limit and help."""
    fields: dict[str, Any] = {
        "halopipe": (Literal["job"], Field(description="What file this is.")),
        "version": (Literal[1], Field(description="Of the format.")),
        "plan": (str, Field(min_length=1, description="The plan file to run.")),
    }
    for name, kind in _kinds().items():
        option = option_of(name)
        field = ASKED[name]
        least, most = limits(field, kind) if kind in (int, float) else (None, None)
        described = Field(
            default="" if option.kind == SIZE else field.default,
            alias=key_of(name),
            ge=least,
            le=most,
            description=option.help,
        )
        fields[name] = (kind, described)
    strict = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, title="halopipe job file")
    return create_model("Job", __config__=strict, **fields)


def _checked(kind: str, name: str) -> Callable[[Any], Any]:
    """Refuses what cannot be taken apart, and leaves the rest as it is written."""

    def check(value: Any) -> Any:
        try:
            WRITTEN[kind](str(value), name)
        except UsageError as error:
            raise ValueError(f"{error.title}; {', '.join(error.remedies)}") from None
        return str(value) if isinstance(value, float) else value

    return check


_TYPES: Mapping[str, Any] = {SIZE: str | int, DURATION: str | float, INTERVAL: str | int}


def _word(choices: Sequence[str]) -> Any:
    """The type of a flag that one of ``choices`` may stand for."""

    def checked(value: Any) -> Any:
        if isinstance(value, bool) or value in choices:
            return value
        raise ValueError(f"input should be a valid boolean or {' or '.join(choices)}")

    return Annotated[bool | str, BeforeValidator(checked)]


def _fault(path: Path, fault: Any, written: Mapping[str, tuple[int, str]]) -> tuple[int, str]:
    """Its line, and what is wrong there."""
    key = str(fault["loc"][0])
    line = written.get(key, (1, ""))[0]
    if fault["type"] == "missing":
        return line, f"{path}:{line}: {key} is missing"
    if fault["type"] == "extra_forbidden":
        keys = [*_HEADER, "plan", *map(key_of, ASKED)]
        return line, f"{path}:{line}: unknown key {cut(key)}{suggestion(key, keys)}"
    text = fault["msg"].removeprefix("Value error, ")
    got = cut(json.dumps(fault["input"], default=str))
    return line, f"{path}:{line}: {key}: {text[0].lower()}{text[1:]}, got {got}"
