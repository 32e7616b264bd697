"""Files of published formats, with faults that name the place in the file.

Of a JSON file (:class:`Item`) typed fields are read, of a text file (:class:`FileText`) lines by number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from planner.ir.errors import FormatError, MissingFileError
from planner.ir.files import parse_json, read_bytes
from planner.ir.graph import topological_order

Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class Item:
    """One object of the file.

    Attributes:
        source: the file's name, for messages.
        where: how to find the object in the file: ``nodes[3] (conv1)``.
        fields: what it holds; keys that nobody asks for are left alone.
    """

    source: str
    where: str
    fields: dict[str, object]

    def has(self, key: str) -> bool:
        """Whether ``key`` is there and not null."""
        return self.fields.get(key) is not None

    def number(self, key: str, default: float | None = None, least: float = 0.0) -> float:
        """A finite number, which may stand in quotes."""
        value = self._read(key, default, _finite, "a finite number")
        if value < least:
            raise self._wrong(key, f"a number from {least:g} upwards")
        return value

    def whole(self, key: str, default: int | None = None, least: int | None = None) -> int:
        """A whole number, which may be written ``3``, ``3.0`` or ``"3"``."""
        value = self._read(key, default, whole_number, "a whole number")
        if least is not None and value < least:
            raise self._wrong(key, f"a whole number from {least} upwards")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """``true`` or ``false``, or 1 or 0."""
        return self._read(key, default, _flag, "true or false, or 1 or 0")

    def text(self, key: str, default: str | None = None) -> str:
        """Text; a number becomes its digits."""
        return self._read(key, default, _text, "text")

    def items(self, key: str) -> tuple[Item, ...]:
        """A list of objects."""
        value = self._need(key)
        if not isinstance(value, list):
            raise self._wrong(key, "a list of objects")
        return tuple(self._item(f"{key}[{index}]", each) for index, each in enumerate(value))

    def item(self, key: str) -> Item:
        """An object."""
        return self._item(key, self._need(key))

    def named(self, name: str) -> Item:
        """The same object, with its name in messages."""
        return Item(self.source, f"{self.where} ({name})", self.fields) if name else self

    def fault(self, title: str, details: Sequence[str] = (), remedies: Sequence[str] = ()) -> FormatError:
        """The error that says what is wrong here."""
        place = f", {self.where}" if self.where else ""
        return FormatError(f"{self.source}{place}: {title}", details, remedies)

    def _read(self, key: str, default: Read | None, parse: Callable[[object], Read | None], needed: str) -> Read:
        """The field as ``parse`` reads it, which gives None for what is not as ``needed``."""
        if default is not None and not self.has(key):
            return default
        value = parse(self._need(key))
        if value is None:
            raise self._wrong(key, needed)
        return value

    def _item(self, key: str, value: object) -> Item:
        where = f"{self.where}.{key}" if self.where else key
        if not isinstance(value, dict):
            raise FormatError(f"{self.source}, {where}: not an object", [f"found: {shown(value)}"])
        return Item(self.source, where, value)

    def _need(self, key: str) -> object:
        if not self.has(key):
            present = ", ".join(sorted(self.fields)[:12]) or "nothing"
            raise self.fault(f"{key!r} is missing", [f"found: {present}"], [f"add {key!r}"])
        return self.fields[key]

    def _wrong(self, key: str, needed: str) -> FormatError:
        return self.fault(f"{key!r} is not {needed}", [f"found: {shown(self.fields[key])}"])


def parse_object(file: FileText) -> Item:
    """The object that a JSON file is.

    Blanks and a byte-order mark before it do no harm.

    Raises:
        FormatError: the text is no JSON, or not one object.
    """
    text = file.text.removeprefix("\ufeff").strip()
    if not text:
        raise FormatError(f"{file.source}: empty file", ["a JSON object is needed"])
    try:
        value = parse_json(text)
    except json.JSONDecodeError as error:
        skipped = file.text.index(text)
        line = file.text.count("\n", 0, skipped + error.pos) + 1
        near = shown(text[error.pos : error.pos + 40]) if error.pos < len(text) else "the end of the file"
        raise FormatError(f"{file.source}, line {line}: not JSON", [f"{error.msg}, at {near}"]) from None
    except ValueError as error:
        raise FormatError(f"{file.source}: not this format", [str(error)]) from None
    if not isinstance(value, dict):
        raise FormatError(f"{file.source}: not an object", [f"found: {shown(value)}"])
    return Item(file.source, "", value)


def whole_number(value: object) -> int | None:
    """A whole number, however it is written; None if it is none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = None if isinstance(value, bool) else _finite(value)
    return int(number) if number is not None and number.is_integer() else None


