"""Files as bytes: what is read ends soon whatever the path is, what is written replaces nothing but regular files.

Reading: regular files and pipes that somebody writes to, up to :data:`MOST_BYTES`.  A device, a folder, a pipe that is
silent for :data:`SILENCE_S` seconds and a larger file are refused by name.  What processes leave for one another, where
others may write as well, is opened by :func:`open_plain`: a regular file in its own place, and no wait.

Writing: a regular file is replaced in one move and keeps its mode (and owner, where that is ours to give); a link stays
and its target is replaced; a device or a named pipe is written to; a folder is refused.
"""

from __future__ import annotations

import codecs
import contextlib
import difflib
import errno
import json
import os
import select
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from planner.ir.errors import CorruptFileError, MissingFileError

MOST_BYTES = 128 * 2**20
"""Of a file that is read; profiles of the largest networks are a tenth of that."""

SILENCE_S = 1.0


def read_bytes(path: str | Path, most_bytes: int = MOST_BYTES) -> bytes:
    """What the file holds.

    Raises:
        MissingFileError: it is not there, no file, or cannot be read.
        CorruptFileError: it holds more than ``most_bytes``.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise _unreadable(path, error) from None
    try:
        kind = os.fstat(handle)
        if not stat.S_ISREG(kind.st_mode) and not stat.S_ISFIFO(kind.st_mode):
            raise MissingFileError(f"cannot read {path}", [f"it is {_kind(kind.st_mode)}, a file is needed"])
        if kind.st_size > most_bytes:
            raise _too_large(path, f"{kind.st_size} bytes", most_bytes)
        return _drained(handle, path, most_bytes, is_pipe=stat.S_ISFIFO(kind.st_mode))
    except OSError as error:
        raise _unreadable(path, error) from None
    finally:
        os.close(handle)


def read_text(path: str | Path, most_bytes: int = MOST_BYTES) -> str:
    """The file as UTF-8 text, without a byte-order mark.

    Raises:
        MissingFileError, CorruptFileError: as :func:`read_bytes`; it is not UTF-8, or holds a null character.
    """
    data = read_bytes(path, most_bytes).removeprefix(codecs.BOM_UTF8)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptFileError(f"{path} is not UTF-8 text", [f"byte {error.start}: {error.reason}"]) from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise CorruptFileError(f"{path} is not text", [f"line {line} holds a null character"])
    return text.replace("\r\n", "\n")


def parse_json(text: str | bytes, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """What JSON of any origin says; who reads it sees whether that makes sense.

    Raises:
        ValueError: it is none, or more than Python reads; ``json.JSONDecodeError`` says where.
    """
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        if str(error).startswith("Exceeds the limit"):  # of int(), for thousands of digits
            raise ValueError("a number has too many digits") from None
        raise


def open_plain(path: str | Path, flags: int = os.O_RDONLY, folder: int | None = None) -> int:
    """A regular file, opened without a wait and through no link; the caller closes it.

    Args:
        flags: as of ``os.open``; a file that they make is this user's alone.
        folder: an open one that ``path`` is looked for in.

    Raises:
        OSError: it is not there, or something else.
    """
    careful = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY
    handle = os.open(path, flags | careful, 0o600, dir_fd=folder)
    kind = os.fstat(handle).st_mode
    if not stat.S_ISREG(kind):
        os.close(handle)
        raise OSError(errno.EINVAL, f"it is {_kind(kind)}, no regular file", str(path))
    return handle


def read_plain(path: str | Path, most_bytes: int = MOST_BYTES) -> bytes:
    """What the regular file holds, up to ``most_bytes``.

    Raises:
        OSError: as :func:`open_plain`.
    """
    with os.fdopen(open_plain(path), "rb") as file:
        return file.read(most_bytes)


def write_text(path: str | Path, text: str) -> None:
    """Makes ``text`` what the file at ``path`` holds; see :func:`write_bytes`.

    Raises:
        CorruptFileError: it has half a character, as of a name that is not UTF-8.
    """
    write_bytes(path, _encoded(path, text))


def write_texts(texts: Mapping[Path, str]) -> None:
    """Makes each text what the file of its path holds; regular files are replaced once all texts are written.

    Raises:
        CorruptFileError: as of :func:`write_text`.
    """
    with contextlib.ExitStack() as written:
        for path, text in texts.items():
            stream = written.enter_context(replaced(path))
            stream.write(_encoded(path, text))
            stream.flush()


def _encoded(path: str | Path, text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        around = text[max(0, error.start - 20) : error.end + 20]
        raise CorruptFileError(f"cannot write {path}", [f"what it would hold is not UTF-8: {around!r}"]) from None


def write_bytes(path: str | Path, data: bytes) -> None:
    """Makes ``data`` what the file at ``path`` holds; see :func:`replaced`."""
    with replaced(path) as stream:
        stream.write(data)


@contextlib.contextmanager
def replaced(path: str | Path) -> Iterator[BinaryIO]:
    """A stream whose bytes are what the file at ``path`` holds afterwards; on failure a regular file stays as it was.

    Raises:
        MissingFileError: the folder is missing, or it cannot be written; the text says why.
    """
    target, old = _target(path)
    try:
        if old is not None and not stat.S_ISREG(old.st_mode):
            with _through(target) as stream:
                yield stream
        else:
            with _replacing(target, old) as stream:
                yield stream
    except OSError as error:
        raise _unwritable(path, error) from None


def require_writable(*paths: str | Path | None) -> None:
    """Tries each path before work starts whose result is to be written there.

    Raises:
        MissingFileError: one could not be written.
    """
    for path in paths:
        if path is None:
            continue
        target, old = _target(path)
        try:
            if old is None or stat.S_ISREG(old.st_mode):
                handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".halopipe.", suffix=".tmp")
                os.close(handle)
                os.unlink(temporary)
            elif not os.access(target, os.W_OK):
                raise PermissionError(13, os.strerror(13))
        except OSError as error:
            raise _unwritable(path, error) from None


def same_file(first: str | Path, second: str | Path) -> bool:
    """Whether two paths lead to one file that is there."""
    try:
        return os.path.samefile(first, second)
    except (OSError, ValueError):
        return False


def _target(path: str | Path) -> tuple[Path, os.stat_result | None]:
    """Where links lead, and what is there now."""
    try:
        target = Path(os.path.realpath(path))
        old = os.stat(target)
    except FileNotFoundError:
        return target, None
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from None
    if stat.S_ISDIR(old.st_mode) or stat.S_ISSOCK(old.st_mode):
        text = f"it is {_kind(old.st_mode)}, which is not replaced"
        raise MissingFileError(f"cannot write {path}", [text], ["name a file"])
    return target, old


@contextlib.contextmanager
def _replacing(target: Path, old: os.stat_result | None) -> Iterator[BinaryIO]:
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:100]}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        if old is not None:
            if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                with contextlib.suppress(OSError):  # only root gives files away
                    os.chown(temporary, old.st_uid, old.st_gid)
            os.chmod(temporary, stat.S_IMODE(old.st_mode))
        else:
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


@contextlib.contextmanager
def _through(target: Path) -> Iterator[BinaryIO]:
    """To a device or pipe; a pipe that nobody reads is an error rather than a wait."""
    handle = os.open(target, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    os.set_blocking(handle, True)
    with os.fdopen(handle, "wb") as stream:
        yield stream


def _drained(handle: int, path: str | Path, most_bytes: int, *, is_pipe: bool) -> bytes:
    pieces: list[bytes] = []
    total = 0
    while True:
        if is_pipe and not select.select([handle], [], [], SILENCE_S)[0]:
            raise MissingFileError(f"cannot read {path}", [f"nobody has written to this pipe for {SILENCE_S:g} s"])
        piece = os.read(handle, 2**20)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
        total += len(piece)
        if total > most_bytes:
            raise _too_large(path, "it does not end there", most_bytes)


def _too_large(path: str | Path, what: str, most_bytes: int) -> CorruptFileError:
    return CorruptFileError(f"{path} is too large", [f"{what}; {most_bytes} bytes are the most that is read"])


def _unreadable(path: str | Path, error: OSError | ValueError) -> MissingFileError:
    return MissingFileError(f"cannot read {path}", [_why(error)], _near(path))


def _unwritable(path: str | Path, error: OSError | ValueError) -> MissingFileError:
    return MissingFileError(f"cannot write {path}", [_why(error)])


def _near(path: str | Path) -> list[str]:
    """A file of nearly that name, as what may have been meant."""
    try:
        names = [entry.name for entry in Path(path).parent.iterdir()]
    except (OSError, ValueError):
        return []
    near = difflib.get_close_matches(Path(path).name, names, n=1)
    return [f"did you mean {Path(path).parent / near[0]}?"] if near and near[0] != Path(path).name else []


def _why(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISSOCK, "a socket"), (stat.S_ISFIFO, "a pipe"))
    return next((name for test, name in kinds if test(mode)), "a device")
