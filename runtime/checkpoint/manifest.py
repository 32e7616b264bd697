"""What a checkpoint holds and where: ``manifest.json``, read by the codec of all files, and whether it holds together.

One line for each key of the state, so that a manifest can be read by eye::

    "folders": {"rank-0": [SHA-256 of what says where its tensors lie, bytes of the file that they lie in]}
    "numbers": {"run/step": 3, "scheduler/0.bias/best": {"float": "inf"}}
    "tensors": {"model/0.bias": ["float32", [8], ["rank-0", "model/0.bias", 0, 8, SHA-256 of its bytes], ...]}

A part of a tensor is the range ``start:stop`` of the whole laid flat, or a box of it, where both are lists.  While a
checkpoint is written, each rank leaves a manifest of its own part; :func:`merged` makes one of them all.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BeforeValidator, Field

from planner.ir.box import Box, Interval, intersect, volume, whole
from planner.ir.codec import loads
from planner.ir.errors import CheckpointError, CorruptFileError
from runtime.checkpoint.folders import MANIFEST, MANIFEST_HASH, complete_path, complete_steps, rank_name
from runtime.checkpoint.state import Number

VERSION = 3
"""Until 2 the tensors of a rank were kept as torch.distributed.checkpoint does; since 2 parts may be boxes."""

TORCH = "torch"
SAFETENSORS = "safetensors"
"""How the tensors of a rank may be kept."""

_MOST_ELEMENTS = 1 << 60

Count = Annotated[int, Field(ge=0)]
SlicePlace = Count | tuple[Count, ...]
AnyFloat = Annotated[float, Field(allow_inf_nan=True)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class StoredPart(NamedTuple):
    """A stored tensor: a range of a whole laid flat, or a box of it.

    Attributes:
        folder: of the rank that wrote it.
        stored: its name there; another key's where the two are one tensor.
        start, stop: numbers of a range, one for each dim of a box.
        sha256: of its bytes in the file.
    """

    folder: str
    stored: str
    start: SlicePlace
    stop: SlicePlace
    sha256: Digest

    @property
    def is_box(self) -> bool:
        """Whether it is no range."""
        return isinstance(self.start, tuple)

    @property
    def box(self) -> Box:
        """Where it lies, in the whole or in the whole laid flat."""
        starts, stops = (place if isinstance(place, tuple) else (place,) for place in (self.start, self.stop))
        return tuple(map(Interval, starts, stops))

    def __str__(self) -> str:
        places = " x ".join(f"{each.start}:{each.stop}" for each in self.box)
        return f"{places} by {self.folder}"


class TensorEntry(NamedTuple):
    """A whole tensor.

    Attributes:
        dtype: torch's name of it, without ``torch.``.
        parts: that make it up, in order, without gap or overlap: ranges, or boxes.
    """

    dtype: str
    shape: tuple[Count, ...]
    parts: tuple[StoredPart, ...]

    @property
    def is_flat(self) -> bool:
        """Whether its parts are ranges."""
        return not any(part.is_box for part in self.parts)

    @property
    def space(self) -> Box:
        """In which its parts lie."""
        return whole((math.prod(self.shape),) if self.is_flat else self.shape)


class RankFiles(NamedTuple):
    """The files of a rank's folder.

    Attributes:
        sha256: of what says where its tensors lie: the head of the file of safetensors, or torch's ``.metadata``.
        data_bytes: size of the file that they lie in, whose every byte belongs to a part.
    """

    sha256: Digest
    data_bytes: Count


def _entry(row: Any) -> Any:
    """Of a row of a file, whose parts follow one another."""
    row = _tuples(row)
    return (*row[:2], row[2:]) if isinstance(row, tuple) else row


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _number(value: Any) -> Any:
    """JSON has no infinities: the best loss so far of a scheduler is one."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no number of JSON, or beyond its range")
    is_odd = isinstance(value, dict) and [*value] == ["float"] and value["float"] in ("inf", "-inf", "nan")
    return float(value["float"]) if is_odd else value


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
        kept_as: how folders keep tensors.
    """

    step: Count
    num_ranks: Count
    torch_version: str
    fingerprints: Mapping[str, str]
    folders: Mapping[str, RankFiles]
    numbers: Mapping[str, Annotated[int | AnyFloat | bool | str | None, BeforeValidator(_number)]]
    tensors: Mapping[str, Annotated[TensorEntry, BeforeValidator(_entry)]]
    kept_as: str = TORCH


def to_text(manifest: Manifest) -> str:
    """The manifest as JSON, one key of the state a line; equal manifests give equal text."""
    head = {
        "halopipe": "checkpoint",
        "version": VERSION,
        "step": manifest.step,
        "num_ranks": manifest.num_ranks,
        "torch_version": manifest.torch_version,
        "fingerprints": dict(manifest.fingerprints),
        "kept_as": manifest.kept_as,
    }
    numbers = {
        key: {"float": str(number)} if isinstance(number, float) and not math.isfinite(number) else number
        for key, number in manifest.numbers.items()
    }
    tensors = {key: (entry.dtype, entry.shape, *entry.parts) for key, entry in manifest.tensors.items()}
    lines = [f"  {_json(name)}: {_json(value)}" for name, value in head.items()]
    for name, section in {"folders": manifest.folders, "numbers": numbers, "tensors": tensors}.items():
        rows = ",\n".join(f"    {_json(key)}: {_json(value)}" for key, value in section.items())
        lines.append(f"  {_json(name)}: {{\n{rows}\n  }}" if rows else f"  {_json(name)}: {{}}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def from_text(text: str, source: str) -> Manifest:
    """The manifest that ``text`` spells; ``source`` names it in errors.

    Raises:
        CorruptFileError, NewerFileError: it is none, or one of a newer release.
    """
    return loads(text, Manifest, source, ("checkpoint", VERSION))


def merged(manifests: Iterable[Manifest]) -> Manifest:
    """The manifest of the whole, from those of all ranks in their order.

    Raises:
        CheckpointError: two ranks save the same key, slices leave a gap, or ranks are of different minds.
    """
    ranks = list(manifests)
    first = ranks[0]
    numbers: dict[str, Number] = {}
    owners: dict[str, str] = {}
    entries: dict[str, list[TensorEntry]] = {}
    for rank, manifest in enumerate(ranks):
        for what in ("step", "num_ranks", "torch_version", "fingerprints"):
            expected = getattr(first, what)
            actual = getattr(manifest, what)
            if expected != actual:
                detail = f"rank 0 has {expected}, rank {rank} has {actual}"
                raise CheckpointError(f"ranks save checkpoints of different {what.replace('_', ' ')}", [detail])
        for key, number in manifest.numbers.items():
            if key in numbers:
                raise CheckpointError(f"{key} is saved by {owners[key]} and by {rank_name(rank)}; one must")
            numbers[key] = number
            owners[key] = rank_name(rank)
        for key, entry in manifest.tensors.items():
            entries.setdefault(key, []).append(entry)
    if clash := numbers.keys() & entries.keys():
        raise CheckpointError(f"{min(clash)} is a number on one rank and a tensor on another")
    return Manifest(
        first.step,
        first.num_ranks,
        first.torch_version,
        first.fingerprints,
        {name: files for manifest in ranks for name, files in manifest.folders.items()},
        {key: numbers[key] for key in sorted(numbers)},
        {key: _united(key, entries[key]) for key in sorted(entries)},
        first.kept_as,
    )


def _united(key: str, entries: list[TensorEntry]) -> TensorEntry:
    first = entries[0]
    for entry in entries:
        if entry[:2] != first[:2]:
            ours, theirs = (f"{each.parts[0].folder} has {each.dtype} {each.shape}" for each in (first, entry))
            raise CheckpointError(f"ranks disagree about {key}", [f"{ours}, {theirs}"])
    parts = sorted((part for entry in entries for part in entry.parts), key=lambda part: part.box)
    united = TensorEntry(first.dtype, first.shape, tuple(parts))
    if fault := fault_of(united):
        raise CheckpointError(f"what the ranks save of {key} does not fit together", [fault])
    return united


def fault_of(entry: TensorEntry) -> str:
    """What is wrong with an entry's parts: they overlap, or do not make up the whole; empty if nothing is."""
    space = entry.space
    for part in entry.parts:
        if part.is_box is entry.is_flat:
            return "some parts are boxes, others not"
        if len(part.box) != len(space) or part.box not in (space, intersect(part.box, space)):
            return f"{part} is no box of {entry.shape}"
    # ranges are in order: one that overlaps another overlaps its neighbour
    for part, other in pairwise(entry.parts) if entry.is_flat else combinations(entry.parts, 2):
        if intersect(part.box, other.box):
            return f"saved twice: {part}, {other}"
    missing = volume(space) - sum(volume(part.box) for part in entry.parts)
    return f"saved by nobody: {missing} of {volume(space)}" if missing or not entry.parts else ""


