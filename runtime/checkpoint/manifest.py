"""What a checkpoint holds and where: written as JSON, one key a line, and read strictly.

While a checkpoint is written, each rank leaves a manifest of its own part; :func:`merged` makes one of them all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from planner.ir.box import Box, intersect, volume, whole
from planner.ir.errors import CheckpointError
from runtime.checkpoint.folders import rank_name
from runtime.checkpoint.state import Number


@dataclass(frozen=True, slots=True)
class Part:
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
class Entry:
    """A whole tensor.

    Attributes:
        dtype: torch's name of it, without ``torch.``.
        parts: that make it up, in order, without gap or overlap: ranges, or boxes of one a rank.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


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
    tensors: Mapping[str, Entry]


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
    entries: dict[str, list[Entry]] = {}
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


def fault_of(entry: Entry) -> str:
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
            return f"{_text(box)} by {folder} is no box of {shape}"
        for other, another in boxes[:index]:
            if intersect(box, another):
                return f"saved twice: {_text(box)} by {folder}, {_text(another)} by {other}"
    missing = math.prod(shape) - sum(volume(box) for _, box in boxes)
    return f"saved by nobody: {missing} of {math.prod(shape)}" if missing else ""


def _text(box: Box) -> str:
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
        expected, found = getattr(first, what), getattr(other, what)
        if expected != found:
            detail = f"rank 0 has {expected}, rank {rank} has {found}"
            raise CheckpointError(f"ranks save checkpoints of different {what.replace('_', ' ')}", [detail])


def _whole(key: str, entries: list[Entry]) -> Entry:
    first = entries[0]
    for entry in entries:
        if (entry.dtype, entry.shape) != (first.dtype, first.shape):
            ours = f"{first.parts[0].folder} has {first.dtype} {first.shape}"
            theirs = f"{entry.parts[0].folder} has {entry.dtype} {entry.shape}"
            raise CheckpointError(f"ranks disagree about {key}", [f"{ours}, {theirs}"])
    everything = (part for entry in entries for part in entry.parts)
    parts = sorted(everything, key=lambda part: (part.box or (), part.start, part.stop))
    whole = Entry(first.dtype, first.shape, tuple(parts))
    if fault := fault_of(whole):
        raise CheckpointError(f"what the ranks save of {key} does not fit together", [fault])
    return whole
