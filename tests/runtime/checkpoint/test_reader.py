from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from planner.ir.errors import CorruptFileError, MissingFileError, NewerFileError, StaleFileError
from runtime.checkpoint import Checkpoint, complete_steps, reader
from runtime.checkpoint.folders import DATA_FILE
from tests.runtime.checkpoint.cases import alone, assert_flips_are_found, forge, of_two_ranks, save_all, whole


def read_all(folder: Path) -> None:
    """Everything that a run would read."""
    checkpoint = Checkpoint.open(folder)
    for key in checkpoint.manifest.tensors:
        checkpoint.read(key)


def test_the_library_reads_a_ranks_folder(tmp_path: Path) -> None:
    path = save_all(tmp_path, 1, [alone({**whole(), "wave": torch.tensor([1 + 2j, 3])})])
    tensors = load_file(path / "rank-0" / DATA_FILE)
    assert all(torch.equal(tensors[key], tensor) for key, tensor in whole().items())
    assert torch.equal(tensors["wave"], torch.tensor([[1.0, 2.0], [3.0, 0.0]]))
    with safe_open(path / "rank-0" / DATA_FILE, "pt") as file:
        assert file.metadata() == {"wave": "complex64"}


def test_the_newest_complete_one_is_opened(tmp_path: Path) -> None:
    for step in (9, 10, 2):
        save_all(tmp_path, step, of_two_ranks(seed=step))
    shutil.copytree(tmp_path / "step-10", tmp_path / "step-11.tmp")
    shutil.copytree(tmp_path / "step-10", tmp_path / "step-012")
    assert complete_steps(tmp_path) == (2, 9, 10)
    assert Checkpoint.open(tmp_path).number("run/step") == 10
    assert Checkpoint.open(tmp_path, step=2).number("run/step") == 2


@pytest.mark.parametrize("step", [None, 3])
def test_where_there_is_none_it_says_so(tmp_path: Path, step: int | None) -> None:
    (tmp_path / "step-5.tmp").mkdir()
    (tmp_path / "file").touch()
    for folder in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(MissingFileError, match="has no complete checkpoint"):
            Checkpoint.open(folder, step)


def test_a_damaged_one_is_named_and_the_one_before_it_is_offered(tmp_path: Path) -> None:
    for step in (1, 2):
        save_all(tmp_path, step, of_two_ranks())
    data = tmp_path / "step-2" / "rank-1" / "tensors.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.read("model/a.weight")  # of rank 0, which is sound
    with pytest.raises(CorruptFileError) as caught:
        checkpoint.read("optimizer/a.weight/exp_avg")
    assert str(caught.value).splitlines()[0] == f"error[H302] checkpoint {tmp_path}/step-2 is damaged"
    assert "rank-1/tensors.safetensors: optimizer/a.weight/exp_avg: SHA-256 is" in caught.value.details[0]
    assert caught.value.remedies == (f"the checkpoint before it: {tmp_path}/step-1",)
    Checkpoint.open(tmp_path, step=1).verify()


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = save_all(tmp_path, 1, of_two_ranks())
    assert_flips_are_found(path, tmp_path, num_flips=1000)


def test_every_missing_or_shortened_file_is_found(tmp_path: Path) -> None:
    path = save_all(tmp_path, 1, of_two_ranks())
    for file in [file for file in sorted(path.rglob("*")) if file.is_file()]:
        content = file.read_bytes()
        for damage in (file.unlink, lambda file=file, content=content: file.write_bytes(content[:-1])):
            damage()
            with pytest.raises(CorruptFileError):
                Checkpoint.open(tmp_path).verify()
            file.write_bytes(content)


def test_one_that_is_removed_while_it_is_opened_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_all(tmp_path, 1, of_two_ranks())
    looked_at = reader.check_place

    def check_place(path: Path, name: str) -> None:
        looked_at(path, name)
        shutil.rmtree(path)

    monkeypatch.setattr(reader, "check_place", check_place)
    with pytest.raises(CorruptFileError, match="step-1 is damaged"):
        Checkpoint.open(tmp_path)
    assert not path.exists()


