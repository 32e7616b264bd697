"""The catalogue's entries by name, read once: figures of a device or a link, each with its source and date."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from planner.extras.catalogue.reading import FieldReader
from planner.ir.errors import CorruptFileError, UnknownNameError
from planner.ir.quantities import BYTES, BYTES_PER_S, FLOP_PER_S, SECONDS
from planner.ir.strict_yaml import parse_yaml, suggestion


@dataclass(frozen=True, slots=True)
class Figure:
    """A number from a data sheet, in base units.

    Attributes:
        text: as it was written.
        source: the document or page it is from.
        date: of the document, or of reading where it has none: ``2023-11``.
    """

    value: float
    text: str
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class DeviceEntry:
    """A device one can buy; what no source states is None or missing.

    Attributes:
        family: one of :data:`FAMILIES`; names its devices: ``n0/gpu0``.
        peak_flop_per_s: dense, by dtype; ``tfloat32`` is float32 data in tensor cores.
        on_chip_bytes, on_chip_bytes_per_s: of a second memory beside the multipliers
            (:attr:`planner.ir.cluster.DeviceSpec.on_chip_bytes`).
        unknown: figures that one would look for here and that no source states, and why, in words.
    """

    name: str
    family: str
    vendor: str
    memory_bytes: Figure | None
    memory_bytes_per_s: Figure | None
    peak_flop_per_s: Mapping[str, Figure] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    note: str = ""
    on_chip_bytes: Figure | None = None
    on_chip_bytes_per_s: Figure | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)

    def figures(self) -> Iterator[tuple[str, Figure]]:
        """Every figure with its name."""
        values = (self.memory_bytes, self.memory_bytes_per_s, self.on_chip_bytes, self.on_chip_bytes_per_s)
        yield from ((name, figure) for name, figure in zip(FIGURES, values, strict=True) if figure is not None)
        yield from ((f"peak {dtype}", figure) for dtype, figure in self.peak_flop_per_s.items())


@dataclass(frozen=True, slots=True)
class LinkEntry:
    """A link; ``bandwidth_bytes_per_s`` is what one device can send to another in one direction.

    Attributes:
        latency_s: None where no source states that of a message.
    """

    name: str
    bandwidth_bytes_per_s: Figure
    latency_s: Figure | None = None
    aliases: tuple[str, ...] = ()
    note: str = ""

    def figures(self) -> Iterator[tuple[str, Figure]]:
        """Every figure with its name."""
        yield "bandwidth", self.bandwidth_bytes_per_s
        if self.latency_s is not None:
            yield "latency", self.latency_s


FAMILIES = ("cpu", "fpga", "gpu", "ipu", "snn", "tpu")
STREAMING = frozenset({"fpga"})
"""Families whose devices send what they make while they make it (:attr:`planner.ir.cluster.DeviceSpec.streams`)."""
FIGURES = ("memory", "memory-bandwidth", "on-chip-memory", "on-chip-bandwidth")
_FOLDER = Path(__file__).parent
_LINKS = "links.yaml"

Entry = TypeVar("Entry", DeviceEntry, LinkEntry)


@functools.cache
def devices() -> Mapping[str, DeviceEntry]:
    """All devices by name, sorted.

    Raises:
        CorruptFileError: a file of the catalogue is wrong; all its faults are named.
    """
    paths = sorted(path for path in _FOLDER.glob("*.yaml") if path.name != _LINKS)
    entries = [read_device(path.read_text("utf-8"), path.name) for path in paths]
    _require_distinct(entries)
    return {entry.name: entry for entry in sorted(entries, key=lambda entry: entry.name.lower())}


@functools.cache
def links() -> Mapping[str, LinkEntry]:
    """All links by name, in the file's order: from slow to fast of each make."""
    entries = read_links((_FOLDER / _LINKS).read_text("utf-8"), _LINKS)
    _require_distinct(entries)
    return {entry.name: entry for entry in entries}


@functools.cache
def device(name: str) -> DeviceEntry:
    """The device called ``name``, or that has it as another name; case does not matter.

    Raises:
        UnknownNameError: there is none; the text suggests the nearest.
    """
    return _entry_named("device", name, devices())


@functools.cache
def link(name: str) -> LinkEntry:
    """The link called ``name``, as :func:`device`."""
    return _entry_named("link", name, links())


