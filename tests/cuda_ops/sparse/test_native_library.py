"""The library in C++: compiled, kept, and loaded by several processes."""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from cuda_ops.device import compiling
from cuda_ops.device.compiling import (
    FAILURE_LASTS_S,
    CannotCompileError,
    LibrarySources,
    cache_folder,
    compiled,
    find_toolchain,
)
from cuda_ops.sparse import gpu, native
from cuda_ops.sparse.native.functions import Library, NativeOperators

UNITS = """
#include "calls.h"

halopipe::ParallelFor halopipe::parallel_for = nullptr;

HALOPIPE_CALL use_threads(halopipe::ParallelFor parallel_for) {
  halopipe::parallel_for = parallel_for;
  return halopipe::kDone;
}

HALOPIPE_CALL numbered(int64_t count, int64_t* to, int64_t failing) {
  return halopipe::done([&] {
    halopipe::for_each(count, [&](int64_t i) {
      if (i == failing) throw std::bad_alloc();
      to[i] = i;
    });
  });
}
"""


@pytest.fixture(scope="module")
def library(native_operators: NativeOperators, tmp_path_factory: pytest.TempPathFactory) -> Library:
    folder = tmp_path_factory.mktemp("library")
    sources = folder / "source"
    sources.mkdir()
    for name in ("arrays.h", "calls.h"):
        shutil.copy(native.SOURCES.folder / name, sources)
    (sources / "numbered.cpp").write_text(UNITS)
    return Library(compiled({**os.environ, "XDG_CACHE_HOME": str(folder)}, LibrarySources("numbered", sources)))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_thread_that_finds_no_memory_fails_the_call(library: Library, threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        numbers = torch.zeros(100, dtype=torch.int64)
        library.call("numbered", 100, numbers, -1)
        assert torch.equal(numbers, torch.arange(100))
        for failing in (0, 99):
            with pytest.raises(MemoryError, match="numbered"):
                library.call("numbered", 100, numbers, failing)
    finally:
        torch.set_num_threads(1)


def test_memory_that_cannot_be_had_is_an_error(native_operators: NativeOperators) -> None:
    weight = torch.zeros(1).expand(2**23, 2**20, 16)
    with pytest.raises(MemoryError, match="sparse_conv"):
        native_operators.sparse_conv(torch.zeros(0, 2**20), weight, torch.zeros(1, 1, dtype=torch.int32), weight)


def test_a_tensor_whose_rows_do_not_follow_each_other_is_refused(native_operators: NativeOperators) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        native_operators.reversed_map(torch.zeros(3, 4, dtype=torch.int32).T, 3)


SMALL = "int answer() { return 42; }\n"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.fixture
def sources(tmp_path: Path, native_operators: NativeOperators) -> LibrarySources:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "small.cpp").write_text(SMALL)
    return LibrarySources("small", folder)


def counting(tmp_path: Path, environment: dict[str, str]) -> tuple[dict[str, str], Path]:
    """A compiler that writes a line for every call that compiles or links."""
    calls = tmp_path / "calls"
    script = tmp_path / "counting-compiler"
    real = find_toolchain(environment).compiler
    script.write_text(f'#!/bin/sh\ncase "$*" in *-o*) echo "$*" >> {calls};; esac\nexec {real} "$@"\n')
    script.chmod(0o755)
    return {**environment, "CXX": str(script)}, calls


def test_a_user_without_a_home_has_a_cache_among_the_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    assert cache_folder({}) == Path(tempfile.gettempdir()) / f"halopipe-of-{os.geteuid()}"
    assert cache_folder({"XDG_CACHE_HOME": "/somewhere"}) == Path("/somewhere/halopipe")


def test_a_library_is_compiled_once_and_found_again(
    tmp_path: Path, environment: dict[str, str], sources: LibrarySources
) -> None:
    environment, calls = counting(tmp_path, environment)
    library = compiled(environment, sources)
    made = calls.read_text()
    assert library.parent == cache_folder(environment) == tmp_path / "cache" / "halopipe"
    assert made.count("\n") == 2
    assert compiled(environment, sources) == library
    assert calls.read_text() == made
    assert list(library.parent.iterdir()) == [library]


