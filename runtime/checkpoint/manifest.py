"""What a checkpoint holds and where: written as JSON, one key a line, and read strictly.

While a checkpoint is written, each rank leaves a manifest of its own part; :func:`merged` makes one of them all.

A manifest as text and back: strict to read, for a checkpoint may come from anywhere.

Is a checkpoint what was written?  Hashes, places of files, and the error that names damage.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch

from planner.ir.box import Box, Interval, intersect, volume, whole
from planner.ir.errors import CheckpointError, CorruptFileError, NewerFileError
from runtime.checkpoint.folders import MANIFEST, MANIFEST_HASH, complete_path, complete_steps, rank_name
from runtime.checkpoint.state import Number


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A stored tensor: the range ``start:stop`` of a whole laid flat, or a box of it.

    Attributes:
        folder: of the rank that wrote it.
        stored: its name in that folder's ``.metadata``; another key's where the two are one tensor.
        start, stop: of a box, 0 and the number of its elements.
        sha256: of its bytes in the file.
        box: where it is no range.
    """

    folder: str
    stored: str
    start: int
    stop: int
    sha256: str
    box: Box | None = None


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A whole tensor.

    Attributes:
        dtype: torch's name of it, without ``torch.``.
        parts: that make it up, in order, without gap or overlap: ranges, or boxes of one a rank.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of a rank's folder.

    Attributes:
        metadata_sha256: of ``.metadata``.
        data_bytes: size of the data file, whose every byte belongs to a part.
    """

    metadata_sha256: str
    data_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        num_ranks: that saved it.
        torch_version: that wrote it.
        fingerprints: by what they are of (model, plan, ...).
        folders: by their names.
        numbers: by key.
        tensors: by key.
    """

    step: int
    num_ranks: int
    torch_version: str
    fingerprints: Mapping[str, str]
    folders: Mapping[str, RankFiles]
    numbers: Mapping[str, Number]
    tensors: Mapping[str, TensorEntry]


def merged(manifests: Iterable[Manifest]) -> Manifest:
    """The manifest of the whole, from those of all ranks in their order.

    Raises:
        CheckpointError: two ranks save the same key, slices leave a gap, or ranks are of different minds.
    """
    ranks = list(manifests)
    numbers: dict[str, Number] = {}
    owners: dict[str, str] = {}
    for rank, manifest in enumerate(ranks):
        _same_mind(ranks[0], manifest, rank)
        for key, number in manifest.numbers.items():
            if key in numbers:
                raise CheckpointError(f"{key} is saved by {owners[key]} and by {rank_name(rank)}; one must")
            numbers[key], owners[key] = number, rank_name(rank)
    entries: dict[str, list[TensorEntry]] = {}
    for manifest in ranks:
        for key, entry in manifest.tensors.items():
            entries.setdefault(key, []).append(entry)
    if clash := numbers.keys() & entries.keys():
        raise CheckpointError(f"{min(clash)} is a number on one rank and a tensor on another")
    tensors = {key: _whole(key, entries[key]) for key in sorted(entries)}
    folders = {name: files for manifest in ranks for name, files in manifest.folders.items()}
    first = ranks[0]
    sorted_numbers = {key: numbers[key] for key in sorted(numbers)}
    return Manifest(
        first.step, first.num_ranks, first.torch_version, first.fingerprints, folders, sorted_numbers, tensors
    )


def fault_of(entry: TensorEntry) -> str:
    """What is wrong with an entry's parts: they overlap, or do not make up the whole; empty if nothing is."""
    parts, numel = entry.parts, math.prod(entry.shape)
    boxes = [(part.folder, part.box) for part in parts if part.box is not None]
    if boxes:
        return _fault_of_boxes(boxes, entry.shape) if len(boxes) == len(parts) else "some parts are boxes, others not"
    for before, after in pairwise(parts):
        if after.start < before.stop:
            ranges = f"{before.start}:{before.stop} by {before.folder}, {after.start}:{after.stop} by {after.folder}"
            return f"saved twice: {ranges}"
        if after.start > before.stop:
            return f"saved by nobody: {before.stop}:{after.start} of {numel}"
    if not parts or parts[0].start:
        return f"saved by nobody: 0:{parts[0].start if parts else numel} of {numel}"
    if parts[-1].stop != numel:
        return f"its parts end at {parts[-1].stop}, its shape {entry.shape} has {numel} elements"
    return ""