def read_device(text: str, source: str) -> DeviceEntry:
    """The device that a file of the catalogue describes."""
    reader = FieldReader()
    needed = ("device", "family", "vendor", "figures")
    more = ("aliases", "note", "unknown")
    root = reader.mapping(parse_yaml(text, source), "", needed, more)
    figures = reader.mapping(root["figures"], "figures", (), (*FIGURES, "peak"))
    peak = figures.get("peak", {})
    if not isinstance(peak, Mapping):
        reader.fault("figures.peak", "should be a mapping of dtypes")
        peak = {}
    family = reader.text(root["family"], "family")
    if family and family not in FAMILIES:
        reader.fault("family", f"{family!r} is none of {', '.join(FAMILIES)}")
    entry = DeviceEntry(
        name=reader.text(root["device"], "device"),
        family=family,
        vendor=reader.text(root["vendor"], "vendor"),
        memory_bytes=_optional_figure(reader, figures, "figures", "memory", BYTES),
        memory_bytes_per_s=_optional_figure(reader, figures, "figures", "memory-bandwidth", BYTES_PER_S),
        peak_flop_per_s={
            str(dtype): _figure(reader, value, f"figures.peak.{dtype}", FLOP_PER_S) for dtype, value in peak.items()
        },
        aliases=_aliases(reader, root, ""),
        note=reader.text(root["note"], "note") if "note" in root else "",
        on_chip_bytes=_optional_figure(reader, figures, "figures", "on-chip-memory", BYTES),
        on_chip_bytes_per_s=_optional_figure(reader, figures, "figures", "on-chip-bandwidth", BYTES_PER_S),
        unknown={
            name: reader.text(why, f"unknown.{name}")
            for name, why in reader.mapping(root.get("unknown", {}), "unknown", (), (*FIGURES, "peak")).items()
        },
    )
    reader.finish(source, "catalogue file")
    return entry


def read_links(text: str, source: str) -> tuple[LinkEntry, ...]:
    """The links that the catalogue's file of links describes."""
    reader = FieldReader()
    root = reader.mapping(parse_yaml(text, source), "", ("links",))
    entries = []
    for path, value in reader.items(root["links"], "links"):
        node = reader.mapping(value, path, ("link", "bandwidth"), ("latency", "aliases", "note"))
        entries.append(
            LinkEntry(
                name=reader.text(node["link"], f"{path}.link"),
                bandwidth_bytes_per_s=_figure(reader, node["bandwidth"], f"{path}.bandwidth", BYTES_PER_S),
                latency_s=_optional_figure(reader, node, path, "latency", SECONDS),
                aliases=_aliases(reader, node, f"{path}."),
                note=reader.text(node["note"], f"{path}.note") if "note" in node else "",
            )
        )
    reader.finish(source, "catalogue file")
    return tuple(entries)


def names_of(entries: Iterable[DeviceEntry] | Iterable[LinkEntry]) -> dict[str, str]:
    """Every name and other name, in lower case, and the name it stands for."""
    return {word.lower(): entry.name for entry in entries for word in (entry.name, *entry.aliases)}


def _entry_named(what: str, name: str, entries: Mapping[str, Entry]) -> Entry:
    names = names_of(entries.values())
    if name.lower() not in names:
        near = suggestion(name, names.values())
        raise UnknownNameError(
            f"no {what} {name!r} in the catalogue{near}", [f"known: {', '.join(entries)}"], ["halopipe devices"]
        )
    return entries[names[name.lower()]]


def _figure(reader: FieldReader, value: Any, path: str, dimension: str) -> Figure:
    node = reader.mapping(value, path, ("value", "source", "date"))
    return Figure(
        reader.quantity(node["value"], f"{path}.value", dimension),
        str(node["value"]),
        reader.text(node["source"], f"{path}.source"),
        reader.text(node["date"], f"{path}.date"),
    )


def _optional_figure(
    reader: FieldReader, node: Mapping[str, Any], path: str, key: str, dimension: str
) -> Figure | None:
    return _figure(reader, node[key], f"{path}.{key}", dimension) if key in node else None


def _aliases(reader: FieldReader, node: Mapping[str, Any], path: str) -> tuple[str, ...]:
    if "aliases" not in node:
        return ()
    return tuple(reader.text(value, where) for where, value in reader.items(node["aliases"], f"{path}aliases"))


def _require_distinct(entries: Iterable[DeviceEntry] | Iterable[LinkEntry]) -> None:
    names = [word.lower() for entry in entries for word in (entry.name, *entry.aliases)]
    twice = sorted({word for word in names if names.count(word) > 1})
    if twice:
        raise CorruptFileError("the catalogue has a name twice", twice)