def test_those_who_start_at_once_get_one_library(
    tmp_path: Path, environment: dict[str, str], sources: LibrarySources
) -> None:
    environment, calls = counting(tmp_path, environment)
    with ThreadPoolExecutor(3) as pool:
        libraries = set(pool.map(lambda _: compiled(environment, sources), range(3)))
    assert len(libraries) == 1
    assert list(cache_folder(environment).iterdir()) == [*libraries]
    assert calls.read_text().count("\n") == 2


def test_another_source_or_flag_is_another_library(environment: dict[str, str], sources: LibrarySources) -> None:
    toolchain = find_toolchain(environment)
    first = toolchain.key(sources)
    assert toolchain.key(sources) == first
    (sources.folder / "small.cpp").write_text(SMALL + "// changed\n")
    assert toolchain.key(sources) != first


def broken(sources: LibrarySources, environment: dict[str, str]) -> Path:
    """Where the message of a compiler that fails is kept."""
    (sources.folder / "broken.cpp").write_text("int broken( { return undeclared; }\n")
    return cache_folder(environment) / f"small-{find_toolchain(environment).key(sources)}.failed"


def test_a_failure_shows_the_compilers_message_and_leaves_nothing_else(
    environment: dict[str, str], sources: Path
) -> None:
    failure = broken(sources, environment)
    with pytest.raises(CannotCompileError, match=r"broken\.cpp"):
        compiled(environment, sources)
    assert list(cache_folder(environment).iterdir()) == [failure]


def test_what_has_failed_is_not_tried_again_within_the_hour(
    tmp_path: Path, environment: dict[str, str], sources: Path
) -> None:
    environment, calls = counting(tmp_path, environment)
    failure = broken(sources, environment)
    for _ in range(2):
        with pytest.raises(CannotCompileError, match=r"broken\.cpp"):
            compiled(environment, sources)
        assert calls.read_text().count("broken.cpp") == 1
    with pytest.raises(CannotCompileError, match=re.escape(f"tried again in 60 minutes, or once {failure} is deleted")):
        compiled(environment, sources)
    (sources.folder / "broken.cpp").unlink()
    assert compiled(environment, sources).exists()  # another source: another key


@pytest.mark.parametrize("age_s", [FAILURE_LASTS_S + 60, -60])
def test_an_old_failure_is_tried_again(environment: dict[str, str], sources: LibrarySources, age_s: float) -> None:
    failure = cache_folder(environment) / f"small-{find_toolchain(environment).key(sources)}.failed"
    failure.parent.mkdir(parents=True)
    failure.write_text("out of paper")
    with pytest.raises(CannotCompileError, match="out of paper"):
        compiled(environment, sources)
    made = time.time() - age_s
    os.utime(failure, (made, made))
    library = compiled(environment, sources)
    assert list(library.parent.iterdir()) == [library]