def _append(path: Path) -> None:
    with (path / "rank-0" / DATA_FILE).open("ab") as file:
        file.write(b"more")


def _append_and_tell(path: Path) -> None:
    size = (path / "rank-0" / DATA_FILE).stat().st_size
    _append(path)
    forge(path, lambda text: text.replace(f", {size}]", f", {size + 4}]", 1))


def _forget(path: Path) -> None:
    forge(path, lambda text: re.sub(r'    "model/b.weight".*\n', "", text))


def _put_a_pipe(path: Path) -> None:
    (path / "rank-0" / DATA_FILE).unlink()
    os.mkfifo(path / "rank-0" / DATA_FILE)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_append, "is damaged"),
        (_append_and_tell, "not fully covered"),
        (_forget, f"rank-1/{DATA_FILE}: model/b.weight belongs to nothing"),
        (_put_a_pipe, "is damaged"),  # which is not waited for
    ],
)
def test_what_belongs_to_nothing_is_found(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(save_all(tmp_path, 1, of_two_ranks()))
    with pytest.raises(CorruptFileError, match=message):
        Checkpoint.open(tmp_path).verify()


@pytest.mark.parametrize(
    "head",
    [
        {"model/a": {"dtype": "F32", "shape": [12], "data_offsets": [0, 1 << 60]}},
        {"model/a": {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 48]}},
        {"model/a": {"dtype": "F32", "shape": [12], "data_offsets": [-8, 40]}},
        {"model/a": {"dtype": "OBJECT", "shape": [12], "data_offsets": [0, 48]}},
        {"model/a": {"dtype": "F4", "shape": [96], "data_offsets": [0, 48]}},
        {"model/b": {"dtype": "F32", "shape": [12], "data_offsets": [0, 48]}},
        {"model/a": {"dtype": "F64", "shape": [6], "data_offsets": [0, 48]}},
        {},
        [],
    ],
)
def test_a_head_with_bad_intent_is_refused(tmp_path: Path, head: object) -> None:
    path = save_all(tmp_path, 1, [alone({"model/a": torch.ones(12)})])
    content = json.dumps(head).encode()
    content = len(content).to_bytes(8, "little") + content
    (path / "rank-0" / DATA_FILE).write_bytes(content + torch.ones(12).numpy().tobytes())
    files = f'"rank-0": ["{hashlib.sha256(content).hexdigest()}", {len(content) + 48}]'
    forge(path, lambda text: re.sub(r'"rank-0": \["\w+", \d+\]', files, text))
    with pytest.raises(CorruptFileError, match="is damaged"):
        read_all(tmp_path)


