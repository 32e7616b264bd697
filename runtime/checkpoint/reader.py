"""A complete checkpoint, read piece by piece: nothing is trusted before its hash has been compared.

Where tensors lie in the data file of a rank's folder, read from torch's ``.metadata`` without running its code.

``.metadata`` is a pickle, and a pickle may name any function and call it.  Here it may name only what torch 2.13
writes there, and not even that is called: each name stands for a record of this module that remembers what it is given.
"""

from __future__ import annotations

import difflib
import io
import math
import pickle
import pickletools
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planner.ir.box import Box, intersect, whole
from planner.ir.errors import MissingFileError, StaleFileError
from runtime.checkpoint.folders import MANIFEST, complete_path, complete_steps
from runtime.checkpoint.manifest import (
    Manifest,
    StoredPart,
    TensorEntry,
    check_place,
    compare,
    damaged,
    read_file,
    read_manifest,
)
from runtime.checkpoint.state import MODEL, Number
from runtime.pipeline.routing import assemble, slices

METADATA_FILE = ".metadata"
DATA_FILE = "__0_0.distcp"
"""The one file that ``FileSystemWriter`` puts a folder's tensors in."""


@dataclass(frozen=True, slots=True)
class Location:
    """Bytes of the data file: an archive of ``torch.save`` with one tensor."""

    offset: int
    length: int


def locations_of(content: bytes) -> Mapping[str, Location]:
    """Locations by the names of the stored tensors.

    Args:
        content: of a ``.metadata`` file; its hash need not be checked before.

    Raises:
        ValueError: it is not what this package writes, or names something that is not on the list.
    """
    try:
        _require_bounded(content)
        metadata = _Reader(io.BytesIO(content)).load()
    except Exception as error:  # noqa: BLE001 - a damaged pickle may raise anything
        raise ValueError(f"not readable: {error}") from None
    entries = _field(metadata, "storage_data")
    if not isinstance(entries, dict):
        raise ValueError("it has no storage_data")
    return {_text(_field(index, "fqn")): _location(info) for index, info in entries.items()}


_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")


def _require_bounded(content: bytes) -> None:
    """Refuses a pickle that asks for more memory than its own size.

    It may number what it keeps as it likes, and say that it is longer than it is; Python's reader makes room first.

    Raises:
        ValueError: it does so.
    """
    for code, argument, _ in pickletools.genops(content):
        if code.name in _PUTS and not 0 <= int(argument or 0) < len(content):
            raise ValueError(f"it numbers an object {argument}, of {len(content)} bytes")


class _Record:
    """Stands for an object of torch: it keeps the fields that it is given, and does nothing."""

    fields: Any = None

    def __init__(self, *arguments: Any) -> None:
        """Called where torch's function or class would be."""

    def __setstate__(self, state: Any) -> None:
        self.fields = state


_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    (_METADATA, "Metadata"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not on the list of what may be there")
        # A class of its own for each name and reader: a pickle can set attributes of whatever it names.
        return type("_Named", (_Record,), {})


def _field(record: Any, name: str) -> Any:
    if not isinstance(record, _Record) or not isinstance(record.fields, dict):
        raise ValueError("it is not torch's metadata")
    return record.fields.get(name)


def _location(info: Any) -> Location:
    path, offset, length = (_field(info, name) for name in ("relative_path", "offset", "length"))
    if path != DATA_FILE:
        raise ValueError(f"a tensor lies in {path!r}; the only file of a rank's folder is {DATA_FILE!r}")
    if _field(info, "transform_descriptors"):
        raise ValueError("tensors are transformed, by torch's extensions")
    if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in (offset, length)):
        raise ValueError(f"a tensor lies at {offset!r}, {length!r} bytes long")
    return Location(offset, length)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a tensor is called {value!r}")
    return value


