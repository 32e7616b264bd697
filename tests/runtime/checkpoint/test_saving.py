"""Checkpoints that ranks save together: what comes back, what is refused, which folders stay."""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from planner.ir.errors import CheckpointError, MissingFileError, UsageError
from runtime.checkpoint import Checkpoint, RankState, complete_steps, save, whole_state_dict
from runtime.checkpoint.folders import DATA_FILE, begin, complete, remove, write_file
from tests.runtime.checkpoint.cases import alone, of_two_ranks, on_ranks, save_all, try_save, whole

TENSORS = {
    "float32": torch.randn(3, 4),
    "float64": torch.randn(2).double(),
    "bfloat16": torch.randn(7).bfloat16(),
    "float16": torch.randn(7).half(),
    "int64": torch.arange(6).reshape(2, 3),
    "uint8": torch.arange(6, dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.randn(3, dtype=torch.complex64).conj(),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "transposed": torch.randn(3, 4).t(),
    "part of a larger one": torch.randn(100)[10:20:3],
    "repeated": torch.randn(1, 3).expand(4, 3),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "parameter": nn.Parameter(torch.randn(3)),
    "not a number": torch.tensor([math.nan, -0.0, math.inf]),
}
NUMBERS = {"i": 3, "f": 0.1, "whole": 2.0, "b": True, "n": None, "s": "läuft", "inf": math.inf, "-inf": -math.inf}


def same(found: Tensor, expected: Tensor) -> bool:
    """Equal to the bit, NaNs and signs of zeros included."""
    found = found.detach().resolve_conj().contiguous()
    expected = expected.detach().resolve_conj().contiguous()
    bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (found, expected)]
    return found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(*bits)


def test_every_kind_of_tensor_and_number_comes_back(tmp_path: Path) -> None:
    save_all(tmp_path, 7, [alone(TENSORS, NUMBERS)])
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.verify()
    for key, tensor in TENSORS.items():
        assert same(checkpoint.read(key), tensor), key
        assert checkpoint.shape(key) == tuple(tensor.shape)
    found = {key: checkpoint.number(key) for key in NUMBERS}
    assert found == NUMBERS
    assert [type(number) for number in found.values()] == [type(number) for number in NUMBERS.values()]
    assert checkpoint.manifest.step == 7


DTYPES = {
    str(each).removeprefix("torch."): each
    for each in vars(torch).values()
    if isinstance(each, torch.dtype) and each not in (torch.qint8, torch.quint8, torch.qint32)
    if not str(each).startswith(("torch.quint", "torch.bits"))
}


@pytest.mark.every_case
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_in_every_shape(tmp_path: Path, dtype: str) -> None:
    kind = DTYPES[dtype]

    def filled(*shape: int) -> Tensor:
        content = torch.arange(math.prod(shape) * kind.itemsize, dtype=torch.uint8)
        return (content % 2 if kind is torch.bool else content).view(kind).reshape(shape)

    tensors = {str(shape): filled(*shape) for shape in ((), (1,), (0,), (0, 3), (3, 0), (2, 3))}
    save_all(tmp_path, 1, [alone(tensors)])
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.verify()
    for key, tensor in tensors.items():
        assert same(checkpoint.read(key), tensor), key
    read = set(load_file(tmp_path / "step-1" / "rank-0" / DATA_FILE))
    assert read == set(tensors)


def test_a_rank_with_nothing_to_write_takes_part(tmp_path: Path) -> None:
    save_all(tmp_path, 1, [alone(whole()), RankState(whole(), {}, {"k": 1}, frozenset())])
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.verify()
    assert set(checkpoint.manifest.tensors) == set(whole())
    assert "k" not in checkpoint


def test_two_names_of_one_tensor_are_stored_once(tmp_path: Path) -> None:
    embedding = torch.randn(1000, 10)
    tied = {"model/embedding.weight": embedding, "model/head.weight": embedding, "model/bias": embedding[0]}
    path = save_all(tmp_path, 1, [alone(tied)])
    assert sum(file.stat().st_size for file in path.rglob("*.safetensors")) < 1.2 * embedding.nbytes
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.verify()
    assert all(torch.equal(checkpoint.read(key), tensor) for key, tensor in tied.items())


