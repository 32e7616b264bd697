from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from planner.ir.errors import CorruptFileError, MissingFileError
from planner.ir.files import read_bytes, read_text, replaced, require_writable, write_text


def test_a_device_is_written_to_and_stays_a_device(tmp_path: Path) -> None:
    before = os.stat("/dev/null")
    (tmp_path / "null").symlink_to("/dev/null")
    for path in ("/dev/null", tmp_path / "null"):
        require_writable(path)
        write_text(path, "x" * 100_000)
    after = os.stat("/dev/null")
    assert stat.S_ISCHR(after.st_mode)
    assert (before.st_ino, before.st_mode) == (after.st_ino, after.st_mode)
    assert (tmp_path / "null").is_symlink()


def test_a_link_stays_and_what_it_names_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/plan.json").write_text("old")
    (tmp_path / "link").symlink_to("there/plan.json")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there/plan.json").read_text() == "new"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["link", "plan.json", "there"]


def test_a_link_to_nothing_makes_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("plan.json")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "plan.json").read_text() == "new"


def test_a_pipe_gets_the_text_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(read_slowly(pipe)))
    reader.start()
    opened.wait(5)
    write_text(pipe, "x" * 200_000)
    reader.join(5)
    assert read == [b"x" * 200_000]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


opened = threading.Event()


def read_slowly(pipe: Path) -> bytes:
    handle = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    opened.set()
    os.set_blocking(handle, True)
    with os.fdopen(handle, "rb") as stream:
        text = b""
        while not text:  # as long as nobody writes, it ends at once
            text = stream.read()
        return text


def test_the_mode_of_a_file_that_is_replaced_stays(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    path.chmod(0o640)
    write_text(path, "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_failure_midway_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    with pytest.raises(TypeError), replaced(path) as stream:
        stream.writelines((b"half", None))  # type: ignore[list-item]
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_never_replaced(tmp_path: Path) -> None:
    for refuse in (write_text, lambda path, text: require_writable(path)):
        with pytest.raises(MissingFileError, match="cannot write"):
            refuse(tmp_path, "x")


def test_text_is_read_without_its_mark_and_with_our_line_ends(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xef\xbb\xbfa\r\nb")
    assert read_text(tmp_path / "x") == "a\nb"


def test_a_pipe_that_somebody_writes_is_read(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"text")
    os.close(writing)
    assert read_bytes(f"/proc/self/fd/{reading}") == b"text"
    os.close(reading)


def test_what_is_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("12345")
    with pytest.raises(CorruptFileError, match="too large"):
        read_bytes(tmp_path / "x", most_bytes=4)
