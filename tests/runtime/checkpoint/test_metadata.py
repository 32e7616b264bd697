from __future__ import annotations

import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from runtime.checkpoint.reader import DATA_FILE, locations_of
from tests.runtime.checkpoint.cases import alone, of_two_ranks, save_all


class Runs:
    """Unpickled the usual way, calls what it is given."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def metadata_with(info: Any) -> bytes:
    return pickle.dumps(Metadata({}, storage_data={MetadataIndex("w"): info}))


def test_locations_are_those_of_torch(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.ones(3, dtype=dtype) for dtype in (torch.bfloat16, torch.bool, torch.complex128)}
    content = (save_all(tmp_path, 1, [alone(tensors)]) / "rank-0" / ".metadata").read_bytes()
    expected = {index.fqn: (info.offset, info.length) for index, info in pickle.loads(content).storage_data.items()}
    assert {name: (place.offset, place.length) for name, place in locations_of(content).items()} == expected
    assert expected.keys() == tensors.keys()


def test_no_path_of_this_machine_is_written(tmp_path: Path) -> None:
    content = (save_all(tmp_path, 1, of_two_ranks()) / "rank-0" / ".metadata").read_bytes()
    assert tmp_path.name.encode() not in content
    assert b"PosixPath" not in content


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
        locations_of(content)
    assert not target.exists()


@pytest.mark.parametrize("name", ["Size.__class__", "float32.__reduce__", "Metadata.__init__", "os"])
def test_an_attribute_of_something_allowed_is_not_allowed(name: str) -> None:
    module = "torch.distributed.checkpoint.metadata" if name.startswith("Metadata") else "torch"
    names = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    with pytest.raises(ValueError, match="not on the list"):
        locations_of(b"\x80\x04" + names + b"\x93.")


def test_the_classes_of_torch_are_not_changed() -> None:
    class_state = b"\x80\x02c__main__\nX\n.".replace(b"__main__\nX", b"torch.distributed.checkpoint.metadata\nMetadata")
    changed = class_state[:-1] + b"N}\x8c\x07changedK\x01s\x86b."  # (None, {"changed": 1}) set on the class itself
    assert pickle.loads(changed) is Metadata
    assert Metadata.changed == 1
    del Metadata.changed
    with pytest.raises(ValueError, match="not readable"):
        locations_of(changed)
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
            locations_of(content)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("path", ["../rank-1/" + DATA_FILE, "/etc/passwd", "", ".", "__1_0.distcp", None, 3])
def test_a_tensor_lies_in_the_data_file_of_its_folder_only(path: Any) -> None:
    with pytest.raises(ValueError, match=r"the only file of a rank's folder is '__0_0\.distcp'"):
        locations_of(metadata_with(_StorageInfo(path, 0, 10)))


@pytest.mark.parametrize("place", [(-1, 10), (0, -1), (True, 10), (0, 10.0), (None, 1)])
def test_a_place_is_two_whole_numbers(place: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="a tensor lies at"):
        locations_of(metadata_with(_StorageInfo(DATA_FILE, *place)))


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
        locations_of(content)


def test_a_cut_off_file_is_refused(tmp_path: Path) -> None:
    content = (save_all(tmp_path, 1, of_two_ranks()) / "rank-0" / ".metadata").read_bytes()
    for length in range(0, len(content), 7):
        with pytest.raises(ValueError):
            locations_of(content[:length])
