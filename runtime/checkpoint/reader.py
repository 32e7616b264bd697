"""A complete checkpoint, read piece by piece: nothing is given to anybody before its hash has been compared."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from planner.ir.box import Box, Interval, intersect, whole
from planner.ir.errors import MissingFileError, StaleFileError
from planner.ir.extras import extras, required
from runtime.checkpoint.folders import DATA_FILE, MANIFEST, complete_path, complete_steps
from runtime.checkpoint.manifest import (
    SAFETENSORS,
    Manifest,
    RankFiles,
    StoredPart,
    TensorEntry,
    check_place,
    compare,
    damaged,
    read_file,
    read_manifest,
)
from runtime.checkpoint.state import MODEL, Number
from runtime.checkpoint.writer import NAMES, bytes_of
from runtime.extra import RuntimeExtra
from runtime.pipeline.routing import Piece, assemble, slices

_MOST_HEAD_BYTES = 100_000_000
"""As the library has it."""


class TensorFolder(Protocol):
    """The tensors of a rank's folder; made as :class:`SafetensorsFolder` is."""

    files: ClassVar[tuple[str, ...]]

    def __init__(self, path: Path, name: str, files: RankFiles) -> None: ...

    def tensor(self, key: str, stored: str, sha256: str) -> Tensor:
        """What ``key`` calls ``stored``, its hash compared."""

    def require_nothing_else(self, names: set[str]) -> None:
        """Nothing is there but tensors of ``names``."""


class SafetensorsFolder:
    """The tensors of a rank's folder, each read when it is asked for.

    Args:
        path: of the checkpoint; the places of its files have been checked.
        name: of the folder in it.

    Raises:
        CorruptFileError: it is damaged.
    """

    files: ClassVar[tuple[str, ...]] = (DATA_FILE,)

    def __init__(self, path: Path, name: str, files: RankFiles) -> None:
        self._path = path
        self._name = f"{name}/{DATA_FILE}"
        length = int.from_bytes(read_file(path, self._name, 0, 8), "little")
        if length > _MOST_HEAD_BYTES:  # and of a large file not all is read to find that out
            raise damaged(path, f"{self._name}: its head would have {length} bytes")
        compare(path, f"{self._name}: its head", read_file(path, self._name, 0, 8 + length), files.sha256)
        try:
            # a file that is mapped would end the process where another job cuts it off
            self._file = safe_open(path / self._name, "pt", backend="pread")
        except (OSError, SafetensorError) as error:
            raise damaged(path, f"{self._name}: {error}") from None

    def tensor(self, key: str, stored: str, sha256: str) -> Tensor:
        """What ``key`` calls ``stored``, its hash compared."""
        try:
            tensor: Tensor = self._file.get_tensor(stored)  # type: ignore[no-untyped-call]  # of the library
        except (OSError, RuntimeError, SafetensorError) as error:
            raise damaged(self._path, f"{self._name}: {key}: {error}") from None
        compare(self._path, f"{self._name}: {key}", bytes_of(tensor), sha256)
        return tensor

    def require_nothing_else(self, names: set[str]) -> None:
        """Every byte of the file belongs to a tensor of ``names``, or to the head, which the library sees to."""
        if others := set(self._file.keys()) - names:  # type: ignore[no-untyped-call]  # of the library
            raise damaged(self._path, f"{self._name}: {min(others)} belongs to nothing")


def _folder_of(kept_as: str) -> type[TensorFolder]:
    """The folder of a rank whose tensors were kept so; other ways than today's are extras'."""
    if kept_as == SAFETENSORS:
        return SafetensorsFolder
    folders = (extra.rank_folder(kept_as) for extra in extras(RuntimeExtra))
    return required(folders, "runtime", f"checkpoints that were kept as {kept_as!r}")