def failed_load(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> list[str]:
    """What the log says where `load` finds nothing."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.INFO, logger="cuda_ops"):
        assert native.load.__wrapped__() is None
    return [record.getMessage() for record in caplog.records]


def test_without_a_compiler_one_line_says_so(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (line,) = failed_load({**environment, "CXX": "no-such-compiler"}, monkeypatch, caplog)
    assert "no C++ compiler: no-such-compiler not found" in line


def test_a_compiler_that_fails_is_quoted_in_one_line(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    script = tmp_path / "failing"
    script.write_text('#!/bin/sh\ncase "$*" in *version*) echo 1.0;; *) echo out of paper >&2; exit 3;; esac\n')
    script.chmod(0o755)
    (line,) = failed_load({**environment, "CXX": str(script)}, monkeypatch, caplog)
    assert "ended with 3: out of paper" in line
    (kept,) = cache_folder(environment).iterdir()
    assert kept.read_text() == f"{script} ended with 3: out of paper"


def test_the_cache_is_this_users_alone(environment: dict[str, str], sources: LibrarySources) -> None:
    before = os.umask(0)
    try:
        library = compiled(environment, sources)
    finally:
        os.umask(before)
    assert stat.S_IMODE(library.parent.stat().st_mode) == stat.S_IMODE(library.stat().st_mode) == 0o700
    library.parent.chmod(0o755)  # others could read it, no more: it is closed
    assert compiled(environment, sources) == library
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700


def spoil(folder: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes the cache one that is not to be trusted; what is said of it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if how == "a file above":
        folder.parent.rmdir()
        folder.parent.touch()
        return "Not a directory"
    if how == "a link":
        (folder.parent / "elsewhere").mkdir()
        folder.symlink_to(folder.parent / "elsewhere")
        return "it is a link"
    folder.mkdir()
    if how == "open to others":
        folder.chmod(0o777)
        return "others may write to it"
    if how == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
        return "it belongs to user"
    real = os.access  # a home that is read-only, for the tests' user too
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder and real(path, mode))
    return "it cannot be written"


@pytest.mark.parametrize("how", ["a file above", "a link", "open to others", "another user's", "read-only"])
def test_what_is_not_this_users_is_left_alone_with_a_word(
    how: str,
    environment: dict[str, str],
    sources: LibrarySources,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = cache_folder(environment)
    toolchain = find_toolchain(environment)
    said = spoil(folder, how, monkeypatch)
    if folder.is_dir():
        (folder / f"small-{toolchain.key(sources)}.so").write_text("another's code")
    with caplog.at_level(logging.WARNING, logger="cuda_ops"), monkeypatch.context() as as_user:
        as_user.setattr(compiling, "_is_own_file", lambda library: library.exists())  # who made it is not asked here
        library, again = (compiled(environment, sources) for _ in range(2))
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"{folder} is not used for compiled code: " in line
    assert said in line
    assert library == again
    assert folder not in library.parents
    assert library.read_bytes().startswith(b"\x7fELF")
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("how", ["a link", "open to others", "another user's"])
def test_a_library_that_others_could_have_written_is_made_anew(
    how: str, environment: dict[str, str], sources: LibrarySources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = compiled(environment, sources)
    made = library.read_bytes()
    (tmp_path / "evil.so").write_bytes(b"another's code")
    if how == "a link":
        library.unlink()
        library.symlink_to(tmp_path / "evil.so")
    else:
        library.write_bytes(b"another's code")
    if how == "open to others":
        library.chmod(0o666)
    if how == "another user's":
        real = Path.lstat

        def lstat(path: Path) -> os.stat_result:
            found = real(path)
            is_evil = path == library and path.read_bytes() == b"another's code"
            return os.stat_result((*found[:4], found.st_uid + 1, *found[5:])) if is_evil else found

        monkeypatch.setattr(Path, "lstat", lstat)
    assert compiled(environment, sources) == library
    assert library.read_bytes() == made
    assert not library.is_symlink()
    assert (tmp_path / "evil.so").read_bytes() == b"another's code"


def test_triton_loads_nothing_of_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "triton"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    gpu._own_cache()
    assert os.environ["TRITON_CACHE_DIR"] == str(folder)  # it will be made by Triton
    folder.mkdir(mode=0o700)
    gpu._own_cache()
    assert os.environ["TRITON_CACHE_DIR"] == str(folder)
    folder.chmod(0o777)
    gpu._own_cache()
    assert Path(os.environ["TRITON_CACHE_DIR"]).name.startswith("halopipe-")


def test_the_operators_still_answer_without_a_compiler(environment: dict[str, str]) -> None:
    code = (
        "import torch; from cuda_ops.sparse import operators;"
        "print(operators.sorted_sites(torch.tensor([[0, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.int32))[1].tolist())"
    )
    home = Path(compiling.__file__).parents[2]
    environment = {**environment, "CXX": "no-such-compiler", "PYTHONPATH": str(home)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, cwd=home
    )
    assert result.stdout.strip() == "[1, 0]"
    assert "no-such-compiler" in result.stderr
