from __future__ import annotations

import os
from pathlib import Path

import pytest

from planner.ir.errors import MissingFileError
from runtime.checkpoint.folders import begin, complete, complete_steps, make, remove, set_aside, write_file
from tests.runtime.checkpoint.cases import of_two_ranks, save_all


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


def test_what_is_set_aside_or_removed_is_no_checkpoint_any_more(tmp_path: Path) -> None:
    for step in (0, 3, 10):
        begin(tmp_path, step)
        complete(tmp_path, step)
    assert complete_steps(tmp_path) == (0, 3, 10)
    set_aside(tmp_path, 3)
    remove(tmp_path, 0)
    assert complete_steps(tmp_path) == (10,)
    assert names(tmp_path) == ["step-10", "step-3.damaged-1"]


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


def test_a_folder_is_made_with_those_around_it(tmp_path: Path) -> None:
    make(tmp_path / "a" / "b")
    make(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