class Checkpoint:
    """A complete checkpoint, which any plan may read: any number of ranks, each what it needs.

    Of the data files it reads and hashes only the tensors that are asked for, in the parts that were saved.

    Attributes:
        path: of its own folder.
        manifest: what it holds.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._folders: dict[str, TensorFolder] = {}

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
        manifest = read_manifest(path)
        for name, files in manifest.folders.items():
            data, *others = (f"{name}/{file}" for file in _folder_of(manifest.kept_as).files)
            for file in (data, *others):
                check_place(path, file)
            try:
                stored_bytes = (path / data).stat().st_size
            except OSError as error:  # another job has removed it just now
                raise damaged(path, f"{data} cannot be read: {error}") from None
            if stored_bytes != files.data_bytes:
                raise damaged(path, f"{data} has {stored_bytes} bytes, the manifest says {files.data_bytes}")
        return cls(path, manifest)

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
        return self._part(key, entry, entry.space).reshape(entry.shape)

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
        if not entry.is_flat:
            return self._part(key, entry, box)
        tensor = self.read(key)
        return tensor if box == everything else tensor[slices(box, everything)].clone()

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
        if entry.is_flat:
            return self._part(key, entry, (Interval(start, stop),))
        return self.read(key).reshape(-1)[start:stop].clone()

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

    def verify(self) -> None:
        """Read every byte and compare every hash.

        Raises:
            CorruptFileError: it is damaged; the first fault is named.
        """
        parts = ((key, part) for key, entry in self.manifest.tensors.items() for part in entry.parts)
        stored = {(part.folder, part.stored, part.sha256): key for key, part in parts}
        for folder in self.manifest.folders:
            self._opened(folder).require_nothing_else({name for owner, name, _ in stored if owner == folder})
        for (folder, name, sha256), key in stored.items():
            self._opened(folder).tensor(key, name, sha256)

    def _entry(self, key: str) -> TensorEntry:
        if key not in self.manifest.tensors:
            raise self._unknown("tensor", key, self.manifest.tensors)
        return self.manifest.tensors[key]

    def _unknown(self, what: str, key: str, names: Mapping[str, object]) -> StaleFileError:
        close = difflib.get_close_matches(key, list(names), n=1)
        hint = f"it has {len(names)} {what}s" + (f", among them {close[0]}" if close else "")
        return StaleFileError(f"{self.path} has no {what} {key}", [hint], ["the model that it was saved of"])

    def _opened(self, name: str) -> TensorFolder:
        if name not in self._folders:
            self._folders[name] = _folder_of(self.manifest.kept_as)(self.path, name, self.manifest.folders[name])
        return self._folders[name]

    def _part(self, key: str, entry: TensorEntry, box: Box) -> Tensor:
        """A box of where the parts of a tensor lie, put together from those that overlap it."""
        pieces: list[Piece] = []
        for part in entry.parts:
            if (shared := intersect(part.box, box)) is not None:
                tensor = self._load(key, entry, part)
                pieces.append((shared, tensor if shared == part.box else tensor[slices(shared, part.box)]))
        tensor = assemble(pieces, box, getattr(torch, entry.dtype))
        return tensor if tensor.nbytes == tensor.untyped_storage().nbytes() else tensor.clone()

    def _load(self, key: str, entry: TensorEntry, part: StoredPart) -> Tensor:
        tensor = self._opened(part.folder).tensor(key, part.stored, part.sha256).reshape(-1)
        dtype = getattr(torch, entry.dtype)
        shape = tuple(map(len, part.box))
        if dtype not in NAMES and tensor.nbytes % dtype.itemsize == 0:
            tensor = tensor.view(dtype)
        if (tensor.dtype, tensor.numel()) != (dtype, math.prod(shape)):
            actual = f"{str(tensor.dtype).removeprefix('torch.')}, {tensor.numel()} elements"
            raise damaged(self.path, f"{key}: {actual}; the manifest says {entry.dtype}, {math.prod(shape)} elements")
        return tensor.reshape(shape)


def whole_state_dict(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Parameters and buffers by the model's own names, for its ``load_state_dict``.

    Raises:
        CorruptFileError: the checkpoint is damaged.
    """
    keys = [key for key in checkpoint.manifest.tensors if key.startswith(MODEL)]
    return {key.removeprefix(MODEL): checkpoint.read(key) for key in keys}
