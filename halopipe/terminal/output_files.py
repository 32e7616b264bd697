"""The files that a verb is going to write, looked at before its work starts, and its own until it ends.

    with claimed([output, trace], inputs=[plan]):
        ...

Each is tried, also where folders are still to be made; none is a file that the verb also reads; and while one process
writes a file, no other that asks does so too: a lock ``.NAME.lock`` beside it, held by the kernel for as long as its
owner lives, names its process and host.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from planner.ir.errors import MissingFileError, UsageError
from planner.ir.files import open_plain, require_writable, same_file

_MOST_OWNER_BYTES = 500
_NO_ROOM = ("make room there", "-o another place")
_POLL_S = 0.02

_CHECKPOINT = re.compile(r"step-[0-9]+(\.tmp|\.damaged-[0-9]+)?")
"""Names that are made in a folder of checkpoints, see :mod:`runtime.checkpoint.folders`."""

_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
"""Where launchers say which process of a job this is: torchrun, those of MPI, Slurm."""


@contextlib.contextmanager
def claimed(
    outputs: Iterable[str | Path | None],
    inputs: Iterable[str | Path | None] = (),
    folders: Iterable[str | Path | None] = (),
    replaced: Iterable[str | Path | None] = (),
) -> Iterator[None]:
    """Holds ``outputs``, and ``folders`` that will be written into, while its body runs.

    Of the ranks of one job, rank 0 alone writes and hence claims.

    Args:
        outputs: a folder of theirs may be missing where the verb makes it (:func:`made`).
        folders: made where they are missing.
        replaced: inputs that the verb writes anew; they are tried.

    Raises:
        UsageError: an output is an input as well, or a checkpoint's; or another process is about to write it.
        MissingFileError: one cannot be written.
    """
    if next((os.environ[name] for name in _RANKS if name in os.environ), "0") != "0":
        yield
        return
    sources = [path for path in inputs if path is not None]
    wanted = [Path(path) for path in outputs if path is not None]
    for path in wanted:
        for source in sources:
            if same_file(path, source):
                raise UsageError(f"{path} is read, and would be replaced by the result", [], ["-o another name"])
        _require_no_checkpoint(path)
    require_writable(*wanted, *replaced)
    into = [Path(os.path.realpath(path)) for path in folders if path is not None]
    for path in into:
        _require_folder(path)
    with contextlib.ExitStack() as held:
        for path in dict.fromkeys(Path(os.path.realpath(path)) for path in wanted):
            if not path.exists() or stat.S_ISREG(path.stat().st_mode):
                held.enter_context(_lock(path))
        for path in dict.fromkeys(into):
            if path.parent.is_dir():
                held.enter_context(_lock(path))
        yield


def require_once(paths: Sequence[Path], what: str) -> None:
    """Raises :class:`UsageError` where two paths lead to one file, of which each is ``what``."""
    for place, path in enumerate(paths):
        twice = [other for other in paths[:place] if path == other or same_file(path, other)]
        if twice:
            named = str(path) if str(path) == str(twice[0]) else f"{path}, which is {twice[0]},"
            raise UsageError(f"{named} is given twice", [], [f"name each {what} once"])


def made(path: Path | None) -> Path | None:
    """A path whose folder is made where it is missing: nothing to claim as long as it is, but it is tried.

    Raises:
        MissingFileError: the folder cannot be made.
        UsageError: it would be, or be in, a checkpoint.
    """
    if path is None or path.parent.exists():
        return path
    _require_no_checkpoint(path)
    _require_folder(path.parent)
    return None


def _require_no_checkpoint(path: Path) -> None:
    """Refuses a file in, or in the place of, one of the checkpoints of a folder: it would count as a damaged one.

    Raises:
        UsageError: it would be there.
    """
    real = Path(os.path.realpath(path))
    for place in (real, *real.parents):
        if _CHECKPOINT.fullmatch(place.name) and next(place.parent.glob("step-*/manifest.sha256"), None) is not None:
            what = f"{place.parent} is a folder of checkpoints, and {place.name} the name of one"
            raise UsageError(f"{path} would be taken for a checkpoint", [what], [f"a file elsewhere: {real.name}"])


def _require_folder(path: Path) -> None:
    """Raises :class:`MissingFileError` where no file can be written into the folder, or it cannot be made."""
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise MissingFileError(f"cannot write into {path}", [f"{there} is no folder"], ["name another folder"])
    try:
        require_writable(there / f".halopipe-{os.getpid()}")
    except MissingFileError as error:
        raise MissingFileError(f"cannot write into {path}", error.details, ["name another folder"]) from None


@contextlib.contextmanager
def in_turn(path: Path, patience_s: float) -> Iterator[None]:
    """Holds a file that is read and written anew, once others that do so are done.

    Raises:
        UsageError: another process holds it for longer.
        MissingFileError: nothing can be written beside it.
    """
    ends_s = time.monotonic() + patience_s
    real = Path(os.path.realpath(path))
    with contextlib.ExitStack() as held:
        while True:
            try:
                held.enter_context(_lock(real))
                break
            except UsageError:
                if time.monotonic() > ends_s:
                    raise
            time.sleep(_POLL_S)
        yield


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    name = path.with_name(f".{path.name[:200]}.lock")
    handle = _locked(name, path)
    try:
        try:
            os.ftruncate(handle, 0)
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
        except OSError as error:  # where these few bytes have no room, nor has the result
            raise MissingFileError(f"cannot write {path}", [error.strerror or str(error)], _NO_ROOM) from None
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)  # still held: who waits for this file sees that it is gone
        os.close(handle)


def _locked(name: Path, path: Path) -> int:
    """The lock file, open and held; a file that its owner left behind is held by nobody."""
    while True:
        try:
            handle = open_plain(name, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise MissingFileError(f"cannot write {name}", [error.strerror or str(error)]) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(handle, _MOST_OWNER_BYTES).decode("utf-8", "replace") or "another process"
            os.close(handle)
            raise UsageError(
                f"{path.name} is being written by another run",
                [f"{owner} has claimed {path}"],
                ["wait until it ends", "-o another name, or another folder"],
            ) from None
        if _is_at(handle, name):
            return handle
        os.close(handle)


def _is_at(handle: int, name: Path) -> bool:
    try:
        named = os.stat(name)
        here = os.fstat(handle)
    except FileNotFoundError:
        return False
    return (named.st_dev, named.st_ino) == (here.st_dev, here.st_ino)
