"""Folders for temporary files that are gone with their process; after one that was killed, with the next that is made.

Whoever makes a folder holds a lock in it, which the operating system lets go of when that process, and those that it
has forked, end in any way.  Whoever makes the next one removes what this user's processes of this host have left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from planner.ir.files import open_plain

_PREFIX = "halopipe-"

OWNER = f"owner-{socket.gethostname()}"
"""The file in a folder that is locked while its owner runs; other hosts may not see that it is."""


@contextlib.contextmanager
def scratch_folder(kind: str = "") -> Iterator[Path]:
    """A folder that is removed at the end, also when the process is told to end; if it is killed, by the next.

    Args:
        kind: a word of its name.
    """
    sweep()
    with (
        contextlib.ExitStack() as held,
        tempfile.TemporaryDirectory(prefix=_prefix(kind)) as name,
        ended_by_exception(),
    ):
        held.callback(os.close, _claim(Path(name)))
        yield Path(name)


def lasting_folder(kind: str = "") -> Path:
    """A folder that is this process's, and that of its forks, until all have ended; it removes it, or the next does."""
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=_prefix(kind)))
    _claim(folder)
    return folder


def sweep() -> None:
    """Removes the folders of this user whose owners are gone: nobody holds their locks any more.

    The folder of all of them is everybody's: what another user puts there is not opened.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            if folder.lstat().st_uid != os.geteuid():
                continue
            place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK)
            opened.callback(os.close, place)
            if os.fstat(place).st_uid != os.geteuid():  # it is another one by now
                continue
            owner = open_plain(OWNER, folder=place)
            opened.callback(os.close, owner)
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)


@contextlib.contextmanager
def ended_by_exception() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that what must be cleaned up is; only the main thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _prefix(kind: str) -> str:
    return f"{_PREFIX}{kind}-" if kind else _PREFIX


def _claim(folder: Path) -> int:
    """A handle that holds the lock of a folder, under a name that it has only once it is held."""
    handle = os.open(folder / "new", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: nobody sweeps there
        fcntl.flock(handle, fcntl.LOCK_EX)
        (folder / "new").rename(folder / OWNER)
    return handle