def test_what_two_ranks_saved_three_ranks_read(tmp_path: Path) -> None:
    save_all(tmp_path, 1, of_two_ranks(seed=4))
    expected = whole(seed=4)
    checkpoint = Checkpoint.open(tmp_path)
    for key, tensor in expected.items():
        assert torch.equal(checkpoint.read(key), tensor)
        for first in range(tensor.numel() + 1):
            for last in range(first, tensor.numel() + 1):
                assert torch.equal(checkpoint.read_slice(key, first, last), tensor.reshape(-1)[first:last])
    assert checkpoint.number("run/step") == 4
    assert checkpoint.manifest.num_ranks == 2


def test_an_empty_slice_saves_nothing_wherever_it_lies(tmp_path: Path) -> None:
    tensor = torch.randn(6)
    cuts = [(0, 4), (2, 2), (4, 6), (6, 6)]
    states = [RankState({"m": tensor[a:b]}, {"m": (a, b, (2, 3))}, {}, frozenset({"m"})) for a, b in cuts]
    save_all(tmp_path, 1, states)
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.verify()
    assert torch.equal(checkpoint.read("m"), tensor.reshape(2, 3))
    assert [len(entry.parts) for entry in checkpoint.manifest.tensors.values()] == [2]


def test_a_module_takes_the_whole_state(tmp_path: Path) -> None:
    def make() -> nn.Module:
        module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        module[2].weight = module[0].weight
        return module

    saved = make()
    loaded = make()
    save_all(tmp_path, 1, [alone({f"model/{name}": tensor for name, tensor in saved.state_dict().items()})])
    loaded.load_state_dict(whole_state_dict(Checkpoint.open(tmp_path)))
    assert all(map(torch.equal, saved.state_dict().values(), loaded.state_dict().values()))


def test_the_same_state_gives_the_same_files(tmp_path: Path) -> None:
    first, second = (save_all(tmp_path / name, 1, of_two_ranks()) for name in ("a", "b"))
    names = [file.relative_to(first) for file in sorted(first.rglob("*")) if file.is_file()]
    assert len(names) == 4
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, b: (a, RankState(a.tensors, a.slices, a.numbers, frozenset({"model/a.weight"}))), "saved twice"),
        (lambda a, b: (a, RankState({}, {}, a.numbers, frozenset({"run/step"}))), "run/step is saved by rank-0 and by"),
        (lambda a, b: (a, RankState({}, {}, {}, frozenset())), "saved by nobody: 7 of 12"),
        (lambda a, b: (RankState({}, {}, {}, frozenset()), b), "saved by nobody: 5 of 12"),
        (lambda a, b: (a, alone({"model/a.weight": torch.ones(12)})), "ranks disagree about model/a.weight"),
        (lambda a, b: (a, alone({"run/step": torch.ones(1)})), "run/step is a number on one rank and a tensor"),
    ],
    ids=["tensor", "number", "end", "begin", "shape", "kind"],
)
def test_parts_that_do_not_fit_together_are_refused(
    tmp_path: Path, change: Callable[..., tuple[RankState, RankState]], message: str
) -> None:
    save_all(tmp_path, 1, of_two_ranks())
    errors = try_save(tmp_path, 2, change(*of_two_ranks()))
    assert message in str(errors[0])
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1"]


def test_ranks_of_another_plan_are_refused(tmp_path: Path) -> None:
    def run(rank: int, barrier: Callable[[], None]) -> None:
        save(tmp_path, 1, of_two_ranks()[rank], rank, 2, barrier, {"plan": f"p{rank}"})

    errors = on_ranks(2, run)
    assert "ranks save checkpoints of different fingerprints" in str(errors[0])
    assert "rank 0 has {'plan': 'p0'}, rank 1 has {'plan': 'p1'}" in str(errors[0])
    assert complete_steps(tmp_path) == ()


@pytest.mark.parametrize("tensor", [torch.ones(3).to_sparse(), torch.empty(3, device="meta")], ids=["sparse", "meta"])
def test_a_tensor_that_could_not_be_loaded_is_not_saved(tmp_path: Path, tensor: Tensor) -> None:
    errors = try_save(tmp_path, 1, [alone({"a": torch.ones(1)}), alone({"b": tensor})])
    assert all("b cannot be saved" in str(error) for error in errors)
    assert complete_steps(tmp_path) == ()


def test_a_sound_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    save_all(tmp_path, 1, of_two_ranks(seed=1))
    errors = try_save(tmp_path, 1, of_two_ranks(seed=2))
    assert all(isinstance(error, UsageError) and "not overwritten" in str(error) for error in errors)
    assert Checkpoint.open(tmp_path).number("run/step") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1"]


