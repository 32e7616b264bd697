"""Files: strict to read, byte-deterministic to write.

A file is one JSON object: ``{"halopipe": "plan", "version": 1, ...fields}``.  Reading refuses unknown and duplicate
keys, NaN and infinities, ``true`` where a number belongs, and then what makes no sense (:mod:`planner.ir.validation`);
it names all faults at once, each with its path and, where there is one, a suggestion.

A file of an older format version is read as one of the newest, fields that it lacks by their defaults
(:data:`FORMATS`); one of a newer version is refused.

Writing puts one record on a line, so that a changed layer is a changed line, and replaces the file in one move
(:mod:`planner.ir.files`), so that nobody ever sees half of it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import re
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from planner.ir import validation
from planner.ir.errors import CorruptFileError, NewerFileError, StaleFileError
from planner.ir.files import parse_json, read_text
from planner.ir.files import write_text as write_text
from planner.ir.plan import Plan
from planner.ir.profile import Profile
from planner.ir.proof import Proof
from planner.ir.timeline import TimelineFile

FORMATS: Mapping[str, tuple[type, int]] = {
    "profile": (Profile, 1),
    "plan": (Plan, 1),
    "timeline": (TimelineFile, 1),
    "proof": (Proof, 1),
}
"""Name of each file format, the type it holds and the newest version that this release reads and writes.

A field that came later says so in its metadata (``added``): files without it are read with its default, or with what
its absence meant (``absent``), and it is left out again where it has its default: older releases read the file.
"""

_WRITTEN_BY = {
    "profile": "name a file that 'halopipe profile' wrote",
    "plan": "name a file that 'halopipe plan' wrote",
    "timeline": "name a file that 'halopipe run' wrote",
    "proof": "name a file that 'halopipe plan --proof' wrote",
    "checkpoint": "name the folder of 'halopipe run --checkpoint FOLDER'",
}

MOST_KEYS = 200_000
"""Of one object; the largest profiles have a key for each layer and parameter."""

_INLINE_DEPTH = 3  # root is 0: sections are 1, their lists and maps 2, a record in them is one line
_MOST_FAULTS_SHOWN = 20
_NAME = re.compile(r'"halopipe"\s*:\s*"(\w+)"')

T = TypeVar("T")


def load(path: str | Path, cls: type[T]) -> T:
    """The ``cls`` (:class:`Profile`, :class:`Plan`, :class:`TimelineFile`, :class:`Proof`) that the file holds.

    Raises:
        MissingFileError, CorruptFileError, NewerFileError: the file cannot be used; the text says why.
    """
    return loads(read_text(path), cls, source=str(path))


def load_any(path: str | Path) -> Any:
    """What the file holds, whichever format it is of; raises as :func:`load`."""
    text = read_text(path)
    name = _NAME.search(text)
    if name is None or name[1] not in FORMATS:
        kinds = ", ".join(FORMATS)
        raise CorruptFileError(f"{path} is not a halopipe file", [f"it does not say that it is one of: {kinds}"])
    return loads(text, FORMATS[name[1]][0], source=str(path))


def loads(text: str, cls: type[T], source: str = "text", named: tuple[str, int] | None = None) -> T:
    """The ``cls`` that ``text`` spells; ``source`` names it in errors.

    Args:
        named: name and newest version of a format that is none of :data:`FORMATS`: it may have any number of keys, and
            whoever reads it sees whether it makes sense.
    """
    name, version = named or _format_of(cls)
    body = json.dumps([_with_absent(_checked_header(text, name, version, source), cls)])
    try:
        value: T = _adapter(cls).validate_json(body)[0]  # type: ignore[arg-type]  # classes are hashable
    except ValidationError as error:
        errors = error.errors(include_url=False)
        faults = [_describe(fault, cls) for fault in errors[:_MOST_FAULTS_SHOWN]]
        raise _corrupt(source, name, faults, len(errors)) from None
    senseless = validation.faults(value) if named is None else ()
    if senseless:
        raise _corrupt(source, name, senseless)
    return value


def from_json(text: str | bytes, cls: type[T]) -> T:
    """The ``cls`` that JSON without a header spells, such as processes of one release leave for one another.

    Raises:
        ValueError: it spells none: a key is missing or not known, or a value is of another type.
    """
    array = f"[{text}]" if isinstance(text, str) else b"[%b]" % text
    try:
        value: T = _adapter(cls, is_finite=False).validate_json(array)[0]  # type: ignore[arg-type]  # classes are hashable
    except ValidationError as error:
        raise ValueError(_describe(error.errors(include_url=False)[0], cls)) from None
    return value


def dump(value: object, path: str | Path) -> None:
    """Writes ``value`` to ``path`` in one move.

    Raises:
        MissingFileError: the folder is missing or cannot be written.
    """
    write_text(path, dumps(value))


def dumps(value: object) -> str:
    """``value`` as text, ending in a newline; equal values give equal bytes."""
    name, version = _format_of(type(value))
    return _render({"halopipe": name, "version": version, **_plain_fields(value)}, 0) + "\n"


def plain(value: object) -> Any:
    """``value`` in the types of JSON: dataclasses become objects, tuples arrays."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain_fields(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value