def _fault_of_boxes(boxes: list[tuple[str, Box]], shape: tuple[int, ...]) -> str:
    if len({folder for folder, _ in boxes}) < len(boxes):
        return "a rank has saved two boxes of it"
    for index, (folder, box) in enumerate(boxes):
        if len(box) != len(shape) or intersect(box, whole(shape)) != box:
            return f"{_box_text(box)} by {folder} is no box of {shape}"
        for other, another in boxes[:index]:
            if intersect(box, another):
                return f"saved twice: {_box_text(box)} by {folder}, {_box_text(another)} by {other}"
    missing = math.prod(shape) - sum(volume(box) for _, box in boxes)
    return f"saved by nobody: {missing} of {math.prod(shape)}" if missing else ""


def _box_text(box: Box) -> str:
    return " x ".join(map(str, box))


def fault_of_whole(manifest: Manifest) -> str:
    """What a manifest of all ranks lacks; empty if nothing."""
    if len(manifest.folders) != manifest.num_ranks:
        return f"it was saved by {manifest.num_ranks} ranks and has folders of {len(manifest.folders)}"
    if both := manifest.numbers.keys() & manifest.tensors.keys():
        return f"{min(both)} is both a number and a tensor"
    return next((f"{key}: {fault}" for key, entry in manifest.tensors.items() if (fault := fault_of(entry))), "")


def _same_mind(first: Manifest, other: Manifest, rank: int) -> None:
    for what in ("step", "num_ranks", "torch_version", "fingerprints"):
        expected, actual = getattr(first, what), getattr(other, what)
        if expected != actual:
            detail = f"rank 0 has {expected}, rank {rank} has {actual}"
            raise CheckpointError(f"ranks save checkpoints of different {what.replace('_', ' ')}", [detail])


def _whole(key: str, entries: list[TensorEntry]) -> TensorEntry:
    first = entries[0]
    for entry in entries:
        if (entry.dtype, entry.shape) != (first.dtype, first.shape):
            ours = f"{first.parts[0].folder} has {first.dtype} {first.shape}"
            theirs = f"{entry.parts[0].folder} has {entry.dtype} {entry.shape}"
            raise CheckpointError(f"ranks disagree about {key}", [f"{ours}, {theirs}"])
    everything = (part for entry in entries for part in entry.parts)
    parts = sorted(everything, key=lambda part: (part.box or (), part.start, part.stop))
    whole = TensorEntry(first.dtype, first.shape, tuple(parts))
    if fault := fault_of(whole):
        raise CheckpointError(f"what the ranks save of {key} does not fit together", [fault])
    return whole


VERSION = 2
"""Since 2 parts may be boxes; without any, a manifest is written as version 1."""

_FORMAT = "checkpoint"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_RANK = re.compile(r"rank-([0-9]{1,9})")
_MOST_ELEMENTS = 1 << 60

T = TypeVar("T")


def to_text(manifest: Manifest) -> str:
    """The manifest as JSON, one key of the state a line; equal manifests give equal text."""
    head = {
        "halopipe": _FORMAT,
        "version": VERSION if _has_boxes(manifest) else 1,
        "step": manifest.step,
        "num_ranks": manifest.num_ranks,
        "torch_version": manifest.torch_version,
        "fingerprints": dict(manifest.fingerprints),
    }
    sections: dict[str, dict[str, object]] = {
        "folders": {name: [files.metadata_sha256, files.data_bytes] for name, files in manifest.folders.items()},
        "numbers": {key: _spell(number) for key, number in manifest.numbers.items()},
        "tensors": {key: _spell_entry(entry) for key, entry in manifest.tensors.items()},
    }
    lines = [f"  {_json(name)}: {_json(value)}" for name, value in head.items()]
    for name, section in sections.items():
        rows = ",\n".join(f"    {_json(key)}: {_json(value)}" for key, value in section.items())
        lines.append(f"  {_json(name)}: {{\n{rows}\n  }}" if rows else f"  {_json(name)}: {{}}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def from_text(text: str, source: str) -> Manifest:
    """The manifest that ``text`` spells; ``source`` names it in errors.

    Raises:
        CorruptFileError, NewerFileError: it is none, or one of a newer release.
    """
    try:
        root = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
        _check_version(root, source)
        return _manifest(root)
    except RecursionError:
        raise CorruptFileError(f"{source} is not a checkpoint's manifest", ["nested too deeply"]) from None
    except ValueError as error:  # json's own, and those raised below
        raise CorruptFileError(f"{source} is not a checkpoint's manifest", [str(error)]) from None


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _spell(number: Number) -> object:
    """JSON has no infinities: the best loss so far of a scheduler is one."""
    return {"float": str(number)} if isinstance(number, float) and not math.isfinite(number) else number


def _spell_entry(entry: TensorEntry) -> list[object]:
    parts = [[part.folder, part.stored, *_spell_place(part), part.sha256] for part in entry.parts]
    return [entry.dtype, list(entry.shape), *parts]


def _spell_place(part: StoredPart) -> tuple[object, object]:
    """Where it starts and stops: one number, or one for each dim."""
    if part.box is None:
        return part.start, part.stop
    return [interval.start for interval in part.box], [interval.stop for interval in part.box]


def _has_boxes(manifest: Manifest) -> bool:
    return any(part.box is not None for entry in manifest.tensors.values() for part in entry.parts)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)}: key given twice")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _check_version(root: object, source: str) -> None:
    if not isinstance(root, dict) or root.get("halopipe") != _FORMAT:
        raise ValueError('it does not begin with "halopipe": "checkpoint"')
    version = _whole_number(root.pop("version", None), "version")
    if version > VERSION:
        raise NewerFileError(
            f"{source} was written by a newer halopipe",
            [f"it has checkpoint format {version}, this release reads up to {VERSION}"],
            ["pip install --upgrade halopipe"],
        )
    del root["halopipe"]