def fault_of_whole(manifest: Manifest) -> str:
    """What is wrong with a manifest of all ranks; empty if nothing."""
    if manifest.kept_as not in (TORCH, SAFETENSORS):
        return f"it keeps tensors as {manifest.kept_as!r}"
    if len(manifest.folders) != manifest.num_ranks:
        return f"it was saved by {manifest.num_ranks} ranks and has folders of {len(manifest.folders)}"
    if foreign := manifest.folders.keys() - set(map(rank_name, range(manifest.num_ranks))):
        return f"{min(foreign)!r} is none of {manifest.num_ranks} ranks' folders"
    if both := manifest.numbers.keys() & manifest.tensors.keys():
        return f"{min(both)} is both a number and a tensor"
    for key, entry in manifest.tensors.items():
        if math.prod(entry.shape) > _MOST_ELEMENTS:
            return f"{key}: shape {entry.shape} is too large"
        if not isinstance(getattr(torch, entry.dtype, None), torch.dtype):
            return f"{key}: {entry.dtype!r} is no dtype of torch {torch.__version__}"
        if unknown := {part.folder for part in entry.parts} - manifest.folders.keys():
            return f"{key}: {min(unknown)!r} is none of the folders"
        if fault := fault_of(entry):
            return f"{key}: {fault}"
    return ""


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
            remaining = max(0, os.fstat(file.fileno()).st_size - offset)
            file.seek(offset)
            return file.read(remaining if length is None else min(length, remaining))
    except (OSError, OverflowError) as error:
        raise damaged(path, f"{name} cannot be read: {error}") from None


def compare(path: Path, name: str, content: bytes | memoryview, expected: str) -> None:
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