@pytest.mark.parametrize("length", [0, 100_000_001, 1 << 40, (1 << 64) - 1])
def test_of_a_file_with_a_head_of_any_length_no_more_is_read_than_a_head_may_have(
    tmp_path: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_all(tmp_path, 1, of_two_ranks())
    whole_read = reader.read_file
    content = (path / "rank-0" / DATA_FILE).read_bytes()
    (path / "rank-0" / DATA_FILE).write_bytes(length.to_bytes(8, "little") + content[8:])
    asked_bytes: list[int] = []

    def read_file(path: Path, name: str, offset: int = 0, length: int | None = None) -> bytes:
        asked_bytes.append(0 if length is None else length)
        return whole_read(path, name, offset, length)

    monkeypatch.setattr(reader, "read_file", read_file)
    with pytest.raises(CorruptFileError):
        read_all(tmp_path)
    assert max(asked_bytes) == 8


def test_a_link_to_outside_is_refused(tmp_path: Path) -> None:
    path = save_all(tmp_path / "checkpoints", 1, of_two_ranks())
    for name in ("manifest.json", "rank-1/tensors.safetensors"):
        outside = tmp_path / "outside"
        (path / name).rename(outside)
        (path / name).symlink_to(outside)
        with pytest.raises(CorruptFileError) as caught:
            Checkpoint.open(tmp_path / "checkpoints")
        assert "is a link to outside" in caught.value.details[0]
        outside.rename(path / name)
    Checkpoint.open(tmp_path / "checkpoints").verify()


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"rank-0": [', '"../rank-0": [', "'../rank-0' is none of 2 ranks' folders"),
        ('["rank-0", ', '["../../secret", ', "'../../secret' is none of the folders"),
        ('["rank-0", "model/a.weight"', '["rank-0", "model/c"', "model/a.weight: File does not contain tensor model/c"),
        ('"float32", [3, 4]', '"load", [3, 4]', "'load' is no dtype"),
        ('"float32", [3, 4], ["rank-0", "m', '"int32", [3, 4], ["rank-0", "m', "float32, 12 elements; the manifest"),
        ('exp_avg", 0, 5, ', 'exp_avg", 0, 6, ', "saved twice: 0:6 by rank-0, 5:12 by rank-1"),
        ('exp_avg", 5, 12, ', 'exp_avg", 6, 12, ', "saved by nobody: 1 of 12"),
        ('"step": 1', '"step": 2', "manifest.json is that of step 2"),
        ('"num_ranks": 2', '"num_ranks": 3', "saved by 3 ranks and has folders of 2"),
        ('"num_ranks": 2', '"num_ranks": true', "num_ranks: input should be a valid integer, got true"),
        ('"step": 1', '"step": 1, "step": 1', "step: key given twice"),
        ('"numbers"', '"digits"', "digits: unknown key"),
        ("0.1", "NaN", "nan is no number of JSON"),
        ("0.1", "1e999", "beyond its range"),
        ("0.1", "[1]", "numbers.group/a.weight/lr: input should be a valid integer, got [1]"),
        ("[3, 4]", "[-3, 4]", "greater than or equal to 0, got -3"),
        ("[3, 4]", f"[3, {1 << 62}]", "is too large"),
        ('"halopipe": "checkpoint"', '"halopipe": "plan"', "it is a halopipe plan file"),
        ("0.1", "9" * 5000, "a number has too many digits"),
        ("0.1", "[" * 100_000, "nested too deeply"),
    ],
)
def test_a_manifest_with_bad_intent_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = save_all(tmp_path, 1, of_two_ranks())
    assert old in (path / "manifest.json").read_text()
    forge(path, lambda text: text.replace(old, new, 1))
    with pytest.raises(CorruptFileError) as caught:
        read_all(tmp_path)
    assert message in str(caught.value)


def test_a_checkpoint_of_a_newer_release_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = save_all(tmp_path, 1, of_two_ranks())
    forge(path, lambda text: text.replace('"version": 3', '"version": 4'))
    with pytest.raises(NewerFileError, match="checkpoint format 4, this release reads up to 3"):
        Checkpoint.open(tmp_path)


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    path = save_all(tmp_path, 1, of_two_ranks())
    data = path / "rank-1" / DATA_FILE
    data.write_bytes(bytes(data.stat().st_size))
    checkpoint = Checkpoint.open(tmp_path)
    assert torch.equal(checkpoint.read("model/a.weight"), whole()["model/a.weight"])
    assert torch.equal(
        checkpoint.read_slice("optimizer/a.weight/exp_avg", 1, 5),
        whole()["optimizer/a.weight/exp_avg"].reshape(-1)[1:5],
    )
    with pytest.raises(CorruptFileError):
        checkpoint.read_slice("optimizer/a.weight/exp_avg", 1, 6)


def test_a_key_that_is_not_there_belongs_to_another_model(tmp_path: Path) -> None:
    save_all(tmp_path, 1, of_two_ranks())
    checkpoint = Checkpoint.open(tmp_path)
    assert "model/a.weight" in checkpoint
    assert "run/step" in checkpoint
    assert "model/c.weight" not in checkpoint
    with pytest.raises(StaleFileError, match=r"has no tensor model/c\.weight\n  it has 3 tensors, among them model/"):
        checkpoint.read("model/c.weight")
    with pytest.raises(StaleFileError, match="has no number run/step"):
        Checkpoint.number(Checkpoint(checkpoint.path, checkpoint.manifest), "run/steps")
    with pytest.raises(StaleFileError, match="has 12 elements, wanted are 5:13"):
        checkpoint.read_slice("model/a.weight", 5, 13)