def _manifest(root: dict[str, Any]) -> Manifest:
    names = ("step", "num_ranks", "torch_version", "fingerprints", "folders", "numbers", "tensors")
    if set(root) != set(names):
        raise ValueError(f"it has the keys {', '.join(root)}; expected are {', '.join(names)}")
    num_ranks = _whole_number(root["num_ranks"], "num_ranks")
    folders = dict(_each(root["folders"], "folders", _rank_files))
    if foreign := [name for name in folders if not _is_rank(name, num_ranks)]:
        raise ValueError(f"folders: {foreign[0]!r} is none of {num_ranks} ranks' folders")

    def entry(value: object, where: str) -> TensorEntry:
        return _entry(value, where, folders)

    return Manifest(
        _whole_number(root["step"], "step"),
        num_ranks,
        _text(root["torch_version"], "torch_version"),
        dict(_each(root["fingerprints"], "fingerprints", _text)),
        folders,
        dict(_each(root["numbers"], "numbers", _number)),
        dict(_each(root["tensors"], "tensors", entry)),
    )


def _each(value: object, where: str, parse: Callable[[object, str], T]) -> Iterator[tuple[str, T]]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: not an object")
    for key, item in value.items():
        yield key, parse(item, f"{where}.{key}")


def _is_rank(name: str, num_ranks: int) -> bool:
    match = _RANK.fullmatch(name)
    return match is not None and int(match[1]) < num_ranks and name == rank_name(int(match[1]))


def _rank_files(value: object, where: str) -> RankFiles:
    metadata_sha256, data_bytes = _list(value, where, 2)
    return RankFiles(_sha256(metadata_sha256, where), _whole_number(data_bytes, where))


def _entry(value: object, where: str, folders: Mapping[str, RankFiles]) -> TensorEntry:
    dtype, shape, *parts = _list(value, where)
    sizes = tuple(_whole_number(size, where) for size in _list(shape, where))
    if math.prod(sizes) > _MOST_ELEMENTS:
        raise ValueError(f"{where}: shape {sizes} is too large")
    if not isinstance(getattr(torch, _text(dtype, where), None), torch.dtype):
        raise ValueError(f"{where}: {dtype!r} is no dtype of torch {torch.__version__}")
    entry = TensorEntry(dtype, sizes, tuple(_part(part, where) for part in parts))
    if unknown := {part.folder for part in entry.parts} - folders.keys():
        raise ValueError(f"{where}: {min(unknown)!r} is none of the folders")
    return entry


def _part(value: object, where: str) -> StoredPart:
    folder, stored, start, stop, sha256 = _list(value, where, 5)
    if isinstance(start, list):
        box = _box(start, _list(stop, where, len(start)), where)
        return StoredPart(
            _text(folder, where),
            _text(stored, where),
            0,
            volume(box),
            _sha256(sha256, where),
            box,
        )
    first, last = _whole_number(start, where), _whole_number(stop, where)
    if first > last:
        raise ValueError(f"{where}: {first}:{last} is no range")
    return StoredPart(_text(folder, where), _text(stored, where), first, last, _sha256(sha256, where))


