"""Checkpoints of earlier releases, which kept the tensors of a rank as torch.distributed.checkpoint does.

    rank-0/.metadata        a pickle: where tensors lie
    rank-0/__0_0.distcp     an archive of ``torch.save`` for each tensor, one after another

A pickle may name any function and call it.  Here it may name only what torch 2.13 writes there, and not even that is
called: each name stands for a record of this module that remembers what it is given.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from runtime.checkpoint.manifest import RankFiles, compare, damaged, read_file

METADATA_FILE = ".metadata"
DATA_FILE = "__0_0.distcp"
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


class TorchFolder:
    """The tensors of a rank's folder, each read when it is asked for; arguments and errors as of ``SafetensorsFolder``.

    Attributes:
        places: offset and length of an archive in the data file, by the names of the tensors.
    """

    files: ClassVar[tuple[str, ...]] = (DATA_FILE, METADATA_FILE)

    def __init__(self, path: Path, name: str, files: RankFiles) -> None:
        self._path = path
        self._name = f"{name}/{DATA_FILE}"
        content = read_file(path, f"{name}/{METADATA_FILE}")
        compare(path, f"{name}/{METADATA_FILE}", content, files.sha256)
        try:
            self.places = places_of(content)
        except ValueError as error:
            raise damaged(path, f"{name}/{METADATA_FILE}: {error}") from None
        self._num_bytes = files.data_bytes

    def tensor(self, key: str, stored: str, sha256: str) -> Tensor:
        """What ``key`` calls ``stored``, its hash compared."""
        if stored not in self.places:
            raise damaged(self._path, f"{key}: {self._name} has no tensor {stored}")
        content = read_file(self._path, self._name, *self.places[stored])
        compare(self._path, f"{self._name}: {key}", content, sha256)
        try:
            return _tensor_of(content)
        except Exception as error:  # noqa: BLE001 - an archive that somebody made may raise anything
            raise damaged(self._path, f"{key}: not a tensor: {error}") from None

    def require_nothing_else(self, names: set[str]) -> None:
        """Every byte of the data file belongs to a tensor of ``names``."""
        others = self._num_bytes - sum(self.places[name][1] for name in names & self.places.keys())
        if others:
            raise damaged(self._path, f"{self._name}: {others} bytes belong to nothing")


def places_of(content: bytes) -> Mapping[str, tuple[int, int]]:
    """Offsets and lengths by the names of the stored tensors.

    Args:
        content: of a ``.metadata`` file; its hash need not be compared before.

    Raises:
        ValueError: it is not what those releases wrote, or names something that is not on the list.
    """
    try:
        _require_bounded(content)
        metadata = _Reader(io.BytesIO(content)).load()
    except Exception as error:  # noqa: BLE001 - a damaged pickle may raise anything
        raise ValueError(f"not readable: {error}") from None
    rows = _field(metadata, "storage_data")
    if not isinstance(rows, dict):
        raise ValueError("it has no storage_data")
    places = {}
    for index, info in rows.items():
        name = _field(index, "fqn")
        path = _field(info, "relative_path")
        offset = _field(info, "offset")
        length = _field(info, "length")
        if not isinstance(name, str) or path != DATA_FILE:
            raise ValueError(f"{name!r} lies in {path!r}; the only file of a rank's folder is {DATA_FILE!r}")
        if _field(info, "transform_descriptors"):
            raise ValueError("tensors are transformed, by torch's extensions")
        if not all(type(number) is int and number >= 0 for number in (offset, length)):
            raise ValueError(f"a tensor lies at {offset!r}, {length!r} bytes long")
        places[name] = offset, length
    return places


def _require_bounded(content: bytes) -> None:
    """Refuses a pickle that asks for more memory than its own size.

    It may number what it keeps as it likes, and say that it is longer than it is; Python's reader makes room first.

    Raises:
        ValueError: it does so.
    """
    for code, argument, _ in pickletools.genops(content):
        if code.name in ("PUT", "BINPUT", "LONG_BINPUT") and not 0 <= int(argument or 0) < len(content):
            raise ValueError(f"it numbers an object {argument}, of {len(content)} bytes")


class _Record:
    """Stands for an object of torch: it keeps the fields that it is given, and does nothing."""

    fields: Any = None

    def __init__(self, *arguments: Any) -> None:
        """Called where torch's function or class would be."""

    def __setstate__(self, state: Any) -> None:
        self.fields = state


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


def _tensor_of(content: bytes) -> Tensor:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
            raise ValueError("it is compressed, which torch does not do")
    tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        raise ValueError(f"it holds a {type(tensor).__name__}")
    return tensor
