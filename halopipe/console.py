"""Where words go: results to stdout, progress and remarks to stderr.

Names come from files, and a terminal obeys control characters: what is not a character to be seen is written as its
escape of JSON, here and nowhere else.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
"""Control characters but for tab and line feed, what changes the direction of writing, and halves of characters."""


def visible(text: str) -> str:
    """``text`` with the escapes of what a terminal would obey and nobody would see; those are JSON's, too."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def emit(text: str) -> None:
    """Writes a result to stdout; a reader that has had enough (``| head``) is no error."""
    shown = visible(text)
    try:
        sys.stdout.write(shown if shown.endswith("\n") else f"{shown}\n")
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
    sys.stderr.write(f"{visible(text)}\n")
    sys.stderr.flush()


def wrote(path: str | Path, next_step: str = "") -> None:
    """Says what file was written, and what may be done with it."""
    remark(f"wrote {path}" + (f"; next: {next_step}" if next_step else ""))
