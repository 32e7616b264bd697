"""One rank's folder of a checkpoint, in the format of torch.distributed.checkpoint, hashed while it is written."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from cuda_ops._torch import storage_place
from planner.ir.box import volume
from planner.ir.errors import CheckpointError
from runtime.checkpoint.folders import force_to_disk, rank_name
from runtime.checkpoint.manifest import Manifest, RankFiles, StoredPart, TensorEntry
from runtime.checkpoint.reader import DATA_FILE, METADATA_FILE
from runtime.checkpoint.state import RankState


def write_rank(
    path: Path, step: int, state: RankState, rank: int, num_ranks: int, fingerprints: Mapping[str, str]
) -> Manifest:
    """Write what this rank saves to its folder in ``path``, force it to disk, and say what is there.

    Raises:
        OSError: the disk is full, or ``path`` is not there.
        CheckpointError: a tensor cannot be saved.
    """
    folder = path / rank_name(rank)
    folder.mkdir()
    plain = {key: _plain(key, state.tensors[key]) for key in saved_tensors(state)}
    stored = _stored(plain)
    tensors = {key: plain[key] for key in dict.fromkeys(stored.values())}
    writer = _HashingWriter(folder)
    # What torch.distributed.checkpoint.save does for one process, without its search for a process group.
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, writer.storage_meta(), True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])
    force_to_disk(folder)
    files = RankFiles(
        hashlib.sha256((folder / METADATA_FILE).read_bytes()).hexdigest(), (folder / DATA_FILE).stat().st_size
    )
    entries = {key: _entry(state, key, folder.name, name, writer.sha256[name]) for key, name in stored.items()}
    numbers = {key: state.numbers[key] for key in sorted(state.writes & state.numbers.keys())}
    torch_version = str(torch.__version__)
    return Manifest(step, num_ranks, torch_version, dict(fingerprints), {folder.name: files}, numbers, entries)


def saved_tensors(state: RankState) -> list[str]:
    """Keys of the tensors that a rank writes; an empty slice or box of something is left out."""
    keys = sorted(state.writes & state.tensors.keys())
    return [
        key
        for key in keys
        if (key not in state.slices or _is_worth_saving(*state.slices[key]))
        and (key not in state.boxes or volume(state.boxes[key][0]))
    ]


def place_of(tensor: Tensor) -> tuple[object, ...]:
    """Equal for tensors that are the same elements in memory; empty for one without elements."""
    place = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
    return place if tensor.numel() else ()


class _HashingWriter(FileSystemWriter):
    """Writes a folder for one process; keeps the hash of each tensor's bytes, taken before they reach the disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, overwrite=False)
        self.sha256: dict[str, str] = {}

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # torch's own names the path on this machine

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results, offset = [], 0
        with open(Path(self.path) / DATA_FILE, "xb") as file:
            for item in plan.items:
                stream = _HashingStream(file)
                tensor = cast(Tensor, planner.resolve_data(item))  # nothing else is planned
                torch.save(_compact(tensor), cast(IO[bytes], stream))  # of which torch calls write and flush alone
                stream.check()
                location = storage_place(DATA_FILE, offset, stream.length)
                results.append(WriteResult(index=item.index, size_in_bytes=stream.length, storage_data=location))
                self.sha256[item.index.fqn] = stream.sha256.hexdigest()
                offset += stream.length
            file.flush()
            os.fsync(file.fileno())
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


class _HashingStream:
    """What ``torch.save`` writes to.

    It never raises there: an exception on its way through torch's archive writer is replaced by one about positions.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.sha256 = hashlib.sha256()
        self.length = 0
        self._file = file
        self._failure: OSError | None = None

    def write(self, data: memoryview | bytes) -> int:
        count = memoryview(data).nbytes
        if self._failure is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._failure = error
            self.sha256.update(data)
        self.length += count
        return count

    def flush(self) -> None:
        """Leave that to the file."""

    def check(self) -> None:
        """Raise what the file raised."""
        if self._failure is not None:
            raise self._failure


def _is_worth_saving(start: int, stop: int, shape: tuple[int, ...]) -> bool:
    return start < stop or not math.prod(shape)


def _stored(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """By key, the name under which its tensor is stored: that of the first key that has the same tensor."""
    first: dict[object, str] = {}
    return {key: first.setdefault(place_of(tensor) or key, key) for key, tensor in tensors.items()}


def _plain(key: str, tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    if type(plain) is not Tensor or plain.layout is not torch.strided or plain.is_meta or plain.is_quantized:
        kind = f"{type(plain).__name__}, {plain.layout}, on {plain.device.type}"
        raise CheckpointError(f"{key} cannot be saved", [f"it is a {kind}; ordinary dense tensors can"])
    return plain


def _compact(tensor: Tensor) -> Tensor:
    """On the CPU, with a storage of its own size."""
    tensor = tensor.cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _entry(state: RankState, key: str, folder: str, stored: str, sha256: str) -> TensorEntry:
    tensor = state.tensors[key]
    start, stop, shape = state.slices.get(key, (0, tensor.numel(), tuple(tensor.shape)))
    box = None
    if key in state.boxes:
        box, shape = state.boxes[key]
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorEntry(dtype, tuple(shape), (StoredPart(folder, stored, start, stop, sha256, box),))
