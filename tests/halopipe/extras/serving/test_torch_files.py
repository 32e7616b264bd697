"""Files of torch.save: tensors as torch reads them, and none that lie about themselves."""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halopipe.extras.serving.torch_files import read_tensors
from planner.ir.errors import FormatError

MOST = 2**20
X = torch.arange(12.0).reshape(3, 4)
REALS = ["float64", "float32", "float16", "bfloat16"]
WHOLES = ["int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64"]


def saved(folder: Path, content: Any) -> Path:
    path = folder / "x.pt"
    torch.save(content, path)
    return path


def changed(path: Path, change: Callable[[str, bytes], bytes | None], *, method: int = zipfile.ZIP_STORED) -> Path:
    """The archive at ``path``, each file of which is what ``change`` makes of its name and content; None: left out."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in files.items():
            now = change(name.partition("/")[2], content)
            if now is not None:
                archive.writestr(name, now)
    return path


def pickled(path: Path, content: bytes) -> Path:
    return changed(path, lambda name, old: content if name == "data.pkl" else old)


@pytest.mark.every_case
@pytest.mark.parametrize("name", [*REALS, *WHOLES, "bool", "complex128", "complex64"])
def test_tensors_are_what_torch_reads(name: str, tmp_path: Path) -> None:
    dtype: torch.dtype = getattr(torch, name)
    whole = X.to(dtype)
    content = OrderedDict(whole=whole, turned=whole.T, part=whole[1:, ::2], wide=whole[:1].expand(5, 4))
    content["empty"] = whole[:0]
    content["number"] = whole[2, 3]
    if dtype.is_floating_point:
        content["parameter"] = nn.Parameter(whole)
    found = read_tensors(saved(tmp_path, content), "inputs", MOST)
    assert list(found) == list(content)
    for key, expected in content.items():
        assert found[key].dtype == dtype
        assert found[key].tolist() == expected.tolist()
    assert read_tensors(saved(tmp_path, whole), "inputs", MOST)["inputs"].tolist() == whole.tolist()


@pytest.mark.every_case
@pytest.mark.parametrize(
    "content",
    [
        "text",
        {"x": "text"},
        {"x": [X]},
        {1: X},
        {"x": X.to_sparse()},
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, device="meta"),
        Path("x"),
        {"x": nn.ParameterList([X])},
    ],
)
def test_what_holds_something_else_is_refused(content: Any, tmp_path: Path) -> None:
    with pytest.raises(FormatError):
        read_tensors(saved(tmp_path, content), "inputs", MOST)


class Called:
    """Its pickle calls a function."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> Any:
        return self.parts[0], self.parts[1:]


def nested(depth: int) -> bytes:
    """Tuples that hold the same tuple twice: to write or hash the last one takes years."""
    return b"\x80\x02}(" + b")" + b"q\0h\0\x86" * depth + b"K\1u."


@pytest.mark.timeout(20)
@pytest.mark.every_case
@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Called(bytearray, 10**11), 2),
        pickle.dumps(Called(print, "called"), 2),
        pickle.dumps(Called(OrderedDict, [(1, 2)]), 2),
        b"\x80\x02K\1r\xff\xff\xff\x7f.",
        b"\x80\x02X\xff\xff\xff\x7f",
        nested(60),
        nested(60).replace(b"K\1u.", b"."),
        b"\x80\x02" + b"}" * 2**17 + b".",
        b"\x80\x02}",
        b"\x80\x02.",
        b"\x80\x02u.",
        b"\x80\x02h\5.",
        b"",
    ],
)
def test_a_pickle_calls_nothing_and_takes_no_more_than_its_bytes(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FormatError):
        read_tensors(pickled(saved(tmp_path, X), content), "inputs", MOST)
    assert capsys.readouterr().out == ""


def test_a_storage_is_no_larger_than_its_file(tmp_path: Path) -> None:
    short = changed(saved(tmp_path, X), lambda name, old: old[:-4] if name == "data/0" else old)
    with pytest.raises(RuntimeError, match="out of bounds"):
        read_tensors(short, "inputs", MOST)
    for numbers in (None, bytes(2 * MOST)):
        lies = changed(saved(tmp_path, X), lambda name, old: numbers if name == "data/0" else old)  # noqa: B023  # at once
        with pytest.raises(FormatError):
            read_tensors(lies, "inputs", MOST)


def test_tensors_have_a_limit_together_before_any_is_made(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": torch.zeros(1).expand(100), "b": torch.zeros(101)})
    assert len(read_tensors(path, "inputs", 804)) == 2
    with pytest.raises(FormatError, match="804 bytes, at most 803"):
        read_tensors(path, "inputs", 803)
    with pytest.raises(FormatError, match="too large"):
        read_tensors(saved(tmp_path, torch.zeros(1).expand(2**40, 2**20)), "inputs", MOST)


def test_files_that_are_packed_or_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="packed"):
        read_tensors(changed(saved(tmp_path, X), lambda _, old: old, method=zipfile.ZIP_DEFLATED), "inputs", MOST)
    turned = changed(saved(tmp_path, X), lambda name, old: b"big" if name == "byteorder" else old)
    with pytest.raises(FormatError, match="largest digits"):
        read_tensors(turned, "inputs", MOST)
    path = tmp_path / "old.pt"
    torch.save(X, path, _use_new_zipfile_serialization=False)
    with pytest.raises(zipfile.BadZipFile):
        read_tensors(path, "inputs", MOST)


def test_the_pickle_of_many_tensors_fits(tmp_path: Path) -> None:
    content = {f"input_{number}": torch.full((2,), number) for number in range(200)}
    found = read_tensors(saved(tmp_path, content), "inputs", MOST)
    assert all(Tensor.equal(found[name], tensor) for name, tensor in content.items())