def canonical(value: object) -> str:
    """``value`` as the shortest JSON, keys sorted: what fingerprints are taken of."""
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def fingerprint(value: object) -> str:
    """``sha256:`` and 16 hex digits of ``value``'s canonical JSON; equal contents give equal fingerprints.

    A short name for contents, so that a file made for another model, profile or cluster is noticed.
    """
    return "sha256:" + hashlib.sha256(canonical(value).encode()).hexdigest()[:16]


def plan_fingerprint(plan: Plan) -> str:
    """Of what a run of the plan executes: the model and the decision, whatever is predicted or was measured of it."""
    return fingerprint({"model": plan.inputs.model_fingerprint, "decision": plan.decision})


def require_match(what: str, expected: str, actual: str, remedy: str) -> None:
    """Raises :class:`StaleFileError` unless the two fingerprints of ``what`` are equal."""
    if expected != actual:
        raise StaleFileError(
            f"the plan was made for another {what}", [f"plan: {expected}", f"here: {actual}"], [remedy]
        )


def schema(name: str) -> str:
    """JSON Schema of the format ``name``, as text."""
    cls, version = FORMATS[name]
    root = TypeAdapter(cls).json_schema()
    header = {"halopipe": {"const": name}, "version": {"const": version}}
    root["properties"] = {**header, **root["properties"]}
    root["required"] = ["halopipe", "version", *root["required"]]
    for part in (root, *root.get("$defs", {}).values()):
        if part.get("type") == "object" and "properties" in part:
            part["additionalProperties"] = False
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **root}
    return json.dumps(document, indent=2) + "\n"


@functools.cache
def _adapter(cls: type, *, is_finite: bool = True) -> TypeAdapter[Any]:
    # pydantic hands the configuration of a plain container down to the standard dataclasses inside it, but takes none
    # for a dataclass at the top; hence the tuple, and nothing of pydantic in the types themselves.
    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=not is_finite)
    return TypeAdapter(types.GenericAlias(tuple, (cls,)), config=config)  # type: ignore[arg-type]


def _format_of(cls: type) -> tuple[str, int]:
    for name, (format_class, version) in FORMATS.items():
        if format_class is cls:
            return name, version
    raise TypeError(f"{cls.__name__} is not a file format; formats are {', '.join(FORMATS)}")


class _Object(dict[str, Any]):
    """A JSON object that remembers the keys it had twice."""

    duplicates: tuple[str, ...] = ()


def _object(most_keys: int, pairs: list[tuple[str, Any]]) -> _Object:
    if len(pairs) > most_keys:
        raise ValueError(f"an object has {len(pairs)} keys; {most_keys} are the most")
    result = _Object(pairs)
    if len(result) < len(pairs):
        result.duplicates = tuple(sorted(key for key, count in Counter(key for key, _ in pairs).items() if count > 1))
    return result


def _checked_header(text: str, name: str, version: int, source: str) -> dict[str, Any]:
    """The file's fields, with the header taken off; duplicates and syntax are refused here."""
    try:
        root = parse_json(text, functools.partial(_object, MOST_KEYS if name in FORMATS else len(text)))
    except json.JSONDecodeError as error:
        raise CorruptFileError(f"{source} is not JSON", [_syntax(text, error)], [_WRITTEN_BY[name]]) from None
    except ValueError as error:
        raise CorruptFileError(f"{source} is not a {name} file", [str(error)]) from None
    if not isinstance(root, _Object) or root.get("halopipe") != name:
        kind = root.get("halopipe") if isinstance(root, _Object) else None
        what = f"a halopipe {kind} file" if isinstance(kind, str) and kind in FORMATS else "not a halopipe file"
        raise CorruptFileError(f"{source} is not a halopipe {name} file", [f"it is {what}"], [_WRITTEN_BY[name]])
    found_version = root.get("version")
    if not isinstance(found_version, int) or isinstance(found_version, bool) or found_version < 1:
        complaint = "is missing" if found_version is None else f"is {json.dumps(found_version)}"
        raise CorruptFileError(
            f"{source} is not a halopipe {name} file", [f"its version {complaint}; versions are whole numbers from 1"]
        )
    if found_version > version:
        raise NewerFileError(
            f"{source} was written by a newer halopipe",
            [f"it has {name} format {found_version}, this release reads up to {version}"],
            ["pip install --upgrade halopipe"],
        )
    faults = [f"{path}: key given twice" for path in _duplicate_paths(root, "")]
    if faults:
        raise _corrupt(source, name, faults)
    return {key: value for key, value in root.items() if key not in ("halopipe", "version")}


