"""Compiles C++ sources into a cache folder, where any number of processes find the library.

The library's name is a hash of everything that it depends on: sources, flags, compiler, processor.  A compiler writes
into a folder of its own, whose library is renamed in one step, so that nobody sees half a file.  Processes that start
at once wait for the first of them, where the file system has locks; else each compiles for itself.  Where the compiler
fails, its message is kept beside the library's place, and for an hour nobody tries again.

What is loaded runs with the user's rights: the folder is this user's, nobody else may enter it, and neither it nor a
library is a link.  Where it is another's, or cannot be written, this process compiles into a folder of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from planner.ir.scratch import lasting_folder

_LOGGER = logging.getLogger(__name__)

FAILURE_LASTS_S = 3600.0
"""For so long what a compiler said is believed."""

_SCRATCH = "compiling-"
_COMPILERS = ("c++", "g++", "clang++")
_COMMON_FLAGS = ("-std=c++17", "-fPIC", "-fvisibility=hidden")
_SHOWN_CHARACTERS = 2000  # of a compiler's message


class CannotCompileError(Exception):
    """There is no compiler, torch is too old, or the compiler has failed; the text says which."""


@dataclass(frozen=True, slots=True)
class LibrarySources:
    """What a library is made of.

    Attributes:
        name: the library's, in the cache folder.
        folder: of all files that it depends on; those called ``*.cpp`` are compiled.
        levels: of optimization, by the unit's name without suffix; -O2 where none is given.
        flags: of every unit, beside the common ones.
        linked: given to the linker, after the objects.
        depends_on: what else the library depends on, as text.
    """

    name: str
    folder: Path
    levels: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    linked: tuple[str, ...] = ()
    depends_on: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Toolchain:
    """What a library is made with.

    Attributes:
        compiler: command, without flags.
        version: what it says of itself.
        flags: of every translation unit, but for its level of optimization.
    """

    compiler: str
    version: str
    flags: tuple[str, ...]

    def key(self, sources: LibrarySources) -> str:
        """Hash of all that the library depends on."""
        levels = map("".join, sorted(sources.levels.items()))
        own = [*levels, *sources.flags, *sources.linked, *sources.depends_on]
        parts = [self.compiler, self.version, *self.flags, *own, platform.machine(), processor()]
        digest = hashlib.sha256("\0".join(parts).encode())
        for path in sorted(sources.folder.iterdir()):
            digest.update(f"\0{path.name}\0".encode())
            digest.update(path.read_bytes())
        return digest.hexdigest()[:24]


def compiled(environment: Mapping[str, str], sources: LibrarySources) -> Path:
    """The library of these sources for this machine, compiled if the cache folder does not hold it.

    Raises:
        CannotCompileError: no library can be had.
        OSError: no folder can be written.
    """
    toolchain = find_toolchain(environment)
    folder = own_folder(cache_folder(environment))
    library = folder / f"{sources.name}-{toolchain.key(sources)}.so"
    if not _is_own_file(library):
        with _locked(folder) as is_alone:
            if not _is_own_file(library):
                if is_alone:
                    _sweep(folder)
                _fill(library, toolchain, sources)
    return library


def own_folder(folder: Path) -> Path:
    """``folder``, this user's alone, made if it is not there; else one of this process, with a word in the log.

    Raises:
        OSError: not even that can be had.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        fault = foreign(folder)
        if not fault:
            folder.chmod(0o700)
    except OSError as error:
        fault = str(error)
    return _private(folder, fault) if fault else folder


def foreign(folder: Path) -> str:
    """Why code from ``folder`` might be somebody else's, or cannot be put there; nothing where neither is so."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return "it is a link, or no folder"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, this is user {os.geteuid()}"
    if stat.S_IMODE(status.st_mode) & 0o022:
        return "others may write to it"
    return "" if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written"


@functools.cache
def _private(folder: Path, fault: str) -> Path:
    """In place of ``folder``, for this process and those that it forks."""
    made = lasting_folder("compiled")
    _LOGGER.warning("%s is not used for compiled code: %s; this process compiles into %s", folder, fault, made)
    _made.append((os.getpid(), made))
    return made


_made: list[tuple[int, Path]] = []
"""Folders of their own that this process and those that it is a fork of have made, each with its maker."""


@atexit.register
def remove_own_folders() -> None:
    """Removes this process's; called also where a process ends without its interpreter's end, as ranks do."""
    for maker, folder in _made:
        if maker == os.getpid():
            shutil.rmtree(folder, ignore_errors=True)


def _is_own_file(library: Path) -> bool:
    """Whether it is there, and this user's; anything else in its place is removed."""
    try:
        status = library.lstat()
    except FileNotFoundError:
        return False
    writable = stat.S_IMODE(status.st_mode) & 0o022
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not writable:
        return True
    _LOGGER.warning("%s is compiled anew: it is no file that this user alone could have written", library)
    library.unlink()
    return False


