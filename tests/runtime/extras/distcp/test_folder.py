"""Checkpoints of earlier releases, which kept tensors as torch.distributed.checkpoint does: read, and never trusted."""

from __future__ import annotations

import hashlib
import io
import json
import math
import pickle
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from planner.ir.box import Interval
from planner.ir.errors import CorruptFileError
from runtime.checkpoint import Checkpoint
from runtime.checkpoint.folders import MANIFEST, MANIFEST_HASH
from runtime.checkpoint.manifest import manifest_hash
from runtime.extras.distcp.folder import DATA_FILE, METADATA_FILE, places_of
from tests.runtime.checkpoint.cases import assert_flips_are_found

KEPT = Path(__file__).parents[3] / "data" / "checkpoints" / "torch"
"""Of two ranks, written by the last release that wrote such."""


class Runs:
    """Unpickled the usual way, calls what it is given."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def metadata_with(info: Any) -> bytes:
    return pickle.dumps(Metadata({}, storage_data={MetadataIndex("model/a"): info}))


def archive_of(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def compressed(archive: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for record in old.infolist():
            new.writestr(record.filename, old.read(record))
    return file.getvalue()


def forged(folder: Path, archive: bytes, metadata: bytes | None = None) -> Checkpoint:
    """A checkpoint of one tensor of 12 numbers, of which every hash agrees, as one with bad intent would write it."""
    rank = folder / "step-1" / "rank-0"
    rank.mkdir(parents=True, exist_ok=True)
    if metadata is None:
        metadata = metadata_with(_StorageInfo(DATA_FILE, 0, len(archive)))
    (rank / DATA_FILE).write_bytes(archive)
    (rank / METADATA_FILE).write_bytes(metadata)
    hash_of = [hashlib.sha256(content).hexdigest() for content in (metadata, archive)]
    part = ["rank-0", "model/a", 0, 12, hash_of[1]]
    head = {"halopipe": "checkpoint", "version": 1, "step": 1, "num_ranks": 1, "torch_version": "2.13.0"}
    lists = {"fingerprints": {}, "folders": {"rank-0": [hash_of[0], len(archive)]}, "numbers": {}}
    content = json.dumps({**head, **lists, "tensors": {"model/a": ["float32", [12], part]}}).encode()
    (rank.parent / MANIFEST).write_bytes(content)
    (rank.parent / MANIFEST_HASH).write_bytes(manifest_hash(content))
    return Checkpoint.open(folder)


def test_what_they_hold_is_read_whole_in_boxes_and_in_slices() -> None:
    checkpoint = Checkpoint.open(KEPT)
    checkpoint.verify()
    w = torch.arange(60.0).view(6, 5, 2)
    moment = torch.arange(24.0).view(4, 6)
    flat = torch.arange(12.0)
    expected: dict[str, Tensor] = {
        "model/w": w,
        "optimizer/w/exp_avg": moment,
        "model/scalar": torch.tensor(2.5),
        "model/empty": torch.empty(0, 3),
        "model/transposed": flat.view(3, 4).t(),
        "model/tied": flat,
        "model/tied again": flat,
    }
    names = "float64 bfloat16 float16 int64 uint8 bool complex64 complex128 float8_e4m3fn uint16"
    for dtype in names.split():
        expected[f"model/{dtype}"] = torch.arange(6).view(2, 3).to(getattr(torch, dtype))
    assert {*checkpoint.tensors()} == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(checkpoint.read(key), tensor), key
        assert checkpoint.read(key).dtype is tensor.dtype
    box = (Interval(2, 5), Interval(1, 4), Interval(0, 1))
    assert torch.equal(checkpoint.read_box("model/w", box), w[2:5, 1:4, :1])
    assert torch.equal(checkpoint.read_slice("optimizer/w/exp_avg", 8, 13), moment.flatten()[8:13])
    assert [checkpoint.number(key) for key in ("run/step", "run/plan", "scheduler/w/best")] == [5, "läuft", math.inf]


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = Path(shutil.copytree(KEPT, tmp_path / "kept"))
    assert_flips_are_found(path, path, num_flips=200)


def test_bytes_that_belong_to_nothing_are_found(tmp_path: Path) -> None:
    archive = archive_of(torch.ones(12))
    place = metadata_with(_StorageInfo(DATA_FILE, 0, len(archive)))
    with pytest.raises(CorruptFileError) as caught:
        forged(tmp_path, archive + b"more", place).verify()
    assert caught.value.details == ("rank-0/__0_0.distcp: 4 bytes belong to nothing",)


@pytest.mark.parametrize(
    "archive",
    [
        lambda target: archive_of(Runs(Path.touch, target)),
        lambda target: archive_of({"a": torch.ones(12)}),
        lambda target: archive_of(torch.ones(3, 4).to_sparse()),
        lambda target: archive_of(torch.ones(11)),
        lambda target: archive_of(torch.ones(12, dtype=torch.float64)),
        lambda target: compressed(archive_of(torch.zeros(3, 4))),
        lambda target: b"PK nothing",
    ],
    ids=["runs code", "not a tensor", "sparse", "shape", "dtype", "compressed", "no archive"],
)
def test_an_archive_with_bad_intent_is_refused(tmp_path: Path, archive: Callable[[Path], bytes]) -> None:
    target = tmp_path / "made by the archive"
    assert torch.equal(forged(tmp_path, archive_of(torch.ones(12))).read("model/a"), torch.ones(12))
    with pytest.raises(CorruptFileError) as caught:
        forged(tmp_path, archive(target)).read("model/a")
    assert "model/a: " in caught.value.details[0]
    assert "SHA-256" not in caught.value.details[0]
    assert not target.exists()


def test_a_metadata_pickle_with_bad_intent_runs_no_code(tmp_path: Path) -> None:
    target = tmp_path / "made by the pickle"
    with pytest.raises(CorruptFileError) as caught:
        forged(tmp_path, archive_of(torch.ones(12)), pickle.dumps(Runs(Path.touch, target))).read("model/a")
    assert caught.value.details[0].startswith("rank-0/.metadata: not readable: it names")
    assert not target.exists()


@pytest.mark.parametrize(
    "payload",
    [
        lambda target: Runs(open, str(target), "w"),
        lambda target: Runs(eval, f"open({str(target)!r}, 'w')"),
        lambda target: Metadata({}, storage_data=Runs(Path.touch, target)),
        lambda target: Metadata({}, storage_data={MetadataIndex("w"): Runs(getattr, target, "touch")}),
        lambda target: Runs(torch.load, str(target)),
    ],
    ids=["open", "eval", "inside", "deep inside", "of torch"],
)
def test_a_pickle_that_runs_code_runs_none(tmp_path: Path, payload: Any) -> None:
    target = tmp_path / "made by the pickle"
    content = pickle.dumps(payload(target))
    with pytest.raises(ValueError, match="not on the list"):
        places_of(content)
    assert not target.exists()


@pytest.mark.parametrize("name", ["Size.__class__", "float32.__reduce__", "Metadata.__init__", "os"])
def test_an_attribute_of_something_allowed_is_not_allowed(name: str) -> None:
    module = "torch.distributed.checkpoint.metadata" if name.startswith("Metadata") else "torch"
    names = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    with pytest.raises(ValueError, match="not on the list"):
        places_of(b"\x80\x04" + names + b"\x93.")


def test_the_classes_of_torch_are_not_changed() -> None:
    class_state = b"\x80\x02c__main__\nX\n.".replace(b"__main__\nX", b"torch.distributed.checkpoint.metadata\nMetadata")
    changed = class_state[:-1] + b"N}\x8c\x07changedK\x01s\x86b."  # (None, {"changed": 1}) set on the class itself
    assert pickle.loads(changed) is Metadata
    assert Metadata.changed == 1
    del Metadata.changed
    with pytest.raises(ValueError, match="not readable"):
        places_of(changed)
    assert not hasattr(Metadata, "changed")


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04Nr\x00\x00\x00\x02.",  # an object with the number 2**25
        b"\x80\x04Np33554432\n.",
        b"\x80\x05\x96" + (2**26).to_bytes(8, "little") + b".",  # an array of so many bytes, which do not follow
    ],
    ids=["number", "number in digits", "length"],
)
def test_a_few_bytes_take_no_more_memory_than_they_are(content: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="not readable"):
            places_of(content)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("path", ["../rank-1/" + DATA_FILE, "/etc/passwd", "", ".", "__1_0.distcp", None, 3])
def test_a_tensor_lies_in_the_data_file_of_its_folder_only(path: Any) -> None:
    with pytest.raises(ValueError, match=r"the only file of a rank's folder is '__0_0\.distcp'"):
        places_of(metadata_with(_StorageInfo(path, 0, 10)))


@pytest.mark.parametrize("place", [(-1, 10), (0, -1), (True, 10), (0, 10.0), (None, 1)])
def test_a_place_is_two_whole_numbers(place: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="a tensor lies at"):
        places_of(metadata_with(_StorageInfo(DATA_FILE, *place)))


@pytest.mark.every_case
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a pickle",
        b"\x80\x04]\x94.",
        pickle.dumps({"storage_data": {}}),
        pickle.dumps(Metadata({})),
        metadata_with(None),
        metadata_with(_StorageInfo(DATA_FILE, 0, 1, ["gzip"])),
        pickle.dumps(Metadata({}, storage_data={"w": _StorageInfo(DATA_FILE, 0, 1)})),
        pickle.dumps(Metadata({}, storage_data={MetadataIndex(3): _StorageInfo(DATA_FILE, 0, 1)})),
        pickle.dumps(Metadata),
    ],
)
def test_what_is_no_metadata_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError):
        places_of(content)


def test_a_cut_off_file_is_refused() -> None:
    content = (KEPT / "step-5" / "rank-0" / METADATA_FILE).read_bytes()
    for length in range(0, len(content), 7):
        with pytest.raises(ValueError):
            places_of(content[:length])
