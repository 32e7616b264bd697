"""One rank's folder of a checkpoint: a file of safetensors, of which one tensor after another is hashed and written.

    8 bytes    length of the head
    head       {"model/0.bias": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}, ...}
    tensors    the widest numbers first, so that each lies at a multiple of its size

The library has no writer that takes one tensor at a time, and raises no error of the system's where a disk is full.
Numbers that the format has no name for are kept as such that it has, with one dim more, and the head says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from planner.ir.errors import CheckpointError
from runtime.checkpoint.folders import DATA_FILE, force_to_disk, rank_name
from runtime.checkpoint.manifest import SAFETENSORS, Manifest, RankFiles, StoredPart, TensorEntry
from runtime.checkpoint.state import BoxOf, RankState, Slice

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Of dtypes that readers of the format know."""


def write_rank(
    path: Path, step: int, state: RankState, rank: int, num_ranks: int, fingerprints: Mapping[str, str]
) -> Manifest:
    """Write what this rank saves to its folder in ``path``, force it to disk, and say what is there.

    Takes the memory of one tensor where that is not contiguous, or not on the CPU.

    Raises:
        OSError: the disk is full, or ``path`` is not there.
        CheckpointError: a tensor cannot be saved.
    """
    folder = path / rank_name(rank)
    folder.mkdir()
    stored = saved_tensors(state)
    tensors = {name: _plain(name, state.tensors[name]) for name in sorted({*stored.values()})}
    tensors = dict(sorted(tensors.items(), key=lambda row: -row[1].itemsize))
    head = _head(tensors)
    digests = dict[str, str]()
    with open(folder / DATA_FILE, "xb") as file:
        file.write(head)
        for name, tensor in tensors.items():
            content = bytes_of(tensor)
            digests[name] = hashlib.sha256(content).hexdigest()
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
        num_bytes = file.tell()
    force_to_disk(folder)
    return Manifest(
        step,
        num_ranks,
        str(torch.__version__),
        dict(fingerprints),
        {folder.name: RankFiles(hashlib.sha256(head).hexdigest(), num_bytes)},
        {key: state.numbers[key] for key in sorted(state.writes & state.numbers.keys())},
        {key: _entry(state, key, folder.name, name, digests[name]) for key, name in stored.items()},
        SAFETENSORS,
    )


def saved_tensors(state: RankState) -> dict[str, str]:
    """By the keys of the tensors that a rank writes, each key's first that has the same elements in memory.

    An empty slice or box of something is left out.
    """
    parts: dict[str, Slice | BoxOf] = {**state.slices, **state.boxes}
    first: dict[object, str] = {}
    stored = {}
    for key in sorted(state.writes & state.tensors.keys()):
        tensor = state.tensors[key]
        if not tensor.numel() and key in parts and 0 not in parts[key][-1]:
            continue
        place: object = key
        if tensor.numel() and tensor.layout is torch.strided:
            where = tensor.data_ptr(), tensor.device, tensor.is_conj(), tensor.is_neg()
            place = *where, tensor.dtype, tensor.shape, tensor.stride()
        stored[key] = first.setdefault(place, key)
    return stored


def bytes_of(tensor: Tensor) -> memoryview:
    """The elements of a tensor in order; without a copy where they lie so on the CPU."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _head(tensors: Mapping[str, Tensor]) -> bytes:
    rows: dict[str, object] = {}
    notes: dict[str, str] = {}
    start = 0
    for name, tensor in tensors.items():
        kept_as = tensor.dtype.to_real() if tensor.dtype.is_complex else tensor.dtype
        kept_as = kept_as if kept_as in NAMES else torch.uint8
        shape = [*tensor.shape]
        if kept_as != tensor.dtype:
            shape.append(tensor.itemsize // kept_as.itemsize)
            notes[name] = str(tensor.dtype).removeprefix("torch.")
        stop = start + tensor.nbytes
        rows[name] = {"dtype": NAMES[kept_as], "shape": shape, "data_offsets": [start, stop]}
        start = stop
    head = json.dumps({**({"__metadata__": notes} if notes else {}), **rows}, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head


def _plain(key: str, tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    if type(plain) is not Tensor or plain.layout is not torch.strided or plain.is_meta or plain.is_quantized:
        kind = f"{type(plain).__name__}, {plain.layout}, on {plain.device.type}"
        raise CheckpointError(f"{key} cannot be saved", [f"it is a {kind}; ordinary dense tensors can"])
    return plain


def _entry(state: RankState, key: str, folder: str, stored: str, sha256: str) -> TensorEntry:
    tensor = state.tensors[key]
    start, stop, shape = state.slices.get(key, (0, tensor.numel(), tuple(tensor.shape)))
    part = StoredPart(folder, stored, start, stop, sha256)
    if key in state.boxes:
        box, shape = state.boxes[key]
        starts, stops = (tuple(getattr(each, end) for each in box) for end in ("start", "stop"))
        part = part._replace(start=starts, stop=stops)
    return TensorEntry(str(tensor.dtype).removeprefix("torch."), tuple(shape), (part,))