def _box(starts: list[Any], stops: list[Any], where: str) -> Box:
    pairs = zip(starts, stops, strict=True)
    box = tuple(Interval(_whole_number(first, where), _whole_number(last, where)) for first, last in pairs)
    if not box or any(not each.start < each.stop <= _MOST_ELEMENTS for each in box) or volume(box) > _MOST_ELEMENTS:
        raise ValueError(f"{where}: {starts}:{stops} is no box")
    return box


def _list(value: object, where: str, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or (length is not None and len(value) != length):
        raise ValueError(f"{where}: not a list{f' of {length}' if length else ''}")
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: {value!r} is not text")
    return value


def _whole_number(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{where}: {value!r} is not a whole number")
    return value


def _number(value: object, where: str) -> Number:
    if isinstance(value, dict) and set(value) == {"float"} and value["float"] in ("inf", "-inf", "nan"):
        return float(value["float"])
    if value is not None and not isinstance(value, (int, float, str)):
        raise ValueError(f"{where}: {value!r} is neither number, text, true, false nor null")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: beyond the range of floating-point numbers")
    return value


def _sha256(value: object, where: str) -> str:
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise ValueError(f"{where}: not a SHA-256 hash")
    return value


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint in ``path``, its hash compared.

    Raises:
        CorruptFileError: it is damaged, or does not describe a whole checkpoint.
        NewerFileError: a newer release wrote it.
    """
    for name in (MANIFEST, MANIFEST_HASH):
        check_place(path, name)
    content = read_file(path, MANIFEST)
    if read_file(path, MANIFEST_HASH) != manifest_hash(content):
        raise damaged(path, f"{MANIFEST} has another hash than {MANIFEST_HASH} says")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise damaged(path, f"{MANIFEST} is not UTF-8 text: {error.reason}") from None
    manifest = from_text(text, str(path / MANIFEST))
    if path != complete_path(path.parent, manifest.step):
        raise damaged(path, f"{MANIFEST} is that of step {manifest.step}")
    if fault := fault_of_whole(manifest):
        raise damaged(path, f"{MANIFEST}: {fault}")
    return manifest


def manifest_hash(content: bytes) -> bytes:
    """Content of the file beside a manifest; ``sha256sum -c`` takes it."""
    return f"{hashlib.sha256(content).hexdigest()}  {MANIFEST}\n".encode()


def check_place(path: Path, name: str) -> None:
    """Refuse what is no file of the checkpoint in ``path``; reading a pipe would wait for ever.

    Raises:
        CorruptFileError: it is missing, no plain file, or a link to outside.
    """
    file = path / name
    if not file.is_file():
        raise damaged(path, f"{name} is missing, or no plain file")
    if not file.resolve().is_relative_to(path.resolve()):
        raise damaged(path, f"{name} is a link to outside: {file.resolve()}")


def read_file(path: Path, name: str, offset: int = 0, length: int | None = None) -> bytes:
    """Bytes of a file whose place has been checked; fewer where it ends before.

    Raises:
        CorruptFileError: the disk cannot read it.
    """
    try:
        with open(path / name, "rb") as file:
            left = max(0, os.fstat(file.fileno()).st_size - offset)
            file.seek(offset)
            return file.read(left if length is None else min(length, left))
    except (OSError, OverflowError) as error:
        raise damaged(path, f"{name} cannot be read: {error}") from None


def compare(path: Path, name: str, content: bytes, expected: str) -> None:
    """Compare hashes.

    Raises:
        CorruptFileError: they differ; ``name`` says of what.
    """
    digest = hashlib.sha256(content).hexdigest()
    if digest != expected:
        raise damaged(path, f"{name}: SHA-256 is {digest[:12]}..., the manifest says {expected[:12]}...")


def damaged(path: Path, fault: str) -> CorruptFileError:
    """The error that names a damaged checkpoint and offers the one before it."""
    earlier = [step for step in complete_steps(path.parent) if step < int(path.name.removeprefix("step-"))]
    remedies = [f"the checkpoint before it: {complete_path(path.parent, earlier[-1])}"] if earlier else []
    return CorruptFileError(f"checkpoint {path} is damaged", [fault], remedies)
