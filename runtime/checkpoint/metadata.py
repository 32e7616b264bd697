"""Where tensors lie in the data file of a rank's folder, read from torch's ``.metadata`` without running its code.

``.metadata`` is a pickle, and a pickle may name any function and call it.  Here it may name only what torch 2.13
writes there, and not even that is called: each name stands for a record of this module that remembers what it is given.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

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
        found = _Reader(io.BytesIO(content)).load()
    except Exception as error:  # noqa: BLE001 - a damaged pickle may raise anything
        raise ValueError(f"not readable: {error}") from None
    entries = _field(found, "storage_data")
    if not isinstance(entries, dict):
        raise ValueError("it has no storage_data")
    return {_text(_field(index, "fqn")): _location(info) for index, info in entries.items()}


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
