"""Folders for temporary files: gone with their process, or swept by the next where it was killed."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cuda_ops.device import compiling
from planner.ir.scratch import OWNER, lasting_folder, scratch_folder, sweep


def test_a_folder_whose_owner_was_killed_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with scratch_folder("job") as mine:
        (mine / "job.json").touch()
        dead = tmp_path / "halopipe-job-dead"
        shutil.copytree(mine, dead)  # whose lock nobody holds
        foreign = tmp_path / "halopipe-job-foreign"
        foreign.mkdir()
        (foreign / "owner-of-another-host").touch()
        sweep()
        assert sorted(tmp_path.iterdir()) == sorted([mine, foreign])
        assert (mine / "job.json").exists()
        shutil.copytree(mine, dead)
    assert list(tmp_path.iterdir()) != [foreign]
    with scratch_folder("job") as other:
        assert sorted(tmp_path.iterdir()) == sorted([other, foreign])


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "linked folder", "another user's"])
def test_what_others_put_among_the_temporary_files_is_neither_opened_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = tmp_path / "halopipe-job-x"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    os.mkfifo(elsewhere / "pipe")
    (elsewhere / OWNER).touch()  # nobody holds it
    if kind == "linked folder":
        place.symlink_to(elsewhere)
    else:
        place.mkdir()
        if kind == "pipe":
            os.mkfifo(place / OWNER)
        elif kind == "another user's":
            (place / OWNER).touch()
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        else:
            (place / OWNER).symlink_to(elsewhere / "pipe")
    sweep()
    assert {path.name for path in elsewhere.iterdir()} == {"pipe", OWNER}
    assert os.path.lexists(place)


def child(work: Callable[[], object]) -> int:
    """A fork that does ``work`` and then waits for its end."""
    process = os.fork()
    if process == 0:
        try:
            work()
            time.sleep(60)
        except SystemExit as error:
            os._exit(int(str(error)))
        finally:
            os._exit(1)
    return process


def ended(process: int, number: int) -> int:
    os.kill(process, number)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def wait_for(folder: Path, pattern: str) -> None:
    ends_s = time.monotonic() + 20
    while not list(folder.glob(pattern)):
        assert time.monotonic() < ends_s
        time.sleep(1e-3)


def test_who_is_told_to_end_removes_its_folder_and_who_is_killed_leaves_it_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def hold() -> None:
        with scratch_folder("links") as folder:
            (folder / "store").touch()
            time.sleep(60)

    process = child(hold)
    wait_for(tmp_path, "halopipe-links-*/store")
    assert ended(process, signal.SIGTERM) == 143
    assert list(tmp_path.iterdir()) == []
    process = child(hold)
    wait_for(tmp_path, "halopipe-links-*/store")
    sweep()
    assert len(list(tmp_path.iterdir())) == 1
    ended(process, signal.SIGKILL)
    sweep()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_an_end_is_kept_for_as_long_as_a_fork_of_its_maker_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def make() -> None:
        folder = lasting_folder("compiled")
        (folder / str(child(lambda: None))).touch()

    maker = child(make)
    wait_for(tmp_path, "halopipe-compiled-*/[0-9]*")
    (fork,) = (int(path.name) for path in tmp_path.glob("halopipe-compiled-*/[0-9]*"))
    ended(maker, signal.SIGKILL)
    sweep()
    assert len(list(tmp_path.iterdir())) == 1
    os.kill(fork, signal.SIGKILL)
    ends_s = time.monotonic() + 20
    while list(tmp_path.iterdir()) and time.monotonic() < ends_s:
        sweep()
    assert list(tmp_path.iterdir()) == []


def test_who_compiles_next_removes_what_a_compiler_that_was_killed_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "_fill", lambda library, toolchain, sources: library.touch())
    (tmp_path / "halopipe").mkdir(mode=0o700)
    (tmp_path / "halopipe" / "compiling-x").mkdir()
    (tmp_path / "sources").mkdir()
    sources = compiling.LibrarySources("x", tmp_path / "sources")
    library = compiling.compiled({"XDG_CACHE_HOME": str(tmp_path), "PATH": os.environ["PATH"]}, sources)
    assert list((tmp_path / "halopipe").iterdir()) == [library]
