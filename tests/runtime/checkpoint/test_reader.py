from __future__ import annotations

import hashlib
import io
import os
import pickle
import random
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from planner.ir.errors import CorruptFileError, MissingFileError, NewerFileError, StaleFileError
from runtime.checkpoint import Checkpoint, complete_steps
from tests.runtime.checkpoint.cases import alone, forge, of_two_ranks, save_all, whole
from tests.runtime.checkpoint.test_metadata import Runs


def read_all(folder: Path) -> None:
    """Everything that a run would read."""
    checkpoint = Checkpoint.open(folder)
    for key in checkpoint.manifest.tensors:
        checkpoint.read(key)


def replace_archive(path: Path, archive: bytes) -> None:
    """Put ``archive`` where rank 0's first tensor is, and make every hash agree, as one with bad intent would."""
    data = path / "rank-0" / "__0_0.distcp"
    old = Checkpoint.open(path.parent)
    (key,) = [key for key, entry in old.manifest.tensors.items() if entry.parts[0].folder == "rank-0"]
    archive = archive.ljust(data.stat().st_size, b"\0")
    metadata = pickle.loads((path / "rank-0" / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.length = len(archive)
    content = pickle.dumps(metadata)
    data.write_bytes(archive)
    (path / "rank-0" / ".metadata").write_bytes(content)
    sizes = f'"rank-0": ["{hashlib.sha256(content).hexdigest()}", {len(archive)}]'
    forge(path, lambda text: re.sub(r'"rank-0": \["\w+", \d+\]', sizes, text))
    old_hash, new_hash = old.manifest.tensors[key].parts[0].sha256, hashlib.sha256(archive).hexdigest()
    forge(path, lambda text: text.replace(old_hash, new_hash))


def test_torch_reads_a_ranks_folder(tmp_path: Path) -> None:
    path = save_all(tmp_path, 1, [alone(whole())])
    found = {key: torch.zeros_like(tensor) for key, tensor in whole().items()}
    with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
        dcp.load(found, checkpoint_id=path / "rank-0", no_dist=True)
    assert all(torch.equal(found[key], tensor) for key, tensor in whole().items())


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
    data = tmp_path / "step-2" / "rank-1" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.read("model/a.weight")  # of rank 0, which is sound
    with pytest.raises(CorruptFileError) as caught:
        checkpoint.read("optimizer/a.weight/exp_avg")
    assert str(caught.value).splitlines()[0] == f"error[H302] checkpoint {tmp_path}/step-2 is damaged"
    assert "rank-1/__0_0.distcp: optimizer/a.weight/exp_avg: SHA-256 is" in caught.value.details[0]
    assert caught.value.remedies == (f"the checkpoint before it: {tmp_path}/step-1",)
    Checkpoint.open(tmp_path, step=1).verify()


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = save_all(tmp_path, 1, of_two_ranks())
    files = {file: file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}
    everywhere = [(file, position) for file, content in files.items() for position in range(len(content))]
    dice = random.Random(0)
    for file, position in dice.sample(everywhere, 1000):
        content = bytearray(files[file])
        content[position] ^= 1 << dice.randrange(8)
        file.write_bytes(content)
        with pytest.raises(CorruptFileError):
            Checkpoint.open(tmp_path).verify()
        file.write_bytes(files[file])
    Checkpoint.open(tmp_path).verify()


def test_every_missing_or_shortened_file_is_found(tmp_path: Path) -> None:
    path = save_all(tmp_path, 1, of_two_ranks())
    for file in [file for file in sorted(path.rglob("*")) if file.is_file()]:
        content = file.read_bytes()
        for damage in (file.unlink, lambda file=file, content=content: file.write_bytes(content[:-1])):
            damage()
            with pytest.raises(CorruptFileError):
                Checkpoint.open(tmp_path).verify()
            file.write_bytes(content)


def test_bytes_that_belong_to_nothing_are_found(tmp_path: Path) -> None:
    path = save_all(tmp_path, 1, of_two_ranks())
    data = path / "rank-0" / "__0_0.distcp"
    size = data.stat().st_size
    data.write_bytes(data.read_bytes() + b"more")
    with pytest.raises(CorruptFileError, match="is damaged"):
        Checkpoint.open(tmp_path)
    forge(path, lambda text: text.replace(f", {size}]", f", {size + 4}]", 1))
    with pytest.raises(CorruptFileError) as caught:
        Checkpoint.open(tmp_path).verify()
    assert caught.value.details == (f"rank-0/__0_0.distcp: bytes {size}:{size + 4} belong to nothing",)


def test_a_link_to_outside_is_refused(tmp_path: Path) -> None:
    path = save_all(tmp_path / "checkpoints", 1, of_two_ranks())
    for name in ("manifest.json", "rank-0/.metadata", "rank-1/__0_0.distcp"):
        outside = tmp_path / "outside"
        (path / name).rename(outside)
        (path / name).symlink_to(outside)
        with pytest.raises(CorruptFileError) as caught:
            Checkpoint.open(tmp_path / "checkpoints")
        assert "is a link to outside" in caught.value.details[0]
        outside.rename(path / name)
    Checkpoint.open(tmp_path / "checkpoints").verify()


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    path = save_all(tmp_path, 1, of_two_ranks())
    (path / "rank-0" / ".metadata").unlink()
    os.mkfifo(path / "rank-0" / ".metadata")
    with pytest.raises(CorruptFileError):
        Checkpoint.open(tmp_path)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"rank-0": [', '"../rank-0": [', "folders: '../rank-0' is none of 2 ranks' folders"),
        ('["rank-0", ', '["../../secret", ', "'../../secret' is none of the folders"),
        ('["rank-0", "model/a.weight"', '["rank-0", "model/c"', "model/a.weight: rank-0 has no tensor model/c"),
        ('"float32", [3, 4]', '"load", [3, 4]', "'load' is no dtype"),
        ('"float32", [3, 4], ["rank-0", "m', '"int32", [3, 4], ["rank-0", "m', "float32, 12 elements; the manifest"),
        ('exp_avg", 0, 5, ', 'exp_avg", 0, 6, ', "saved twice: 0:6 by rank-0, 5:12 by rank-1"),
        ('exp_avg", 5, 12, ', 'exp_avg", 6, 12, ', "saved by nobody: 5:6 of 12"),
        ('"step": 1', '"step": 2', "manifest.json is that of step 2"),
        ('"num_ranks": 2', '"num_ranks": 3', "saved by 3 ranks and has folders of 2"),
        ('"num_ranks": 2', '"num_ranks": true', "num_ranks: True is not a whole number"),
        ('"step": 1', '"step": 1, "step": 1', "step: key given twice"),
        ('"numbers"', '"digits"', "expected are step, num_ranks"),
        ("0.1", "NaN", "NaN is no number of JSON"),
        ("0.1", "1e999", "beyond the range"),
        ("0.1", "[1]", "numbers.group/a.weight/lr: [1] is neither"),
        ("[3, 4]", "[-3, 4]", "-3 is not a whole number"),
        ("[3, 4]", f"[3, {1 << 62}]", "is too large"),
        ('"halopipe": "checkpoint"', '"halopipe": "plan"', "it does not begin with"),
        ("0.1", "9" * 5000, "is not a checkpoint's manifest"),
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
    forge(path, lambda text: text.replace('"version": 1', '"version": 3'))
    with pytest.raises(NewerFileError, match="checkpoint format 3, this release reads up to 2"):
        Checkpoint.open(tmp_path)


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
    path = save_all(tmp_path, 1, [alone({"model/a": torch.ones(12)})])
    replace_archive(path, archive_of(torch.ones(12)))
    read_all(tmp_path)  # this much is in order
    replace_archive(path, archive(target))
    with pytest.raises(CorruptFileError) as caught:
        read_all(tmp_path)
    assert "model/a: " in caught.value.details[0]
    assert "SHA-256" not in caught.value.details[0]
    assert not target.exists()


def test_a_metadata_pickle_with_bad_intent_runs_no_code(tmp_path: Path) -> None:
    target = tmp_path / "made by the pickle"
    path = save_all(tmp_path, 1, of_two_ranks())
    metadata = path / "rank-0" / ".metadata"
    old = hashlib.sha256(metadata.read_bytes()).hexdigest()
    metadata.write_bytes(pickle.dumps(Runs(Path.touch, target)))
    new = hashlib.sha256(metadata.read_bytes()).hexdigest()
    forge(path, lambda text: text.replace(old, new))
    with pytest.raises(CorruptFileError) as caught:
        read_all(tmp_path)
    assert caught.value.details[0].startswith("rank-0/.metadata: not readable: it names")
    assert not target.exists()


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    path = save_all(tmp_path, 1, of_two_ranks())
    for file in ("rank-1/__0_0.distcp", "rank-1/.metadata"):
        (path / file).write_bytes(bytes((path / file).stat().st_size))
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