def _finite(value: object) -> float | None:
    try:
        number = float(value) if isinstance(value, bool | int | float | str) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _flag(value: object) -> bool | None:
    word = value.strip().lower() if isinstance(value, str) else ""
    number = {"true": 1.0, "false": 0.0}.get(word, _finite(value))
    return bool(number) if number in (0.0, 1.0) else None


def _text(value: object) -> str | None:
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None


def numbered_nodes(top: Item) -> tuple[Sequence[Item], dict[int, int]]:
    """The items of ``nodes``, and where each stands by its ``id``.

    Raises:
        FormatError: there is none, or two have the same number.
    """
    nodes = top.items("nodes")
    if not nodes:
        raise top.fault("no nodes", ["'nodes' is empty"])
    index: dict[int, int] = {}
    for position, item in enumerate(nodes):
        number = item.whole("id")
        if index.setdefault(number, position) != position:
            raise item.fault(f"id {number} appears twice", [f"also nodes[{index[number]}]"], ["give each node its id"])
    return nodes, index


def edges_of(top: Item, index: Mapping[int, int]) -> Iterator[tuple[Item, int, int]]:
    """Each edge of a file, and the two nodes that it joins, by their place in ``index``.

    Raises:
        FormatError: an end is no node, or both are the same.
    """
    for item in top.items("edges"):
        ends = []
        for key in ("sourceId", "destId"):
            number = item.whole(key)
            if number not in index:
                raise item.fault(f"{key!r} {number} is no node's id", [f"{len(index)} nodes, such as {min(index)}"])
            ends.append(index[number])
        src, dst = ends
        if src == dst:
            raise item.fault("an edge from a node to itself", [f"node {item.whole('sourceId')}"], ["remove the edge"])
        yield item, src, dst


def require_no_cycle(at: Item, names: Sequence[str], edges: Sequence[tuple[int, int]]) -> None:
    """Raises :class:`FormatError` if the edges make a cycle."""
    left = [names[node] for node in on_or_after_cycles(len(names), edges)]
    if left:
        shown = f"{len(left)} nodes lie on or behind it, such as {', '.join(left[:3])}"
        raise at.fault("the edges make a cycle", [shown], ["remove an edge of the cycle"])


def on_or_after_cycles(num_nodes: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """The nodes that no order can hold; none where there is no cycle."""
    return sorted(set(range(num_nodes)).difference(topological_order(num_nodes, edges)))


def shown(value: object) -> str:
    """A value as messages quote it."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True, slots=True)
class FileText:
    """A file's text.

    Attributes:
        source: the file's name, for messages.
    """

    source: str
    text: str

    def lines(self) -> Iterator[tuple[int, str]]:
        """Lines with something on them, stripped, by number from 1; those that begin with ``#`` are left out.

        Only line feeds end a line: a name may hold any other character, such as U+2028.
        """
        text = self.text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
        for number, line in enumerate(text.split("\n"), start=1):
            stripped = line.strip()
            if stripped and not stripped.startswith("#"):
                yield number, stripped

    def fault(self, number: int, title: str, *details: str) -> FormatError:
        """The error that says what is wrong in line ``number``."""
        return FormatError(f"{self.source}, line {number}: {title}", details)


def read_text(path: str | Path) -> FileText:
    """A file as UTF-8.

    Raises:
        MissingFileError: there is no such file, or it cannot be read.
        FormatError: it is not UTF-8.
    """
    try:
        data = read_bytes(path)
    except MissingFileError as error:
        raise MissingFileError(
            f"{path} cannot be read", error.details, ["give the path of a file that exists"]
        ) from error
    try:
        return FileText(str(path), data.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        byte = data[error.start]
        raise FormatError(
            f"{path}, line {line}: not UTF-8 text", [f"byte {error.start} is 0x{byte:02x}"], ["save the file as UTF-8"]
        ) from None