def _sweep(folder: Path) -> None:
    """Removes what compilers that were killed have left; nobody else compiles there now."""
    for scratch in folder.glob(f"{_SCRATCH}*"):
        shutil.rmtree(scratch, ignore_errors=True)


def _fill(library: Path, toolchain: Toolchain, sources: LibrarySources) -> None:
    """Compiles the library into its place, or keeps there what the compiler says."""
    failure = library.with_suffix(".failed")
    _require_no(failure)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=library.parent) as scratch:
        try:
            made = _compile(toolchain, sources, Path(scratch))
        except CannotCompileError as error:
            message = Path(scratch) / failure.name
            message.write_text(str(error), encoding="utf-8")
            os.replace(message, failure)
            raise
        made.chmod(0o700)
        os.replace(made, library)
    failure.unlink(missing_ok=True)


def _require_no(failure: Path) -> None:
    """Looks whether an earlier process has failed.

    Raises:
        CannotCompileError: what it was told, if that is not long ago.
    """
    try:
        age_s = time.time() - failure.stat().st_mtime
        message = failure.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    if 0 <= age_s < FAILURE_LASTS_S:
        wait = f"in {round((FAILURE_LASTS_S - age_s) / 60)} minutes, or once {failure} is deleted"
        raise CannotCompileError(f"{message} (found by an earlier process; tried again {wait})")


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where libraries are kept; of a user without a home, as in some containers, among the temporary files."""
    if above := environment.get("XDG_CACHE_HOME", ""):
        return Path(above) / "halopipe"
    try:
        return Path(environment.get("HOME", "~")).expanduser() / ".cache" / "halopipe"
    except RuntimeError:  # neither HOME nor a line in the file of users
        return Path(tempfile.gettempdir()) / f"halopipe-of-{os.geteuid()}"


def find_toolchain(environment: Mapping[str, str]) -> Toolchain:
    """The compiler of this process.

    Raises:
        CannotCompileError: there is none.
    """
    compiler = _find_compiler(environment)
    native = "-march=native" if platform.machine().lower() in ("x86_64", "amd64", "i686") else "-mcpu=native"
    return Toolchain(compiler, _run([compiler, "--version"], Path.cwd()), (*_COMMON_FLAGS, native))


def processor() -> str:
    """What ``native`` code depends on: the processor's instruction sets."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    return "\n".join(sorted(set(re.findall(r"(?m)^(?:model name|flags|Features|CPU part)\s*:.*$", text))))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Holds the folder against other processes; the lock goes with the process.  False where there are no locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    is_alone = False
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            is_alone = True
        yield is_alone
    finally:
        os.close(descriptor)


def _find_compiler(environment: Mapping[str, str]) -> str:
    named = environment.get("CXX", "")
    for name in (named,) if named else _COMPILERS:
        path = shutil.which(name, path=environment.get("PATH"))
        if path:
            return path
    raise CannotCompileError(f"no C++ compiler: {named or ', '.join(_COMPILERS)} not found")


def _compile(toolchain: Toolchain, sources: LibrarySources, scratch: Path) -> Path:
    """One object a source, all at once, then the library."""
    units = sorted(sources.folder.glob("*.cpp"))
    objects = [scratch / f"{unit.stem}.o" for unit in units]
    flags = (*toolchain.flags, *sources.flags)
    _run_together(
        [
            [toolchain.compiler, *flags, sources.levels.get(unit.stem, "-O2"), "-c", str(unit), "-o", str(made)]
            for unit, made in zip(units, objects, strict=True)
        ],
        scratch,
    )
    library = scratch / f"{sources.name}.so"
    _run([toolchain.compiler, "-shared", *map(str, objects), *sources.linked, "-o", str(library)], scratch)
    return library


def _run(command: Sequence[str], folder: Path) -> str:
    return _run_together([command], folder)


def _run_together(commands: Sequence[Sequence[str]], folder: Path) -> str:
    """Output of commands that run at once.

    Raises:
        CannotCompileError: one has failed; the text holds its message.
    """
    environment = {**os.environ, "TMPDIR": str(folder), "LC_ALL": "C"}
    running = []
    try:
        for command in commands:
            running.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                )
            )
    except OSError as error:
        for process in running:
            process.kill()
        raise CannotCompileError(f"{command[0]}: {error}") from error
    finally:
        outputs = [process.communicate()[0] for process in running]
    for command, process, output in zip(commands, running, outputs, strict=True):
        if process.returncode:
            message = output.strip()[:_SHOWN_CHARACTERS]
            raise CannotCompileError(f"{command[0]} ended with {process.returncode}: {message}")
    return "".join(outputs)