_hints = functools.cache(get_type_hints)


def _with_absent(section: Any, cls: Any) -> Any:
    """A section of a file, with what it means by leaving keys out where that is no default: metadata say ``absent``."""
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) and isinstance(section, dict) else ():
        if "absent" in field.metadata:
            section.setdefault(field.name, field.metadata["absent"])
        elif field.name in section:
            _with_absent(section[field.name], _hints(cls)[field.name])
    return section


def _syntax(text: str, error: json.JSONDecodeError) -> str:
    """What is wrong with the text; of one that was cut off, that."""
    if not text.strip():
        return "it is empty"
    where = f"line {error.lineno}, column {error.colno}: {error.msg}"
    rest = text[error.pos :].strip()
    cut = not rest or (error.msg.startswith("Unterminated string") and '"' not in rest[1:])
    return f"it is cut off after {len(text)} characters: {where}" if cut else where


def _duplicate_paths(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, _Object):
        yield from (f"{path}.{key}".lstrip(".") for key in value.duplicates)
        for key, item in value.items():
            yield from _duplicate_paths(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _duplicate_paths(item, f"{path}[{index}]")


def _corrupt(source: str, name: str, faults: Sequence[str], num_faults: int = 0) -> CorruptFileError:
    """All faults, of which the first are shown; ``num_faults`` if there are more than these."""
    total = num_faults or len(faults)
    shown = list(faults[:_MOST_FAULTS_SHOWN])
    if total > len(shown):
        shown.append(f"... and {total - len(shown)} more")
    count = f"{total} fault{'s' if total > 1 else ''}"
    return CorruptFileError(
        f"{source} is not a valid {name} file: {count}", shown, [f"halopipe schema {name}"] * (name in FORMATS)
    )


def _describe(fault: Any, cls: type) -> str:
    names_a_key = fault["type"] in ("unexpected_keyword_argument", "missing")
    parts = fault["loc"][1:]
    branches = parts[:-1] if names_a_key else parts  # a union names the branch it tried, a key may be called so
    location = [
        part for part in branches if part not in ("bool", "int", "float", "str", "tuple[int, ...]", "tuple[float, ...]")
    ]
    location += parts[len(branches) :]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    if fault["type"] == "unexpected_keyword_argument":
        close = difflib.get_close_matches(str(location[-1]), _field_names(cls), n=1)
        return f"{path}: unknown key" + (f"; did you mean {close[0]!r}?" if close else "")
    if fault["type"] == "missing":
        return f"{path}: missing"
    return f"{path}: {fault['msg'][0].lower()}{fault['msg'][1:]}, got {_shorten(fault['input'])}"


def _shorten(value: object) -> str:
    text = "null" if value is None else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


@functools.cache
def _field_names(cls: type) -> tuple[str, ...]:
    definitions = TypeAdapter(cls).json_schema()
    parts = (definitions, *definitions.get("$defs", {}).values())
    return tuple(sorted({key for part in parts for key in part.get("properties", {})}))


def _plain_fields(value: Any) -> dict[str, Any]:
    """The fields by name, but those that were added to a format later (their metadata says so) and need no key.

    So older releases read such a file, and fingerprints stay what they were.
    """
    return {
        field.name: plain(field_value)
        for field in dataclasses.fields(value)
        if (field_value := getattr(value, field.name)) != _if_absent(field) or "added" not in field.metadata
    }


def _if_absent(field: dataclasses.Field[Any]) -> Any:
    """What the field is where a file has no key of it."""
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return field.metadata.get("absent", default)


def _render(value: Any, depth: int) -> str:
    is_row = isinstance(value, list) and all(isinstance(item, (int, float)) for item in value)
    if depth >= _INLINE_DEPTH or not isinstance(value, (dict, list)) or not value or is_row:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    indent = "  " * (depth + 1)
    end = "  " * depth
    if isinstance(value, list):
        items = [_render(item, depth + 1) for item in value]
        opening = "["
        closing = "]"
    else:
        items = [f"{json.dumps(key, ensure_ascii=False)}: {_render(item, depth + 1)}" for key, item in value.items()]
        opening = "{"
        closing = "}"
    return f"{opening}\n{indent}" + f",\n{indent}".join(items) + f"\n{end}{closing}"