def test_a_damaged_checkpoint_makes_way_but_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for seed in (1, 2):
        data = save_all(tmp_path, 1, of_two_ranks(seed)) / "rank-1" / "tensors.safetensors"
        data.write_bytes(data.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        save_all(tmp_path, 1, of_two_ranks(seed=3))
    assert "the checkpoint of step 1 is damaged" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-1.damaged-1", "step-1.damaged-2"]
    assert Checkpoint.open(tmp_path).number("run/step") == 3


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    (tmp_path / "step-2.tmp").mkdir(parents=True)
    (tmp_path / "step-9.tmp").mkdir()
    (tmp_path / "step-1.damaged-1").mkdir()
    (tmp_path / "notes").mkdir()
    for step in (1, 2, 3, 4, 8):
        save_all(tmp_path, step, of_two_ranks(), keep=2 if step < 8 else 3)
    left = {"notes", "step-1.damaged-1", "step-9.tmp", "step-3", "step-4", "step-8"}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_a_damaged_one_does_not_count_and_a_later_one_stays(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        save_all(tmp_path, step, of_two_ranks())
    (tmp_path / "step-3" / "manifest.json").unlink()
    save_all(tmp_path, 4, of_two_ranks(), keep=2)
    assert complete_steps(tmp_path) == (2, 3, 4, 10)


def test_a_rank_that_does_not_see_the_folder_is_told_to_share_it(tmp_path: Path) -> None:
    def run(rank: int, barrier: Callable[[], None]) -> None:
        save(tmp_path / f"host-{rank}", 1, of_two_ranks()[rank], rank, 2, barrier, {})

    errors = on_ranks(2, run)
    assert "ranks have not written their part: 1" in str(errors[0])
    assert all("a folder that all hosts share" in str(error) for error in errors)
    assert list((tmp_path / "host-0").iterdir()) == []


def test_a_disk_without_room_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_all(tmp_path, 1, of_two_ranks(seed=1))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1000, used=900, free=100))
    errors = [str(error) for error in try_save(tmp_path, 2, of_two_ranks(seed=2))]
    room = f"are free on the disk of {next(path for path in tmp_path.parents if os.path.ismount(path))}"
    # 12 numbers and 5 of the moment; 5 numbers and 7 of the moment; 64 KiB for what is written beside them
    assert f"No space left on device: rank 0 needs {2**16 + 68} bytes, 100 {room}" in errors[0]
    assert f"No space left on device: rank 1 needs {2**16 + 48} bytes, 100 {room}" in errors[1]
    assert "try: --keep 2" in errors[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=0, used=0, free=0))  # it does not say
    save_all(tmp_path, 2, of_two_ranks(seed=2))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_everything_is_on_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[object] = []
    rename = os.rename

    def renamed(old: object, new: object) -> None:
        rename(old, new)
        events.append(str(new))

    monkeypatch.setattr(os, "fsync", lambda handle: events.append(os.fstat(handle).st_ino))
    monkeypatch.setattr(os, "rename", renamed)
    folder = tmp_path / "runs" / "checkpoints"
    path = save_all(folder, 1, of_two_ranks())
    at = events.index(str(path))
    inside = [path, *path.rglob("*")]
    assert len(inside) == 7
    assert {item.stat().st_ino for item in inside} <= set(events[:at])
    assert folder.stat().st_ino in events[at:]
    assert {tmp_path.stat().st_ino, folder.parent.stat().st_ino} <= set(events[:at])


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError

    write_file(tmp_path / "a", b"whole")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        write_file(tmp_path / "b", b"half")
    assert (tmp_path / "a").read_bytes() == b"whole"
    assert not (tmp_path / "b").exists()


def test_a_checkpoint_is_never_renamed_onto_another(tmp_path: Path) -> None:
    for content in ("first", "second"):
        begin(tmp_path, 5).joinpath(content).touch()
        if content == "first":
            complete(tmp_path, 5)
    with pytest.raises(OSError):
        complete(tmp_path, 5)
    assert names(tmp_path / "step-5") == ["first"]


def test_a_half_removed_checkpoint_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    save_all(tmp_path, 1, of_two_ranks())
    monkeypatch.setattr(os, "unlink", killed)
    with pytest.raises(KeyboardInterrupt):
        remove(tmp_path, 1)
    assert complete_steps(tmp_path) == ()


def test_a_folder_that_cannot_be_read_is_an_error_and_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(path: object) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", forbidden)
    with pytest.raises(MissingFileError, match="Permission denied"):
        complete_steps(tmp_path)