class Checkpoint:
    """A complete checkpoint, which any plan may read: any number of ranks, each what it needs.

    Of the data files it reads and hashes only the tensors that are asked for, in the parts that were saved.

    Attributes:
        path: of its own folder.
        manifest: what it holds.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._locations: dict[str, Mapping[str, Location]] = {}

    @classmethod
    def open(cls, folder: str | Path, step: int | None = None) -> Checkpoint:
        """The checkpoint of ``step`` in ``folder``; without a step, the newest complete one.

        Compares the manifest's hash and the sizes of all files.

        Raises:
            MissingFileError: there is none.
            CorruptFileError: it is damaged; the text names the step before it, if there is one.
            NewerFileError: a newer release wrote it.
        """
        home = Path(folder)
        steps = complete_steps(home)
        if not steps or (step is not None and step not in steps):
            what = "checkpoint" if step is None else f"checkpoint of step {step}"
            there = f"steps there: {', '.join(map(str, steps)) or 'none'}"
            others = [f"--step {steps[-1]}"] if steps else ["name the folder of 'halopipe run --checkpoint FOLDER'"]
            raise MissingFileError(f"{home} has no complete {what}", [there], others)
        path = complete_path(home, steps[-1] if step is None else step)
        checkpoint = cls(path, read_manifest(path))
        for name, files in checkpoint.manifest.folders.items():
            for file in (METADATA_FILE, DATA_FILE):
                check_place(path, f"{name}/{file}")
            stored_bytes = (path / name / DATA_FILE).stat().st_size
            if stored_bytes != files.data_bytes:
                fault = f"{name}/{DATA_FILE} has {stored_bytes} bytes, the manifest says {files.data_bytes}"
                raise damaged(path, fault)
        return checkpoint

    def __contains__(self, key: str) -> bool:
        return key in self.manifest.tensors or key in self.manifest.numbers

    def tensors(self) -> Collection[str]:
        """The keys of all tensors."""
        return self.manifest.tensors.keys()

    def numbers(self) -> Collection[str]:
        """The keys of all numbers."""
        return self.manifest.numbers.keys()

    def read(self, key: str) -> Tensor:
        """The whole tensor, on the CPU, put together from its slices or boxes where it was saved in such.

        Raises:
            StaleFileError: it has no such tensor.
            CorruptFileError: it is damaged.
        """
        entry = self._entry(key)
        if _is_in_boxes(entry):
            return self.read_box(key, whole(entry.shape))
        pieces = [self._load(key, entry, part) for part in entry.parts]
        flat = pieces[0] if len(pieces) == 1 else torch.cat([piece.reshape(-1) for piece in pieces])
        return flat.reshape(entry.shape)

    def read_box(self, key: str, box: Box) -> Tensor:
        """A box of the tensor; of one that was saved in boxes, only those that overlap it are read.

        Raises:
            StaleFileError: it has no such tensor, or one without such a box.
            CorruptFileError: it is damaged.
        """
        entry = self._entry(key)
        everything = whole(entry.shape)
        if len(box) != len(everything) or (all(map(len, box)) and intersect(box, everything) != box):
            raise StaleFileError(f"{key} has shape {entry.shape}, wanted is {box}", [f"in {self.path}"])
        if not _is_in_boxes(entry):
            tensor = self.read(key)
            return tensor if box == everything else tensor[slices(box, everything)].clone()
        pieces = []
        for part in entry.parts:
            shared = intersect(part.box or everything, box)
            if shared is not None:
                pieces.append((shared, self._load(key, entry, part)[slices(shared, part.box or everything)]))
        return assemble(pieces, box, getattr(torch, entry.dtype)).clone()

    def read_slice(self, key: str, start: int, stop: int) -> Tensor:
        """The range ``start:stop`` of the tensor laid flat; only parts that overlap it are read.

        Raises:
            StaleFileError: it has no such tensor, or one of fewer elements.
            CorruptFileError: it is damaged.
        """
        entry = self._entry(key)
        numel = math.prod(entry.shape)
        if not 0 <= start <= stop <= numel:
            raise StaleFileError(f"{key} has {numel} elements, wanted are {start}:{stop}", [f"in {self.path}"])
        if _is_in_boxes(entry):
            return self.read(key).reshape(-1)[start:stop].clone()
        pieces = []
        for part in entry.parts:
            first, last = max(start, part.start), min(stop, part.stop)
            if first < last:
                pieces.append(self._load(key, entry, part).reshape(-1)[first - part.start : last - part.start])
        if not pieces:
            return torch.empty(0, dtype=getattr(torch, entry.dtype))
        return pieces[0].clone() if len(pieces) == 1 else torch.cat(pieces)

    def number(self, key: str) -> Number:
        """The number under ``key``.

        Raises:
            StaleFileError: it has no such number.
        """
        if key not in self.manifest.numbers:
            raise self._unknown("number", key, self.manifest.numbers)
        return self.manifest.numbers[key]

    def amount(self, key: str) -> float:
        """The number under ``key``, which counts something; 0 where there is none, or None.

        Raises:
            CorruptFileError: it is text, below 0, or not finite.
        """
        number = self.manifest.numbers.get(key) or 0
        if not isinstance(number, int | float) or not 0 <= number < math.inf:
            raise damaged(self.path, f"{MANIFEST} says that {key} is {number!r}, which counts nothing")
        return number

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of the whole tensor.

        Raises:
            StaleFileError: it has no such tensor.
        """
        return self._entry(key).shape

    def require(self, fingerprints: Mapping[str, str]) -> None:
        """Refuse a checkpoint of something else.

        Raises:
            StaleFileError: one of ``fingerprints`` (a new plan's is best left out) is not the one that was saved.
        """
        saved = self.manifest.fingerprints
        wrong = [
            f"{name}: the checkpoint has {saved.get(name, 'none')}, this run has {fingerprint}"
            for name, fingerprint in fingerprints.items()
            if saved.get(name) != fingerprint
        ]
        if wrong:
            raise StaleFileError(f"{self.path} belongs to another {wrong[0].split(':')[0]}", wrong)

    def verify(self) -> None:
        """Read every byte and compare every hash.

        Raises:
            CorruptFileError: it is damaged; the first fault is named.
        """
        for folder, files in self.manifest.folders.items():
            end = 0
            for location in sorted(self._located(folder).values(), key=lambda location: location.offset):
                if location.offset != end:
                    raise damaged(self.path, f"{folder}/{DATA_FILE}: bytes {end}:{location.offset} belong to nothing")
                end += location.length
            if end != files.data_bytes:
                raise damaged(self.path, f"{folder}/{DATA_FILE}: bytes {end}:{files.data_bytes} belong to nothing")
        checked = set()
        for key, part in self._parts():
            if (part.folder, part.stored, part.sha256) not in checked:
                checked.add((part.folder, part.stored, part.sha256))
                self._bytes(key, part)

    def _parts(self) -> Iterator[tuple[str, StoredPart]]:
        for key, entry in self.manifest.tensors.items():
            yield from ((key, part) for part in entry.parts)

    def _entry(self, key: str) -> TensorEntry:
        if key not in self.manifest.tensors:
            raise self._unknown("tensor", key, self.manifest.tensors)
        return self.manifest.tensors[key]

    def _unknown(self, what: str, key: str, names: Mapping[str, object]) -> StaleFileError:
        close = difflib.get_close_matches(key, list(names), n=1)
        hint = f"it has {len(names)} {what}s" + (f", among them {close[0]}" if close else "")
        return StaleFileError(f"{self.path} has no {what} {key}", [hint], ["the model that it was saved of"])

    def _located(self, folder: str) -> Mapping[str, Location]:
        if folder not in self._locations:
            name = f"{folder}/{METADATA_FILE}"
            content = read_file(self.path, name)
            compare(self.path, name, content, self.manifest.folders[folder].metadata_sha256)
            try:
                self._locations[folder] = locations_of(content)
            except ValueError as error:
                raise damaged(self.path, f"{name}: {error}") from None
        return self._locations[folder]

    def _bytes(self, key: str, part: StoredPart) -> bytes:
        location = self._located(part.folder).get(part.stored)
        name = f"{part.folder}/{DATA_FILE}"
        if location is None:
            raise damaged(self.path, f"{key}: {part.folder} has no tensor {part.stored}")
        content = read_file(self.path, name, location.offset, location.length)
        compare(self.path, f"{name}: {key}", content, part.sha256)
        return content

    def _load(self, key: str, entry: TensorEntry, part: StoredPart) -> Tensor:
        content = self._bytes(key, part)
        try:
            tensor = _tensor(content)
        except Exception as error:  # noqa: BLE001 - an archive that somebody made may raise anything
            raise damaged(self.path, f"{key}: not a tensor: {error}") from None
        actual = f"{str(tensor.dtype).removeprefix('torch.')}, {tensor.numel()} elements"
        expected = f"{entry.dtype}, {part.stop - part.start} elements"
        if actual != expected:
            raise damaged(self.path, f"{key}: {actual}; the manifest says {expected}")
        return tensor if part.box is None else tensor.reshape([len(interval) for interval in part.box])


def whole_state_dict(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Parameters and buffers by the model's own names, for its ``load_state_dict``.

    Raises:
        CorruptFileError: the checkpoint is damaged.
    """
    keys = [key for key in checkpoint.manifest.tensors if key.startswith(MODEL)]
    return {key.removeprefix(MODEL): checkpoint.read(key) for key in keys}


def _is_in_boxes(entry: TensorEntry) -> bool:
    return any(part.box is not None for part in entry.parts)


def _tensor(content: bytes) -> Tensor:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
            raise ValueError("it is compressed, which torch does not do")
    tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        raise ValueError(f"it holds a {type(tensor).__name__}")
    return tensor
