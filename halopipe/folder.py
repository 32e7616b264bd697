"""The folder of a job: there while it runs, gone afterwards whatever happens."""

from __future__ import annotations

import contextlib
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType


@contextlib.contextmanager
def job_folder() -> Iterator[Path]:
    """A folder that is removed at the end, also when the process is told to end."""
    with tempfile.TemporaryDirectory(prefix="halopipe-") as name, _ended_by_exception():
        yield Path(name)


@contextlib.contextmanager
def _ended_by_exception() -> Iterator[None]:
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
