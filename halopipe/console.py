"""Where words go: results to stdout, progress and remarks to stderr."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any


def emit(text: str) -> None:
    """Writes a result to stdout; a reader that has had enough (``| head``) is no error."""
    try:
        sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
        sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.EPIPE:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit is silent too


def emit_json(value: Any) -> None:
    """Writes plain data to stdout as JSON."""
    emit(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def remark(text: str) -> None:
    """Writes a line for people to stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def wrote(path: str | Path, next_step: str = "") -> None:
    """Says what file was written, and what may be done with it."""
    remark(f"wrote {path}" + (f"; next: {next_step}" if next_step else ""))
